"""The compute lane carries out the graph: each region once in each direction, each update once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from stages.artifacts.costs import Costs
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Buffer, Instruction, Phase, Plan
from stages.solve.errors import PlanError
from stages.solve.verifier.needs import GraphFacts
from stages.solve.verifier.updates import UpdateCheck


def check_training(plan: Plan, graph: RegionGraph, costs: Costs) -> None:
    """Checks phases "step" and "update".

    Raises:
        PlanError: Names the instruction that is missing, misplaced, or reads too little.
    """
    facts = GraphFacts(graph, costs)
    facts.check_sizes(plan)
    updates = UpdateCheck(plan, facts)
    for phase in plan.phases:
        if phase.name == "step":
            _Step(plan, phase, facts, updates).check()
        elif phase.name == "update":
            for instruction in _compute(phase, ("update", "free")):
                if instruction.operation == "update":
                    updates.take(phase, instruction)
    updates.finish()


def check_evaluation(plan: Plan, graph: RegionGraph, costs: Costs) -> None:
    """Checks phase "evaluate": forwards alone, in order.

    Raises:
        PlanError: It trains, or a region is missing or reads too little.
    """
    facts = GraphFacts(graph, costs)
    for phase in plan.phases:
        if phase.name != "evaluate":
            continue
        if any(item.lane == "write" for item in phase.instructions):
            raise PlanError("phase evaluate writes to disk")
        runs = [item for item in _compute(phase, ("evaluate", "free")) if item.operation == "evaluate"]
        if [item.region for item in runs] != list(range(len(graph.regions))):
            raise PlanError("phase evaluate does not run every region once, in order")
        for item in runs:
            needed = facts.inputs_of(item.region)
            made = {("value", name) for name in graph.regions[item.region].outputs}
            _require(plan, phase, item, "reads", needed)
            _require(plan, phase, item, "writes", made)
            cost = facts.cost_of(item.region).dropped_forward_peak_bytes
            _require_memory(plan, phase, item, made, cost)


def _compute(phase: Phase, allowed: tuple[str, ...]) -> list[Instruction]:
    found = [item for item in phase.instructions if item.lane == "compute"]
    for item in found:
        if item.operation not in allowed:
            raise PlanError(f"phase {phase.name}, instruction {item.id}: {item.operation} has no place here")
    return found


def key_of(buffer: Buffer) -> tuple[str, str]:
    return buffer.role, buffer.owner


def _require(
    plan: Plan, phase: Phase, item: Instruction, direction: str, needed: Iterable[tuple[str, str]]
) -> None:
    """Whole buffers that an instruction must read or write."""
    accesses = item.reads if direction == "reads" else item.writes
    whole = {key_of(plan.buffers[access.buffer]) for access in accesses if not _is_piece(plan, access.buffer)}
    missing = sorted(set(needed) - whole)
    if missing:
        role, owner = missing[0]
        raise PlanError(
            f"phase {phase.name}, instruction {item.id} ({item.operation} of region {item.region}): "
            f"it lacks {role} of {owner} among its {direction}"
        )


def _is_piece(plan: Plan, buffer: int) -> bool:
    """Pieces have a slot of their own and hold part of their tensor; a gradient in a slot is one."""
    record = plan.buffers[buffer]
    if record.role == "weight":
        return record.start > 0 or record.count < plan.buffers[whole_weight(plan, record.owner)].count
    return record.role == "gradient" and record.offset is not None


def whole_weight(plan: Plan, owner: str) -> int:
    """The buffer that holds all of a weight."""
    return next(item.id for item in plan.buffers if item.role == "weight" and item.owner == owner)


def _require_memory(
    plan: Plan, phase: Phase, item: Instruction, made: set[tuple[str, str]], peak_bytes: int
) -> None:
    """Workspace and what is newly made must cover the measured peak."""
    held = item.workspace_bytes + sum(
        plan.buffers[access.buffer].bytes
        for access in item.writes
        if access.version == 1 and key_of(plan.buffers[access.buffer]) in made
    )
    if held < peak_bytes:
        raise PlanError(
            f"phase {phase.name}, instruction {item.id} ({item.operation} of region {item.region}) counts "
            f"{held} bytes; its measured peak is {peak_bytes} bytes"
        )


class _Step:
    """Walks the compute lane of phase "step"."""

    def __init__(self, plan: Plan, phase: Phase, facts: GraphFacts, updates: UpdateCheck) -> None:
        self._plan, self._phase, self._facts, self._updates = plan, phase, facts, updates
        self._modes: dict[int, str] = {}
        self._recomputed: set[int] = set()
        self._done: list[int] = []
        self._sent: dict[str, int] = defaultdict(int)

    def check(self) -> None:
        regions = self._facts.graph.regions
        allowed = ("forward", "recompute", "backward", "update", "free")
        lane = _compute(self._phase, allowed)
        forwards = [item.region for item in lane if item.operation == "forward"]
        if forwards != list(range(len(regions))):
            raise PlanError("phase step does not run forward of every region once, in order")
        expected = [index for index in reversed(range(len(regions))) if self._facts.has_backward[index]]
        backwards = [item.region for item in lane if item.operation == "backward"]
        if backwards != expected:
            raise PlanError(f"phase step runs backward of regions {backwards}; expected {expected}")
        for item in lane:
            if item.operation == "forward":
                self._forward(item)
            elif item.operation == "recompute":
                self._recompute(item)
            elif item.operation == "backward":
                self._backward(item)
            elif item.operation == "update":
                self._updates.take(self._phase, item)

    def _fail(self, item: Instruction, why: str) -> None:
        raise PlanError(
            f"phase step, instruction {item.id} ({item.operation} of region {item.region}): {why}"
        )

    def _forward(self, item: Instruction) -> None:
        region = self._facts.graph.regions[item.region]
        if self._done:
            self._fail(item, "a backward has run before it")
        if item.mode not in ("keep", "drop"):
            self._fail(item, f"mode {item.mode!r} is neither keep nor drop")
        if region.checkpoint >= 0 and item.mode == "keep":
            self._fail(item, "a checkpoint block must be recomputed")
        self._modes[item.region] = item.mode
        cost = self._facts.cost_of(item.region)
        made = {("value", name) for name in region.outputs}
        peak = cost.dropped_forward_peak_bytes
        if item.mode == "keep":
            made.add(("saved", region.name))
            peak = cost.forward_peak_bytes
        _require(self._plan, self._phase, item, "reads", self._facts.inputs_of(item.region))
        _require(self._plan, self._phase, item, "writes", made)
        _require_memory(self._plan, self._phase, item, made, peak)

    def _recompute(self, item: Instruction) -> None:
        region, cost = self._facts.graph.regions[item.region], self._facts.cost_of(item.region)
        if self._modes.get(item.region) != "drop" or item.region in self._recomputed:
            self._fail(item, "its activations have not been dropped")
        self._recomputed.add(item.region)
        made = {("saved", region.name)}
        _require(self._plan, self._phase, item, "reads", self._facts.inputs_of(item.region, moved_only=True))
        _require(self._plan, self._phase, item, "writes", made)
        _require_memory(self._plan, self._phase, item, made, cost.forward_peak_bytes)

    def _backward(self, item: Instruction) -> None:
        facts, region = self._facts, self._facts.graph.regions[item.region]
        if self._modes[item.region] == "drop" and item.region not in self._recomputed:
            self._fail(item, "its activations have been dropped and not been recomputed")
        gradients = {("gradient", name) for name in region.gradients}
        sent = {("value_gradient", name) for name in facts.gradient_inputs(item.region)}
        received = {("value_gradient", name) for name in region.outputs if name in facts.reached}
        summed = {key for key in gradients | sent if self._sent[f"{key[0]} {key[1]}"]}
        needed = facts.inputs_of(item.region, moved_only=True) | {("saved", region.name)}
        _require(self._plan, self._phase, item, "reads", needed | received | summed)
        _require(self._plan, self._phase, item, "writes", gradients | sent)
        made = (gradients | sent) - summed
        peak = facts.cost_of(item.region).backward_peak_bytes
        _require_memory(self._plan, self._phase, item, made, peak)
        for role, owner in gradients | sent:
            self._sent[f"{role} {owner}"] += 1
        for name in region.gradients:
            self._updates.gradients_sent[name] += 1
        self._done.append(item.region)
        self._updates.backward_done.add(item.region)
