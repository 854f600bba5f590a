"""Text with one label a row, for classification: the files of each folder are a class.

    data.path/spam/*.txt, data.path/ham/*.txt      two classes, "ham" (0) and "spam" (1)

A file is cut into rows of `seq_len` tokens, with the tokenizer's first and last token around each
where it has them; what is left at its end is padded. Rows come in an order drawn from the seed, so
that classes are mixed. A short process of its own writes them as records of int32 (label, length,
tokens), under a key of texts and tokenizer; the training process reads the records of one batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import DataError
from stages.artifacts.store import default_folder, describe_files, key_of
from stages.runtime.sources import TokenRows, text_files

_BYTES = "bytes"
_HEAD = 2  # label and length before a record's tokens


class LabelledRows:
    """Rows of a file of records, in an order drawn from `seed`."""

    def __init__(self, path: Path, seq_len: int, seed: int) -> None:
        self._records = TokenRows(path, _HEAD + seq_len)
        self.count = self._records.count
        self.description = "the labelled text"
        self._order = np.random.default_rng(seed).permutation(self.count)

    def read(self, first: int, count: int) -> np.ndarray:
        """int64 [count, 2 + seq_len]: label, tokens that are not padding, tokens."""
        rows = [self._records.read(int(row), 1) for row in self._order[first : first + count]]
        return np.concatenate(rows)


def tensors_of(records: np.ndarray, names: list[str]) -> dict[str, torch.Tensor]:
    """The inputs called `names` from `records`: labels [rows], all else [rows, seq_len]."""
    labels, lengths, tokens = records[:, 0], records[:, 1], records[:, _HEAD:]
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    known = {
        "labels": labels,
        "attention_mask": (positions < lengths[:, None]).astype(np.int64),
        "token_type_ids": np.zeros_like(tokens),
        "position_ids": positions,
    }
    return {name: torch.from_numpy(known.get(name, tokens).copy()) for name in names}


def labelled_rows(graph: g.RegionGraph, path: str, tokenizer: str, seq_len: int, seed: int) -> LabelledRows:
    """Rows of the folders in `path` ("": the packages of Python's standard library), made now or cached.

    Raises:
        DataError: There are not two classes, the tokenizer fails, or the model has too few labels or
            takes no mask.
    """
    classes = _classes(path)
    _check_model(graph, len(classes))
    folder = Path(tokenizer)
    if tokenizer != _BYTES and not folder.is_dir():
        expected = "bytes, or the folder of a saved Hugging Face tokenizer"
        message = f"data.tokenizer={tokenizer} is no folder; expected {expected}"
        raise DataError(message, key="data.tokenizer", found=tokenizer, expected=expected)
    texts = {
        name: [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        for name, files in classes.items()
    }
    described = [tokenizer] if tokenizer == _BYTES else [str(folder.resolve()), describe_files(folder)]
    key = key_of({"labelled": texts, "tokenizer": described, "seq_len": seq_len})
    target = default_folder() / "tokens" / f"{key}.i32"
    if not target.exists():
        print(f"data: reading {sum(map(len, classes.values()))} files of {len(classes)} classes", flush=True)
        _write_apart(
            {name: list(map(str, files)) for name, files in classes.items()}, tokenizer, target, seq_len
        )
    return LabelledRows(target, seq_len, seed)


def _classes(path: str) -> dict[str, list[Path]]:
    """The files of each class, by name, in order of the names."""
    files = text_files(path)
    root = Path(path) if path else Path(os.path.commonpath([str(file.parent) for file in files]))
    found: dict[str, list[Path]] = {}
    for file in files:
        parts = file.relative_to(root).parts if file != root else ()
        if len(parts) > 1:
            found.setdefault(parts[0], []).append(file)
    if len(found) < 2:
        expected = "a folder with at least two folders of text files, one for each class"
        message = f"data.path={path} has {len(found)} classes; expected {expected}"
        raise DataError(message, key="data.path", found=str(len(found)), expected=expected)
    return dict(sorted(found.items()))


def _check_model(graph: g.RegionGraph, classes: int) -> None:
    if graph.export_config is not None:
        labels = len(json.loads(graph.export_config).get("id2label", (0, 1)))
        if labels < classes:
            raise DataError(
                f"the data has {classes} classes and the model {labels} labels; give "
                f"+model.arguments.num_labels={classes}",
                key="model.arguments.num_labels",
                found=str(labels),
                expected=str(classes),
            )
    if not any(spec.name == "attention_mask" for spec in graph.inputs):
        expected = "model.inputs=[input_ids,attention_mask,labels]"
        message = f"rows are padded and the model is given no attention_mask; give {expected}"
        raise DataError(message, key="model.inputs", found="no attention_mask", expected=expected)


def _write_apart(classes: dict[str, list[str]], tokenizer: str, target: Path, seq_len: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "stages.runtime.labelled", tokenizer, str(target), str(seq_len)]
    code = subprocess.run(command, input=json.dumps(classes).encode(), check=False).returncode
    if code != 0:
        message = f"reading the labelled text failed (exit code {code}); the output above says why"
        raise DataError(message, key="data.tokenizer", found=tokenizer, expected="a tokenizer that loads")


def write_records(tokenizer: Any, classes: dict[str, list[str]], target: Path, seq_len: int) -> None:
    """Writes the records of all classes to `target` under a temporary name, then renames it.

    Args:
        tokenizer: A Hugging Face tokenizer; None: bytes.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as out:
            for label, files in enumerate(classes.values()):
                for file in files:
                    for length, tokens in _pieces(tokenizer, Path(file), seq_len):
                        array("i", [label, length, *tokens]).tofile(out)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _pieces(tokenizer: Any, file: Path, seq_len: int) -> Iterator[tuple[int, list[int]]]:
    """Rows of one file with the number of their tokens before padding."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if tokenizer is None:
        tokens, first, last, padding = list(text.encode()), [], [], 0
    else:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        first = [token for token in (tokenizer.cls_token_id,) if token is not None]
        last = [token for token in (tokenizer.sep_token_id,) if token is not None]
        padding = tokenizer.pad_token_id or 0
    width = max(1, seq_len - len(first) - len(last))
    for start in range(0, len(tokens), width):
        row = [*first, *tokens[start : start + width], *last][:seq_len]
        yield len(row), row + [padding] * (seq_len - len(row))


def main() -> None:
    name, target, seq_len = sys.argv[1:]
    tokenizer = None
    if name != _BYTES:
        from transformers import AutoTokenizer  # only in this process

        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    write_records(tokenizer, json.loads(sys.stdin.read()), Path(target), int(seq_len))


if __name__ == "__main__":
    main()
