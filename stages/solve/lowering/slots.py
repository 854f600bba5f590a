"""Dependencies that memory demands: a slot is filled only after all that was in it has left."""

from __future__ import annotations

from bisect import bisect_left

from stages.artifacts.plan import Buffer
from stages.solve.lowering.draft import PhaseDraft
from stages.solve.problem import align


def wait_for_slots(draft: PhaseDraft, buffers: list[Buffer]) -> None:
    """Makes each maker of a planned buffer wait for the last instruction, on every lane, that frees
    bytes of its slot. Lanes run in order, so the last one stands for all before it."""
    stays = [
        (stay, offset, offset + align(max(1, buffers[stay.buffer].bytes)))
        for stay in draft.residencies
        if (offset := buffers[stay.buffer].offset) is not None
    ]
    borders = sorted({border for _, start, end in stays for border in (start, end)})
    freed: list[dict[str, int]] = [{} for _ in borders]
    events = sorted(
        [(stay.made, 1, start, end) for stay, start, end in stays if stay.made >= 0]
        + [(stay.freed, 0, start, end) for stay, start, end in stays]
    )
    for identity, makes, start, end in events:
        instruction = draft.drafts[identity]
        span = range(bisect_left(borders, start), bisect_left(borders, end))
        if not makes:
            for part in span:
                freed[part][instruction.lane] = identity
            continue
        for lane in {lane for part in span for lane in freed[part]} - {instruction.lane}:
            last = max(freed[part].get(lane, -1) for part in span)
            if last < identity:
                instruction.after.add(last)
