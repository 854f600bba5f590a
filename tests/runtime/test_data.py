"""Batches: order, short last batch, starting again, positions, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts import graph as g
from stages.artifacts.errors import DataError
from stages.config import DataConfig, RunConfig
from stages.runtime.data import RowBatches, open_batches, vocabulary_size
from stages.runtime.sources import ByteRows, NpyRows, RandomRows, TokenRows, text_files
from stages.runtime.tokenizing import tokenize_files, tokenized_rows


def save_tokens(path: Path, tokens: np.ndarray) -> Path:
    np.save(path, tokens)
    return path


def counted(path: Path, rows: int, seq_len: int) -> NpyRows:
    tokens = np.arange(rows * seq_len, dtype=np.int64).reshape(rows, seq_len)
    return NpyRows(save_tokens(path, tokens), seq_len)


def graph_with(inputs: list[str], vocabulary: int | None = None, dtype: str = "int64") -> g.RegionGraph:
    """A graph with nothing in it but inputs and, if asked for, an embedding of the first one."""
    specs = [g.InputSpec(name, ["kwargs", name], g.TensorSpec([2, 4], [4, 1], dtype)) for name in inputs]
    nodes, parameters = [], []
    if vocabulary is not None:
        parameters = [
            g.Parameter("wte", ["wte"], g.TensorSpec([vocabulary, 3], [3, 1], "float32"), "parameter")
        ]
        nodes = [
            g.Node("view", "aten.view.default", [g.Ref(inputs[0]), [-1, 4]]),
            g.Node("embedding", "aten.embedding.default", [g.Ref("wte"), g.Ref("view")]),
        ]
    return g.RegionGraph(
        "m", "train", "fp32", {}, specs, [], "loss", nodes, [], [], parameters, g.Initial("replay")
    )


def data_config(**values: object) -> RunConfig:
    return RunConfig(data=DataConfig(batch_size=2, **values))  # type: ignore[arg-type]


def test_batch_i_is_rows_i_times_b_and_the_short_last_one_is_followed_by_the_first(tmp_path: Path) -> None:
    batches = RowBatches(counted(tmp_path / "t.npy", 5, 3), 2, ["input_ids", "labels"])
    first_tokens = [batches.next()["input_ids"][:, 0].tolist() for _ in range(4)]
    assert first_tokens == [[0, 3], [6, 9], [12], [0, 3]]


@given(rows=st.integers(1, 9), size=st.integers(1, 5), position=st.integers(0, 40))
def test_a_position_that_is_set_gives_what_would_have_come(rows: int, size: int, position: int) -> None:
    def batches() -> RowBatches:
        source = RandomRows(50, 2, seed=1)
        source.count = rows  # type: ignore[assignment]
        return RowBatches(source, size, ["input_ids"])

    walked, jumped = batches(), batches()
    for _ in range(position):
        walked.next()
    jumped.seek(position)
    assert walked.position == jumped.position == position
    assert torch.equal(walked.next()["input_ids"], jumped.next()["input_ids"])


def test_labels_are_the_inputs_in_a_storage_of_their_own(tmp_path: Path) -> None:
    batch = RowBatches(counted(tmp_path / "t.npy", 2, 3), 2, ["input_ids", "labels"]).next()
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
    assert batch["labels"].dtype == torch.int64


def test_masks_are_ones_types_zeros_and_positions_counted(tmp_path: Path) -> None:
    names = ["input_ids", "attention_mask", "token_type_ids", "position_ids"]
    batch = RowBatches(counted(tmp_path / "t.npy", 2, 3), 2, names).next()
    assert batch["attention_mask"].tolist() == [[1, 1, 1]] * 2
    assert batch["token_type_ids"].tolist() == [[0, 0, 0]] * 2
    assert batch["position_ids"].tolist() == [[0, 1, 2]] * 2


def test_random_rows_depend_on_seed_and_row_and_leave_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    one, other = RandomRows(100, 8, seed=1), RandomRows(100, 8, seed=2)
    assert np.array_equal(one.read(0, 4)[2:], one.read(2, 2))
    assert not np.array_equal(one.read(0, 1), other.read(0, 1))
    assert one.read(0, 9).max() < 100
    assert torch.equal(torch.get_rng_state(), before)


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=6), st.integers(1, 5), st.data())
def test_bytes_are_the_files_end_to_end(contents: list[bytes], seq_len: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(index) for index in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        rows = ByteRows(files, seq_len)
        joined = b"".join(contents)
        assert rows.count == len(joined) // seq_len
        if rows.count:
            first = data.draw(st.integers(0, rows.count - 1))
            count = data.draw(st.integers(1, rows.count - first))
            read = rows.read(first, count)
            assert read.shape == (count, seq_len)
            assert bytes(read.astype(np.uint8).ravel()) == joined[first * seq_len : (first + count) * seq_len]


def test_the_default_text_is_pythons_own_sources_sorted() -> None:
    files = text_files("")
    root = Path(sysconfig.get_path("stdlib"))
    assert files == sorted(files)
    assert root / "argparse.py" in files
    assert not any("site-packages" in file.parts for file in files)
    assert ByteRows(files, 512).count > 10_000


def test_a_folder_gives_its_visible_files_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", ".hidden/x.txt", ".y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [str(file.relative_to(tmp_path)) for file in text_files(str(tmp_path))] == ["a/z.txt", "b.txt"]


def test_missing_and_empty_texts_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError) as caught:
            text_files(str(path))
        assert caught.value.key == "data.path"


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 4), np.int32),
        np.zeros((2, 4), np.float64),
        np.zeros(8, np.int64),
        np.zeros((2, 2, 2), np.int64),
        np.zeros((2, 4), np.int64, order="F"),
        np.zeros((2, 4), ">i8"),
    ],
)
def test_arrays_of_another_form_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(DataError) as caught:
        NpyRows(save_tokens(tmp_path / "t.npy", array), 4)
    assert caught.value.key == "data.path"


def test_a_pickle_in_an_npy_file_is_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "t.npy"
    np.save(file, np.array([[{"a": 1}]], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        NpyRows(file, 1)


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00"])
def test_files_that_are_no_arrays_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "t.npy"
    file.write_bytes(content)
    with pytest.raises(DataError):
        NpyRows(file, 4)


def test_rows_of_another_length_are_refused_with_the_length_to_give(tmp_path: Path) -> None:
    file = save_tokens(tmp_path / "t.npy", np.zeros((2, 7), np.int64))
    with pytest.raises(DataError, match=r"data\.seq_len=7"):
        NpyRows(file, 4)


def test_text_shorter_than_a_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc")
    with pytest.raises(DataError, match="shorter"):
        open_batches(data_config(name="text", path=str(tmp_path), seq_len=4), graph_with(["input_ids"]))


@pytest.mark.parametrize("wrong", [5, -1])
def test_a_token_outside_the_vocabulary_is_refused_naming_its_row(tmp_path: Path, wrong: int) -> None:
    tokens = np.zeros((4, 3), np.int64)
    tokens[3, 1] = wrong
    file = save_tokens(tmp_path / "t.npy", tokens)
    config = data_config(name="tokens", path=str(file), seq_len=3)
    batches = open_batches(config, graph_with(["input_ids", "labels"], vocabulary=5))
    batches.next()
    with pytest.raises(DataError, match=f"token {wrong} in row 3"):
        batches.next()


def test_the_vocabulary_is_that_of_the_embedding_that_reads_the_tokens() -> None:
    assert vocabulary_size(graph_with(["input_ids"], vocabulary=11)) == 11
    assert vocabulary_size(graph_with(["attention_mask"], vocabulary=11)) is None
    assert vocabulary_size(graph_with(["input_ids"])) is None


def test_a_model_that_takes_no_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="pixels"):
        open_batches(data_config(name="random"), graph_with(["pixels"], dtype="float32"))


def test_evaluation_takes_another_path(tmp_path: Path) -> None:
    save_tokens(tmp_path / "a.npy", np.zeros((2, 3), np.int64))
    save_tokens(tmp_path / "b.npy", np.ones((2, 3), np.int64))
    config = data_config(name="tokens", path=str(tmp_path / "a.npy"), seq_len=3)
    batches = open_batches(config, graph_with(["input_ids"]), path=str(tmp_path / "b.npy"))
    assert batches.next()["input_ids"].tolist() == [[1] * 3] * 2


class WordLengths:
    """Stands for a tokenizer: a word is a token, its length the number."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [len(word) for word in text.split()]}


def test_tokenized_files_are_rows_of_their_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one three\nfourteen x\n")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe yy zz")
    target = tmp_path / "out.i32"
    tokenize_files(WordLengths(), [tmp_path / "a.txt", tmp_path / "b.txt"], target)
    rows = TokenRows(target, 3)
    assert rows.read(0, 2).tolist() == [[3, 5, 8], [1, 2, 2]]
    assert rows.count == 2


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        tokenized_rows([], tmp_path / "none", 4)
    assert caught.value.key == "data.tokenizer"


def test_a_saved_tokenizer_is_used_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "def": 1, "return": 2, "x": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    text = tmp_path / "t.txt"
    text.write_text("def x return x\ndef y return y\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = tokenized_rows([text], folder, 4)
    assert rows.read(0, 2).tolist() == [[1, 3, 2, 3], [1, 0, 2, 0]]
    made = next((tmp_path / "cache").rglob("*.i32"))
    before = made.stat().st_mtime_ns
    tokenized_rows([text], folder, 4)
    assert made.stat().st_mtime_ns == before


def test_the_module_imports_no_transformers() -> None:
    code = "import sys, stages.runtime.data; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
