"""The scratch file: any alignment, nothing left in the page cache, and every fault told apart."""

from __future__ import annotations

import errno
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts.errors import StorageError
from stages.artifacts.plan import ALIGNMENT
from stages.runtime.tiers import disk as disk_module
from stages.runtime.tiers import space
from stages.runtime.tiers.arena import Arena
from stages.runtime.tiers.disk import DiskFile
from stages.runtime.tiers.memoryviews import as_bytes

SIZE = 64 * ALIGNMENT


@pytest.fixture(params=["direct", "buffered"])
def file(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DiskFile]:
    """A file of `SIZE` bytes, once as the filesystem has it and once as if it refused O_DIRECT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if request.param == "buffered":
            refuse_direct(monkeypatch)
        with DiskFile(tmp_path, SIZE) as made:
            yield made


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(space.os, "open", open_)


def pattern(size: int, seed: int = 1) -> torch.Tensor:
    return ((torch.arange(size, dtype=torch.int64) * 31 + seed * 101) % 251).to(torch.uint8)


def at_misalignment(content: torch.Tensor, shift: int) -> torch.Tensor:
    """A copy that starts `shift` bytes after a page border."""
    slot = Arena(content.numel() + ALIGNMENT).slot(shift, tuple(content.shape), (1,), torch.uint8)
    return slot.copy_(content)


spans = st.tuples(
    st.sampled_from([0, 1, 64, 2048, ALIGNMENT, 3 * ALIGNMENT - 1]),  # file offset
    st.sampled_from(
        [0, 1, 63, 2048, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 5 * ALIGNMENT, 9 * ALIGNMENT + 7]
    ),
    st.sampled_from([0, 1, 64, 2048]),  # misalignment of memory
)


@given(writes=st.lists(spans, min_size=1, max_size=4), read=spans)
@settings(max_examples=60, deadline=None)
def test_any_offset_length_and_address_reads_and_writes_exactly(
    writes: list[tuple[int, int, int]], read: tuple[int, int, int]
) -> None:
    """Against a plain array; small blocks and a small bounce, so that every way is cut several times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "BLOCK_BYTES", 2 * ALIGNMENT)
        patch.setattr(disk_module, "BOUNCE_BYTES", 2 * ALIGNMENT)
        with DiskFile(Path("."), 16 * ALIGNMENT) as file:
            expected = torch.zeros(16 * ALIGNMENT, dtype=torch.uint8)
            for seed, (offset, size, shift) in enumerate(writes):
                content = pattern(size, seed)
                assert file.write_from(at_misalignment(content, shift), offset) == size
                expected[offset : offset + size] = content
            offset, size, shift = read
            target = at_misalignment(pattern(size, 99), shift)
            assert file.read_into(target, offset) == size
            assert torch.equal(target, expected[offset : offset + size])
            whole = torch.empty_like(expected)
            file.read_into(whole, 0)
            assert torch.equal(whole, expected)


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_tensors_of_any_dtype_and_dense_order_of_dimensions_round_trip(file: DiskFile) -> None:
    for tensor in (
        torch.randn(7, 5).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(33).bfloat16(),
        torch.tensor([True, False, True]),
        torch.tensor(5),
        torch.empty(0),
    ):
        file.write_from(tensor, 3 * ALIGNMENT)
        back = torch.empty_like(tensor)
        assert back.stride() == tensor.stride()
        file.read_into(back, 3 * ALIGNMENT)
        assert torch.equal(back, tensor)


def test_bytes_keep_their_tensor_alive() -> None:
    tensor = torch.ones(5)
    gone = weakref.ref(tensor)
    view = as_bytes(tensor)[4:8]
    del tensor
    assert gone() is not None
    assert view.nbytes == 4
    del view
    assert gone() is None


def test_memoryviews_of_any_format_are_taken(file: DiskFile) -> None:
    file.write_from(memoryview(bytearray(b"abcdefgh")).cast("I"), 10)
    back = bytearray(8)
    file.read_into(memoryview(back), 10)
    assert bytes(back) == b"abcdefgh"


def test_a_tensor_with_gaps_is_refused(file: DiskFile) -> None:
    with pytest.raises(ValueError, match="gaps or overlaps"):
        file.write_from(torch.zeros(4, 4)[:, :2], 0)
    with pytest.raises(ValueError, match="gaps or overlaps"):
        file.read_into(torch.zeros(1).expand(4), 0)


@pytest.mark.parametrize("offset", [-1, SIZE - 7, SIZE])
def test_a_transfer_outside_the_file_is_refused(file: DiskFile, offset: int) -> None:
    with pytest.raises(ValueError, match="scratch file of"):
        file.write_from(pattern(8), offset)


def test_padding_saves_the_read_and_spoils_only_the_rest_of_the_last_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskFile(tmp_path, SIZE) as file:
        before = pattern(3 * ALIGNMENT)
        file.write_from(before, 0)
        reads = count_calls(monkeypatch, "preadv")
        file.write_from(pattern(ALIGNMENT + 100, 2), 0, pad=True)
        assert reads == []
        file.write_from(pattern(100, 3), 2 * ALIGNMENT)
        assert len(reads) == 1
        after = torch.empty_like(before)
        file.read_into(after, 0)
        assert torch.equal(after[: ALIGNMENT + 100], pattern(ALIGNMENT + 100, 2))
        assert torch.equal(after[2 * ALIGNMENT : 2 * ALIGNMENT + 100], pattern(100, 3))
        assert torch.equal(after[2 * ALIGNMENT + 100 :], before[2 * ALIGNMENT + 100 :])


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Sizes of the system calls of that name from now on."""
    real: Callable[..., int] = getattr(os, name)
    sizes: list[int] = []

    def call(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        sizes.append(sum(buffer.nbytes for buffer in buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(disk_module.os, name, call)
    return sizes


def test_aligned_memory_goes_straight_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "BLOCK_BYTES", 4 * ALIGNMENT)
    with DiskFile(tmp_path, SIZE) as file:
        written = count_calls(monkeypatch, "pwritev")
        file.write_from(at_misalignment(pattern(9 * ALIGNMENT), 0), ALIGNMENT)
        assert written == [4 * ALIGNMENT, 4 * ALIGNMENT, ALIGNMENT]
        assert file._bounces == [] or len(file._bounces) == 1  # the probe's


def test_two_threads_may_share_a_block(file: DiskFile) -> None:
    """Neighbouring pieces that meet inside a block: each thread keeps the other's bytes."""
    starts = (0, 1000, 2000, 3000, 4000)

    def write(start: int) -> None:
        for turn in range(40):
            file.write_from(torch.full((1000,), (turn + start) % 250, dtype=torch.uint8), start)

    with ThreadPoolExecutor(len(starts)) as threads:
        list(threads.map(write, starts))
    back = torch.empty(5000, dtype=torch.uint8)
    file.read_into(back, 0)
    for start in starts:
        assert back[start : start + 1000].tolist() == [(39 + start) % 250] * 1000


# memory and cache


def test_nothing_stays_in_the_page_cache(file: DiskFile) -> None:
    content = pattern(SIZE)
    file.write_from(content, 0)
    file.read_into(content, 0)
    assert cached_pages(file) == 0


def cached_pages(file: DiskFile) -> int:
    """Pages of the file in memory, by mincore(2)."""
    import ctypes
    import mmap

    mapping = mmap.mmap(file._descriptor, SIZE, flags=mmap.MAP_SHARED)
    pages = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    library = ctypes.CDLL(None, use_errno=True)
    assert library.mincore(ctypes.c_void_p(start), ctypes.c_size_t(SIZE), pages) == 0
    return sum(page & 1 for page in pages)


# space and opening


def test_the_file_has_no_name_and_its_space_is_free_after_close(tmp_path: Path) -> None:
    with DiskFile(tmp_path, SIZE) as file:
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(file._descriptor).st_blocks * 512 >= SIZE, "space is not reserved"
        descriptor = file._descriptor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    file.close()


def test_a_size_is_rounded_up_to_blocks_and_may_be_nothing(tmp_path: Path) -> None:
    with DiskFile(tmp_path, 100) as file:
        assert file.size_bytes == ALIGNMENT
        file.write_from(pattern(100), 0)
    with DiskFile(tmp_path, 0) as file:
        assert file.read_into(torch.empty(0), 0) == 0


def test_too_little_space_is_told_with_both_numbers_before_anything_is_written(tmp_path: Path) -> None:
    needed = 10**17
    with pytest.raises(StorageError) as refusal:
        DiskFile(tmp_path, needed)
    assert refusal.value.key == "tiers.disk"
    assert str(-(-needed // ALIGNMENT) * ALIGNMENT) in str(refusal.value)
    assert "bytes are free" in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_space_that_others_took_meanwhile_is_told_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(space.os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=f"needs {SIZE} bytes"):
        DiskFile(tmp_path, SIZE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "place"
    if kind == "file":
        path.write_text("x")
    with pytest.raises(StorageError, match="Give a writable folder"):
        DiskFile(path, SIZE)


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(space.os, "open", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        DiskFile(tmp_path, SIZE)


def test_a_filesystem_without_direct_transfers_warns_once_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    with pytest.warns(RuntimeWarning, match="no direct I/O") as warned:
        file = DiskFile(tmp_path, SIZE)
    assert len(warned) == 1
    check_buffered(file)


def check_buffered(file: DiskFile) -> None:
    with file, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not file.direct
        file.write_from(pattern(5000), 77)
        back = torch.empty(5000, dtype=torch.uint8)
        file.read_into(back, 77)
        assert torch.equal(back, pattern(5000))


def test_a_filesystem_that_takes_the_flag_and_refuses_the_transfer_warns_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(disk_module.os, "preadv", preadv)
    with pytest.warns(RuntimeWarning, match="no direct I/O"):
        file = DiskFile(tmp_path, SIZE)
    check_buffered(file)


def test_a_filesystem_in_memory_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "filesystem_type", lambda folder: "tmpfs")
    with pytest.warns(RuntimeWarning), DiskFile(tmp_path, SIZE):
        pass


# faults


def test_transfers_cut_short_by_the_kernel_are_finished(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may move less than asked; a direct one then goes on from a block border."""
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def shortened(
            descriptor: int,
            buffers: Sequence[memoryview],
            offset: int,
            real: Callable[..., int] = real,
        ) -> int:
            (buffer,) = buffers
            limit = 2 * ALIGNMENT
            moved = real(descriptor, [buffer[:limit]], offset)
            return moved - 100 if buffer.nbytes > limit else moved

        monkeypatch.setattr(disk_module.os, name, shortened)
    content = at_misalignment(pattern(9 * ALIGNMENT), 0)
    file.write_from(content, 0)
    back = at_misalignment(torch.zeros_like(content), 0)
    file.read_into(back, 0)
    assert torch.equal(back, content)


@pytest.mark.parametrize(("name", "verb"), [("pwritev", "write"), ("preadv", "read")])
@pytest.mark.parametrize("shift", [0, 64], ids=["straight", "bounced"])
def test_a_device_that_moves_nothing_is_an_error_not_a_loop(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch, name: str, verb: str, shift: int
) -> None:
    monkeypatch.setattr(disk_module.os, name, lambda *_: 0)
    move = file.write_from if verb == "write" else file.read_into
    with pytest.raises(StorageError, match=f"would not {verb}"):
        move(at_misalignment(pattern(2 * ALIGNMENT), shift), 0)


@pytest.mark.parametrize(("name", "verb"), [("pwritev", "write"), ("preadv", "read")])
@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EIO, "device's log"), (errno.ENOSPC, "Free space")], ids=["EIO", "ENOSPC"]
)
def test_a_failing_device_is_named_with_place_and_advice(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch, name: str, verb: str, number: int, advice: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_module.os, name, fail)
    move = file.write_from if verb == "write" else file.read_into
    with pytest.raises(StorageError, match=advice) as failure:
        move(at_misalignment(pattern(ALIGNMENT), 0), 2 * ALIGNMENT)
    assert failure.value.found == errno.errorcode[number]
    assert f"byte {2 * ALIGNMENT}" in str(failure.value)
    assert isinstance(failure.value.__cause__, OSError)


def test_an_interrupted_call_is_made_again(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    interruptions = [InterruptedError(errno.EINTR, "Interrupted system call")] * 3

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if interruptions:
            raise interruptions.pop()
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(disk_module.os, "pwritev", pwritev)
    file.write_from(pattern(ALIGNMENT), 0)
    back = torch.empty(ALIGNMENT, dtype=torch.uint8)
    file.read_into(back, 0)
    assert torch.equal(back, pattern(ALIGNMENT))


def test_a_file_cut_short_is_an_error(file: DiskFile) -> None:
    os.ftruncate(file._descriptor, ALIGNMENT)
    with pytest.raises(StorageError, match="cut short"):
        file.read_into(torch.empty(3 * ALIGNMENT, dtype=torch.uint8), 0)


def test_a_failed_opening_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk_module.os, "preadv", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StorageError, match="Input/output error"):
        DiskFile(tmp_path, SIZE)
    assert len(os.listdir("/proc/self/fd")) == len(before)
