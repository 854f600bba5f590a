"""Memory that direct transfers take as it is."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from stages.artifacts.plan import ALIGNMENT
from stages.device.pages import storage_on_pages
from stages.region import memory
from stages.runtime.tiers.disk import DiskFile
from stages.runtime.tiers.memoryviews import as_bytes, copy

LARGE = 16 * 2**20


@pytest.mark.parametrize("size", [0, 1, 4095, 128 * 1024, LARGE + 5])
def test_storage_has_the_size_asked_for_and_large_ones_start_on_a_page(size: int) -> None:
    storage = storage_on_pages(size)
    assert storage.nbytes() == size
    if size >= memory.LARGE_BLOCK_BYTES:
        assert storage.data_ptr() % ALIGNMENT == 0


def test_its_memory_leaves_with_the_last_tensor() -> None:
    before = memory.resident_bytes()
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage_on_pages(LARGE), 0, (LARGE,), (1,))
    tensor.fill_(1)
    assert memory.resident_bytes() >= before + LARGE
    del tensor
    assert memory.resident_bytes() < before + LARGE // 2


def test_a_transfer_into_it_needs_no_bounce(tmp_path: Path) -> None:
    with DiskFile(tmp_path, LARGE) as disk:
        content = torch.arange(LARGE, dtype=torch.int64).to(torch.uint8)
        disk.write_from(content, 0)
        target = torch.empty(0, dtype=torch.uint8).set_(storage_on_pages(LARGE), 0, (LARGE,), (1,))
        with mock.patch.object(DiskFile, "_read_bounced") as bounced:
            disk.read_into(target, 0)
        assert all(call.args[0].nbytes == 0 for call in bounced.call_args_list)
        assert torch.equal(target, content)


def test_copies_move_every_byte_and_refuse_other_sizes() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    copy(as_bytes(source)[10:60], as_bytes(target)[:50])
    assert torch.equal(target[:50], source[10:60])
    assert not target[50:].any()
    with pytest.raises(ValueError, match="3 bytes into 4"):
        copy(as_bytes(source)[:3], as_bytes(target)[:4])
