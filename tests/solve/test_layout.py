from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts.errors import ConfigError
from stages.artifacts.plan import Buffer
from stages.solve.layout import lay_out
from stages.solve.lowering.draft import Residency

SPANS = st.tuples(st.integers(0, 200), st.integers(1, 60))


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Buffer], list[Residency]]:
    buffers, stays = [], []
    for identity in range(draw(st.integers(1, 30))):
        size = draw(st.integers(1, 40_000))
        resident = draw(st.integers(0, 4)) == 0
        buffers.append(Buffer(identity, "weight", f"w{identity}", size, offset=0, resident=resident))
        if not resident:
            end = 0
            for gap, length in draw(st.lists(SPANS, min_size=1, max_size=3)):
                stays.append(Residency(identity, end + gap, end + gap + length, end + gap))
                end += gap + length + 1
    return buffers, stays


def _spans(buffers: list[Buffer], stays: list[Residency], identity: int) -> list[tuple[int, int]]:
    if buffers[identity].resident:
        return [(0, 10**9)]
    return [(stay.made, stay.freed) for stay in stays if stay.buffer == identity]


@pytest.mark.parametrize("policy", ["packed", "tight"])
@given(case=requests())
def test_buffers_that_meet_in_time_never_overlap(
    policy: str, case: tuple[list[Buffer], list[Residency]]
) -> None:
    buffers, stays = case
    offsets, arena = lay_out(buffers, [stays], policy)
    for one in offsets:
        assert offsets[one] % 4096 == 0
        assert offsets[one] + buffers[one].bytes <= arena
        for other in offsets:
            meet = any(
                start <= other_end and other_start <= end
                for start, end in _spans(buffers, stays, one)
                for other_start, other_end in _spans(buffers, stays, other)
            )
            if one < other and meet:
                low, high = sorted((one, other), key=lambda identity: offsets[identity])
                assert offsets[low] + buffers[low].bytes <= offsets[high]


def test_equal_buffers_in_turn_share_one_slot() -> None:
    buffers = [Buffer(identity, "weight", f"w{identity}", 8192, offset=0) for identity in range(9)]
    stays = [Residency(identity, 2 * identity, 2 * identity + 1, 2 * identity) for identity in range(9)]
    for policy in ("packed", "tight"):
        assert lay_out(buffers, [stays], policy)[1] == 8192


def test_phases_follow_one_another() -> None:
    buffers = [Buffer(0, "weight", "a", 4096, offset=0), Buffer(1, "weight", "b", 4096, offset=0)]
    both = lay_out(buffers, [[Residency(0, 0, 3, 0)], [Residency(1, 0, 3, 0)]], "packed")
    assert both[1] == 4096


def test_small_buffers_fill_the_hole_between_large_ones() -> None:
    sizes = (40960, 8192, 40960)
    buffers = [Buffer(i, "weight", str(i), size, offset=0) for i, size in enumerate(sizes)]
    stays = [Residency(0, 0, 4, 0), Residency(1, 5, 9, 5), Residency(2, 5, 9, 5)]
    assert lay_out(buffers, [stays], "packed")[1] == 49152


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="packed, tight"):
        lay_out([], [], "loose")
