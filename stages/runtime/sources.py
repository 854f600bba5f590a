"""Where rows of tokens come from. Each source reads only the rows that are asked for."""

from __future__ import annotations

import sysconfig
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np

from stages.artifacts.errors import DataError


class Rows(Protocol):
    """Rows of `seq_len` tokens. `count` is None where there is no end."""

    @property
    def count(self) -> int | None: ...

    @property
    def description(self) -> str: ...

    def read(self, first: int, count: int) -> np.ndarray:
        """int64 [count, seq_len]."""
        ...


class ByteRows:
    """Files end to end as bytes, cut into rows; what is left at the end is not used."""

    def __init__(self, files: list[Path], seq_len: int) -> None:
        self._files = files
        self._ends = list(accumulate(file.stat().st_size for file in files))
        self._seq_len = seq_len
        self.count = (self._ends[-1] if self._ends else 0) // seq_len
        self.description = f"the text ({len(files)} files, {self._ends[-1] if self._ends else 0} bytes)"

    def read(self, first: int, count: int) -> np.ndarray:
        start, length = first * self._seq_len, count * self._seq_len
        content = np.frombuffer(self._bytes(start, length), dtype=np.uint8)
        return content.astype(np.int64).reshape(count, self._seq_len)

    def _bytes(self, start: int, length: int) -> bytes:
        pieces = bytearray()
        index = bisect_right(self._ends, start)
        while len(pieces) < length:
            file, begin = self._files[index], self._ends[index - 1] if index else 0
            with file.open("rb") as opened:
                opened.seek(max(start - begin, 0))
                piece = opened.read(min(length - len(pieces), self._ends[index] - max(start, begin)))
            if not piece and self._ends[index] > max(start, begin):
                raise DataError(f"{file} has become shorter while training", key="data.path", found=str(file))
            pieces += piece
            index += 1
        return bytes(pieces)


class NpyRows:
    """An .npy file of int64 [rows, seq_len], read row by row, never unpickled."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self.description = str(path)
        try:
            # a map reads the header (allow_pickle is off) and no content; rows are copied out of the file
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise self._refuse(f"{path} cannot be read: {error}", type(error).__name__) from error
        if not isinstance(array, np.memmap) or array.dtype != np.dtype("<i8") or array.ndim != 2:
            found = f"{getattr(array, 'dtype', type(array))} {getattr(array, 'shape', '')}"
            raise self._refuse(f"{path} is {found}", found)
        if array.shape[1] != seq_len:
            raise DataError(
                f"{path} has rows of {array.shape[1]} tokens and data.seq_len={seq_len}; give "
                f"data.seq_len={array.shape[1]}",
                key="data.seq_len",
                found=str(seq_len),
                expected=str(array.shape[1]),
            )
        if not array.flags.c_contiguous:
            raise self._refuse(f"{path} is in Fortran order", "Fortran order")
        self.count = int(array.shape[0])
        self._path, self._offset, self._seq_len = path, array.offset, seq_len

    def read(self, first: int, count: int) -> np.ndarray:
        row_bytes = 8 * self._seq_len
        with self._path.open("rb") as file:
            file.seek(self._offset + first * row_bytes)
            content = file.read(count * row_bytes)
        if len(content) != count * row_bytes:
            raise DataError(f"{self._path} has become shorter while training", key="data.path")
        return np.frombuffer(content, dtype="<i8").astype(np.int64).reshape(count, self._seq_len)

    def _refuse(self, what: str, found: str) -> DataError:
        expected = "an .npy file of int64 [rows, seq_len] in C order"
        return DataError(f"{what}; expected {expected}", key="data.path", found=found, expected=expected)


class RandomRows:
    """Uniform tokens; a row depends on the seed and its number alone."""

    count = None
    description = "random data"

    def __init__(self, vocabulary: int, seq_len: int, seed: int) -> None:
        self._vocabulary, self._seq_len, self._seed = vocabulary, seq_len, seed

    def read(self, first: int, count: int) -> np.ndarray:
        rows = [np.random.default_rng([self._seed, first + row]) for row in range(count)]
        return np.stack([row.integers(self._vocabulary, size=self._seq_len, dtype=np.int64) for row in rows])


class TokenRows:
    """A file of int32 tokens end to end, cut into rows; what is left at the end is not used."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self._bytes = ByteRows([path], 4 * seq_len)
        self._seq_len = seq_len
        self.count = self._bytes.count
        self.description = f"the tokenized text {path}"

    def read(self, first: int, count: int) -> np.ndarray:
        content = self._bytes.read(first, count).astype(np.uint8).tobytes()
        return np.frombuffer(content, dtype="<i4").astype(np.int64).reshape(count, self._seq_len)


def text_files(path: str) -> list[Path]:
    """The files of `path` (a file or a folder) in order of their names; "": Python's own sources.

    Raises:
        DataError: There is no such file, or the folder has none.
    """
    if not path:
        return _standard_library()
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        expected = "a text file or a folder of them"
        message = f"data.path={path} does not exist; expected {expected}"
        raise DataError(message, key="data.path", found=path, expected=expected)
    files = sorted(
        file
        for file in root.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)
    )
    if not files:
        raise DataError(f"data.path={path} has no files", key="data.path", found=path, expected="text files")
    return files


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = ("site-packages", "dist-packages", "test", "tests", "__pycache__")
    files = sorted(
        file
        for file in root.rglob("*.py")
        if not any(part in skipped for part in file.relative_to(root).parts)
    )
    if not files:
        message = f"Python's standard library has no sources in {root}; give data.path=FILE_OR_FOLDER"
        raise DataError(message, key="data.path", found=str(root), expected="text")
    return files
