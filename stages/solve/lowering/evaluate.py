"""Phase "evaluate": forward of every region of the evaluation graph, without gradients."""

from __future__ import annotations

from collections import defaultdict

from stages.solve.lowering.buffers import BufferTable
from stages.solve.lowering.draft import PhaseDraft
from stages.solve.lowering.windows import windows
from stages.solve.problem import Problem


def lower_evaluation(problem: Problem, table: BufferTable, draft: PhaseDraft, lead: int) -> None:
    """Writes the phase down.

    Args:
        problem: Of the evaluation graph; its parameters are those of the training graph.
        lead: How many regions ahead streamed weights are fetched.
    """
    fetches: dict[int, list[tuple[int, int]]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for name in sorted(table.streamed):
        if name not in problem.parameters:
            continue
        buffer = table.weight(problem.parameters[name])
        for stay in windows(problem.parameters[name].uses, lambda _: lead):
            fetches[stay.fetch].append((stay.first, buffer))
            ends[stay.last].append(buffer)
    for value in problem.values.values():
        if value.producer >= 0:
            last = max((value.producer, *value.consumers))
            if value.name in problem.returned:  # the caller gets it after the phase
                last = len(problem.regions) - 1
            ends[last].append(table.evaluation_value(problem, value.name))
    for region in problem.regions:
        for _, buffer in sorted(fetches[region.index]):
            draft.fetch(buffer, outside_arena=table.buffers[buffer].offset is None)
        outputs = [table.evaluation_value(problem, name) for name in region.outputs]
        made_bytes = sum(table.buffers[buffer].bytes for buffer in outputs)
        draft.compute(
            "evaluate",
            reads=[
                *(table.evaluation_value(problem, name) for name in region.inputs),
                *(table.weight(problem.parameters[name]) for name in region.weights),
                *(table.persistent(name) for name in region.persistent),
            ],
            writes=outputs,
            frees=ends[region.index],
            region=region.index,
            mode="drop",
            workspace_bytes=max(0, region.cost.dropped_forward_peak_bytes - made_bytes),
        )
