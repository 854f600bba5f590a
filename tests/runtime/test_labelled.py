"""Folders of texts become rows with one label each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages.artifacts.errors import DataError
from stages.config import DataConfig, ModelConfig, RunConfig
from stages.runtime.data import open_batches
from stages.trace.stage import run

LENGTH = 16
INPUTS = ["input_ids", "attention_mask", "labels"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    for name, text in {"spam": "b" * 40, "ham": "a" * 10, "eggs": "c" * 3}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "one.txt").write_text(text)
    return folder


def config(folder: Path, *, labels: int = 3, inputs: list[str] = INPUTS) -> RunConfig:
    sizes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 256, "num_labels": labels,
    }  # fmt: skip
    return RunConfig(
        model=ModelConfig(
            "bert", "transformers", "transformers.BertForSequenceClassification", "transformers.BertConfig",
            sizes, inputs=inputs,
        ),
        data=DataConfig("labelled", str(folder), batch_size=2, seq_len=LENGTH),
    )  # fmt: skip


def test_rows_carry_the_label_of_their_folder_and_a_mask_of_their_length(texts: Path) -> None:
    settings = config(texts)
    batches = open_batches(settings, run(settings))
    seen = {}
    for _ in range(3):  # five rows: two, two, one
        batch = batches.next()
        assert batch["labels"].shape == batch["input_ids"].shape[:1]
        for tokens, mask, label in zip(*(batch[name] for name in INPUTS), strict=True):
            length = int(mask.sum())
            assert torch.equal(mask, (torch.arange(LENGTH) < length).long())
            assert not tokens[length:].any()
            seen.setdefault(int(label), []).append(bytes(tokens[:length].tolist()).decode())
    assert {label: sorted(rows) for label, rows in seen.items()} == {
        0: ["ccc"], 1: ["a" * 10], 2: ["b" * 8, "b" * LENGTH, "b" * LENGTH],
    }  # fmt: skip


def test_the_order_follows_the_seed_and_the_position(texts: Path) -> None:
    settings = config(texts)
    graph = run(settings)
    first = [open_batches(settings, graph) for _ in range(2)]
    first[1].seek(1)
    first[0].next()
    assert torch.equal(first[0].next()["labels"], first[1].next()["labels"])
    orders = set()
    for seed in range(8):
        batches = open_batches(replace(settings, seed=seed), graph)
        orders.add(tuple(batches.next()["labels"].tolist() + batches.next()["labels"].tolist()))
    assert len(orders) > 1


def test_too_few_labels_no_mask_and_one_class_are_refused(texts: Path) -> None:
    few = config(texts, labels=2)
    with pytest.raises(DataError, match="num_labels=3"):
        open_batches(few, run(few))
    blind = config(texts, inputs=["input_ids", "labels"])
    with pytest.raises(DataError, match="attention_mask"):
        open_batches(blind, run(blind))
    settings = config(texts)
    graph = run(settings)
    settings.data.path = str(texts / "ham")
    with pytest.raises(DataError, match="0 classes"):
        open_batches(settings, graph)
