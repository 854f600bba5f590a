"""Batches for the training loop: text as bytes or tokens, rows of tokens, or random ones.

Batch i is rows i*B to (i+1)*B of the data; the last of a round may be short, then it starts again.
Labels are the inputs: the model shifts them. Only the rows of one batch are in memory, and nothing
here draws from torch's generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import DataError
from stages.config import RunConfig
from stages.runtime.labelled import labelled_rows, tensors_of
from stages.runtime.sources import ByteRows, NpyRows, RandomRows, Rows, text_files
from stages.runtime.tokenizing import tokenized_rows

#: nodes that pass tokens on unchanged
_PASSING = ("view", "reshape", "_to_copy", "to", "clone", "contiguous", "alias", "detach", "unsqueeze")


class Batches(Protocol):
    """An endless sequence of batches with a position that can be saved and set again."""

    @property
    def position(self) -> int:
        """How many batches have been handed out."""
        ...

    def seek(self, position: int) -> None:
        """Makes batch `position` (counted from 0) the next one."""
        ...

    def next(self) -> dict[str, torch.Tensor]:
        """The next batch: int64 [rows, seq_len] by input name.

        Raises:
            DataError: A token lies outside the model's vocabulary.
        """
        ...


class RowBatches:
    """Batches of consecutive rows.

    Args:
        inputs: The model's input names.
        vocabulary: Number of tokens that the model knows; None: not known.
    """

    def __init__(self, rows: Rows, batch_size: int, inputs: list[str], vocabulary: int | None = None) -> None:
        if rows.count == 0:
            raise DataError(f"{rows.description} is shorter than one row of data.seq_len", key="data.seq_len")
        self._rows = rows
        self._batch_size = batch_size
        self._inputs = inputs
        self._vocabulary = vocabulary
        self._position = 0

    @property
    def position(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < 0:
            raise DataError(
                f"data position {position} cannot be set; expected at least 0", found=str(position)
            )
        self._position = position

    def next(self) -> dict[str, torch.Tensor]:
        first, count = self._span(self._position)
        found = self._read(first, count)
        self._position += 1
        return found

    def _read(self, first: int, count: int) -> dict[str, torch.Tensor]:
        tokens = self._rows.read(first, count)
        self._check(tokens, first)
        return {name: _fill(name, tokens) for name in self._inputs}

    def _span(self, position: int) -> tuple[int, int]:
        """First row and number of rows of a batch."""
        total = self._rows.count
        if total is None:
            return position * self._batch_size, self._batch_size
        first = position % -(-total // self._batch_size) * self._batch_size
        return first, min(self._batch_size, total - first)

    def _check(self, tokens: np.ndarray, first: int) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (self._vocabulary is not None and high >= self._vocabulary):
            wrong = low if low < 0 else high
            row = first + int(np.argwhere(tokens == wrong)[0][0])
            end = "" if self._vocabulary is None else f" to {self._vocabulary - 1}, the model's vocabulary"
            raise DataError(
                f"{self._rows.description} has token {wrong} in row {row}; expected tokens from 0{end}. "
                f"Give data made for this model, or a larger vocabulary",
                key="data.path",
                found=str(wrong),
                expected=f"0{end}",
            )


class LabelledBatches(RowBatches):
    """Batches of `LabelledRows`: labels are one number a row."""

    def _read(self, first: int, count: int) -> dict[str, torch.Tensor]:
        found = tensors_of(self._rows.read(first, count), self._inputs)
        for name, tensor in found.items():
            if name == "input_ids":
                self._check(tensor.numpy(), first)
        return found


def _fill(name: str, tokens: np.ndarray) -> torch.Tensor:
    """The tensor for one input: masks are ones, token types zeros, positions counted; all else tokens."""
    if name.endswith("attention_mask"):
        return torch.ones(tokens.shape, dtype=torch.int64)
    if name == "token_type_ids":
        return torch.zeros(tokens.shape, dtype=torch.int64)
    if name == "position_ids":
        return torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous()
    return torch.from_numpy(tokens.copy())  # a storage of its own, which the model may write


def open_batches(config: RunConfig, graph: g.RegionGraph, path: str | None = None) -> RowBatches:
    """The batches that `config.data` asks for.

    Args:
        path: Takes the place of `data.path`, for evaluation.

    Raises:
        DataError: The data is missing, of another form, or too short.
    """
    unfit = [spec.name for spec in graph.inputs if spec.spec.dtype != "int64"]
    if unfit:
        message = (
            f"input {unfit[0]} of the model is no int64 tensor, and data={config.data.name} gives tokens"
        )
        raise DataError(message, key="model.inputs", found=unfit[0], expected="inputs that take tokens")
    vocabulary = vocabulary_size(graph)
    path = config.data.path if path is None else path
    data, inputs = config.data, [spec.name for spec in graph.inputs]
    if data.name == "labelled":
        labelled = labelled_rows(graph, path, data.tokenizer, data.seq_len, config.seed)
        return LabelledBatches(labelled, data.batch_size, inputs, vocabulary)
    return RowBatches(open_rows(config, vocabulary, path), data.batch_size, inputs, vocabulary)


def open_rows(config: RunConfig, vocabulary: int | None, path: str) -> Rows:
    data = config.data
    if data.name == "tokens":
        return NpyRows(Path(path), data.seq_len)
    if data.name == "random":
        # without a known vocabulary, tokens that any byte model knows
        return RandomRows(vocabulary or 256, data.seq_len, config.seed)
    files = text_files(path)
    if data.tokenizer == "bytes":
        return ByteRows(files, data.seq_len)
    return tokenized_rows(files, Path(data.tokenizer), data.seq_len)


def vocabulary_size(graph: g.RegionGraph) -> int | None:
    """Rows of the smallest embedding that reads a token input directly; None when there is none."""
    source: dict[str, str] = {spec.name: spec.name for spec in graph.inputs if _feeds_tokens(spec.name)}
    specs = {parameter.name: parameter.spec for parameter in graph.parameters}
    sizes: list[int] = []
    for node in graph.nodes:
        names = [argument.name for argument in node.args if isinstance(argument, g.Ref)]
        if node.op == "aten.embedding.default" and len(names) == 2 and names[1] in source:
            sizes += _first_size(specs, names[0], g.planned_sizes(graph))
        elif names and names[0] in source and node.op.split(".")[1:2] and node.op.split(".")[1] in _PASSING:
            source[node.name] = source[names[0]]
    return min(sizes, default=None)


def _feeds_tokens(name: str) -> bool:
    return not name.endswith("attention_mask") and name not in ("token_type_ids", "position_ids")


def _first_size(specs: Mapping[str, g.TensorSpec], name: str, symbols: dict[str, int]) -> list[int]:
    return [g.evaluate_size(specs[name].shape[0], symbols)] if name in specs else []
