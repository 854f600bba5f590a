"""The arena: aligned, slots that autograd takes for separate tensors, poison, and giving memory back."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts.plan import ALIGNMENT
from stages.region.memory import resident_bytes
from stages.runtime.tiers.arena import Arena

MIB = 2**20


def test_slots_at_planned_offsets_are_aligned_for_direct_transfers() -> None:
    arena = Arena(4 * ALIGNMENT)
    slot = arena.slot(ALIGNMENT, (5,), (1,), torch.float32)
    assert slot.data_ptr() % ALIGNMENT == 0
    assert slot.data_ptr() == arena.address + ALIGNMENT


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    block=st.integers(0, 3),
    transposed=st.booleans(),
)
def test_a_slot_is_the_memory_that_it_names(
    dtype: torch.dtype, rows: int, columns: int, block: int, transposed: bool
) -> None:
    arena = Arena(4 * ALIGNMENT)
    stride = (1, rows) if transposed else (columns, 1)
    slot = arena.slot(block * ALIGNMENT, (rows, columns), stride, dtype)
    expected = torch.arange(rows * columns).reshape(rows, columns).to(dtype)
    slot.copy_(expected)
    again = arena.slot(block * ALIGNMENT, (rows, columns), stride, dtype)
    assert torch.equal(again, expected)
    assert again.stride() == slot.stride() == stride


def test_writing_one_slot_does_not_invalidate_what_autograd_saved_of_another() -> None:
    arena = Arena(2 * ALIGNMENT)
    weight = arena.slot(0, (3,), (1,), torch.float32).fill_(2.0).requires_grad_()
    other = arena.slot(ALIGNMENT, (3,), (1,), torch.float32)
    loss = (weight * weight).sum()
    other.fill_(7.0)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.tolist() == [4.0, 4.0, 4.0]


def test_slices_of_one_tensor_would_invalidate_it_which_is_why_slots_are_not_slices() -> None:
    whole = torch.zeros(6)
    weight = whole[:3].fill_(2.0)
    other = whole[3:]
    input_ = torch.ones(3, requires_grad=True)
    loss = (input_ * weight).sum()
    other.fill_(7.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, input_)


def test_poison_is_nan_out_of_range_and_touches_nothing_else() -> None:
    arena = Arena(3 * ALIGNMENT)
    floats = [
        arena.slot(ALIGNMENT, (4,), (1,), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    indices = arena.slot(ALIGNMENT + 512, (4,), (1,), torch.int64)
    neighbours = [
        arena.slot(0, (ALIGNMENT,), (1,), torch.uint8),
        arena.slot(2 * ALIGNMENT, (ALIGNMENT,), (1,), torch.uint8),
    ]
    arena.poison(ALIGNMENT, ALIGNMENT)
    assert all(bool(torch.isnan(slot).all()) for slot in floats)
    assert bool((indices < 0).all())
    assert all(not bool(slot.any()) for slot in neighbours)


def test_memory_becomes_resident_when_written_and_goes_at_close() -> None:
    before = resident_bytes()
    arena = Arena(64 * MIB)
    assert resident_bytes() - before < 8 * MIB
    slot = arena.slot(0, (64 * MIB,), (1,), torch.uint8)
    slot.fill_(1)
    assert resident_bytes() - before > 56 * MIB
    arena.close()
    assert resident_bytes() - before < 8 * MIB
    assert not bool(slot.any()), "a slot that outlives the arena must stay readable"


def test_slots_keep_the_mapping_alive() -> None:
    slot = Arena(ALIGNMENT).slot(0, (4,), (1,), torch.float32)
    assert slot.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [(2, (1,), (1,)), (-4, (1,), (1,)), (0, (1025,), (1,)), (0, (2, 2), (1024, 1)), (ALIGNMENT, (1,), (1,))],
    ids=["unaligned", "negative", "too long", "too wide", "past the end"],
)
def test_a_slot_outside_the_arena_is_refused(
    offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="slot"):
        Arena(ALIGNMENT).slot(offset, shape, stride, torch.float32)


def test_an_empty_arena_has_empty_slots_only() -> None:
    arena = Arena(0)
    assert arena.slot(0, (0,), (1,), torch.float32).numel() == 0
    with pytest.raises(ValueError, match="slot ends"):
        arena.slot(0, (1,), (1,), torch.float32)


def test_poison_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="arena has"):
        Arena(ALIGNMENT).poison(0, mmap.PAGESIZE + 1)
