"""Text to tokens by a saved Hugging Face tokenizer, in a short process of its own.

The training process must not hold transformers. Tokens are kept in the cache folder under a key of
the texts and the tokenizer, as int32 end to end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.artifacts.errors import DataError
from stages.artifacts.store import default_folder, describe_files, key_of
from stages.runtime.sources import TokenRows

_PIECE_BYTES = 1 << 20


def tokenized_rows(files: list[Path], tokenizer: Path, seq_len: int) -> TokenRows:
    """Rows of the tokens of `files`, made now or found in the cache.

    Raises:
        DataError: There is no tokenizer in the folder, or it fails; its process has printed why.
    """
    if not tokenizer.is_dir():
        expected = "bytes, or the folder of a saved Hugging Face tokenizer"
        message = f"data.tokenizer={tokenizer} is no folder; expected {expected}"
        raise DataError(message, key="data.tokenizer", found=str(tokenizer), expected=expected)
    texts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = key_of({"texts": texts, "tokenizer": [str(tokenizer.resolve()), describe_files(tokenizer)]})
    target = default_folder() / "tokens" / f"{key}.i32"
    if not target.exists():
        _tokenize_apart(files, tokenizer, target)
    return TokenRows(target, seq_len)


def _tokenize_apart(files: list[Path], tokenizer: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"data: tokenizing {len(files)} files", flush=True)
    command = [sys.executable, "-m", "stages.runtime.tokenizing", str(tokenizer), str(target)]
    names = "\0".join(
        str(file) for file in files
    )  # by standard input: there may be too many for a command line
    code = subprocess.run(command, input=names.encode(), check=False).returncode
    if code != 0:
        message = f"the tokenizer in {tokenizer} failed (exit code {code}); its output above says why"
        raise DataError(
            message, key="data.tokenizer", found=str(tokenizer), expected="a tokenizer that loads"
        )


def tokenize_files(tokenizer: Any, files: list[Path], target: Path) -> None:
    """Writes the tokens of `files` to `target` under a temporary name, then renames it.

    Args:
        tokenizer: A Hugging Face tokenizer; called with text, gives `input_ids`.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as out:
            for file in files:
                for piece in _pieces(file):
                    ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
                    array("i", ids).tofile(out)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _pieces(file: Path) -> Iterator[str]:
    """The file's text in pieces of about 1 MiB that end where a line does."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        while piece := "".join(lines.readlines(_PIECE_BYTES)):
            yield piece


def main() -> None:
    from transformers import AutoTokenizer  # only in this process

    folder, target = sys.argv[1:]
    files = [Path(name) for name in sys.stdin.read().split("\0")]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenize_files(tokenizer, files, Path(target))


if __name__ == "__main__":
    main()
