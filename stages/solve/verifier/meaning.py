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

_FP32_BYTES = 4


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
        elif phase.name == "accumulate":
            _check_further_batch(plan, phase, facts)
        elif phase.name == "update":
            for instruction in _compute(phase, ("update", "free")):
                if instruction.operation == "update":
                    updates.take(phase, instruction)
    updates.finish()


def _check_further_batch(plan: Plan, phase: Phase, facts: GraphFacts) -> None:
    """A further batch updates nothing, and adds all of its gradients to those that it finds."""
    found = UpdateCheck(plan, facts)
    _Step(plan, phase, facts, found, further=True).check()
    for name, senders in facts.gradient_senders.items():
        if found.gradients_sent[name] != len(senders) * plan.placement.micro_batches:
            raise PlanError(f"phase {phase.name}: the gradient of {name} is not complete at its end")


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
            needed = {(role, owner, 0) for role, owner in needed}
            made = {("value", name, 0) for name in graph.regions[item.region].outputs}
            _require(plan, phase, item, "reads", needed)
            _require(plan, phase, item, "writes", made)
            cost = facts.cost_of(item.region).dropped_forward_peak_bytes
            _require_memory(plan, phase, item, made, cost)
        _require_kept(plan, phase, {("value", spec.name, 0) for spec in graph.outputs})


def _require_kept(plan: Plan, phase: Phase, returned: set[Key]) -> None:
    """What the model returns is there until the phase's last region has run."""
    keys = {buffer.id: key_of(buffer) for buffer in plan.buffers}
    runs = [item.id for item in phase.instructions if item.operation == "evaluate"]
    for item in phase.instructions:
        early = [keys[buffer] for buffer in item.frees if keys[buffer] in returned]
        if early and item.id < runs[-1]:
            raise PlanError(
                f"phase {phase.name}, instruction {item.id}: frees {early[0][1]}, which the model returns"
            )


def _compute(phase: Phase, allowed: tuple[str, ...]) -> list[Instruction]:
    found = [item for item in phase.instructions if item.lane == "compute"]
    for item in found:
        if item.operation not in allowed:
            raise PlanError(f"phase {phase.name}, instruction {item.id}: {item.operation} has no place here")
    return found


#: role, owner and micro-batch of a buffer
Key = tuple[str, str, int]


def key_of(buffer: Buffer) -> Key:
    return buffer.role, buffer.owner, buffer.micro_batch


def _require(plan: Plan, phase: Phase, item: Instruction, direction: str, needed: Iterable[Key]) -> None:
    """Whole buffers that an instruction must read or write."""
    accesses = item.reads if direction == "reads" else item.writes
    whole = {key_of(plan.buffers[access.buffer]) for access in accesses if not _is_piece(plan, access.buffer)}
    missing = sorted(set(needed) - whole)
    if missing:
        role, owner, batch = missing[0]
        whose = f" (micro-batch {batch})" if batch else ""
        raise PlanError(
            f"phase {phase.name}, instruction {item.id} ({item.operation} of region {item.region}): "
            f"it lacks {role} of {owner}{whose} among its {direction}"
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


def _require_memory(plan: Plan, phase: Phase, item: Instruction, made: set[Key], peak_bytes: int) -> None:
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
    """Walks the compute lane of phase "step". Turns are (region, micro-batch)."""

    def __init__(
        self, plan: Plan, phase: Phase, facts: GraphFacts, updates: UpdateCheck, *, further: bool = False
    ) -> None:
        self._further = further
        self._plan, self._phase, self._facts, self._updates = plan, phase, facts, updates
        self._modes: dict[tuple[int, int], str] = {}
        self._recomputed: set[tuple[int, int]] = set()
        self._begun: set[int] = set()  # micro-batches that have gone backward
        self._sent: dict[Key, int] = defaultdict(int)
        if further:  # the batches before have sent to every sum
            self._sent.update({("gradient", name, 0): 1 for name in facts.parameters})

    def check(self) -> None:
        allowed = ("forward", "recompute", "backward", "free", *(() if self._further else ("update",)))
        lane = _compute(self._phase, allowed)
        self._check_turns(lane)
        for item in lane:
            if item.operation == "forward":
                self._forward(item)
            elif item.operation == "recompute":
                self._recompute(item)
            elif item.operation == "backward":
                self._backward(item)
            elif item.operation == "update":
                self._updates.take(self._phase, item)

    def _check_turns(self, lane: list[Instruction]) -> None:
        """Each micro-batch goes through all regions and back, once; each region takes the
        micro-batches backward in their order, in which their gradients are added."""
        regions = range(len(self._facts.graph.regions))
        ways = {"forward": list(regions), "backward": [i for i in reversed(regions) if self._goes_back(i)]}
        for way, expected in ways.items():
            items = [item for item in lane if item.operation == way]
            for batch in range(self._plan.placement.micro_batches):
                found = [item.region for item in items if item.micro_batch == batch]
                if found != expected:
                    raise PlanError(
                        f"phase {self._phase.name} runs {way} of regions {found} with micro-batch {batch}; "
                        f"expected {expected}, each once"
                    )
            if len(items) != len(expected) * self._plan.placement.micro_batches:
                raise PlanError(f"phase {self._phase.name} runs {way} with a micro-batch that does not exist")
        for index in ways["backward"]:
            order = [
                item.micro_batch for item in lane if (item.operation, item.region) == ("backward", index)
            ]
            if order != sorted(order):
                raise PlanError(
                    f"phase {self._phase.name} adds gradients of region {index} in the order {order}"
                )

    def _goes_back(self, region: int) -> bool:
        return self._facts.has_backward[region]

    def _fail(self, item: Instruction, why: str) -> None:
        raise PlanError(
            f"phase {self._phase.name}, instruction {item.id} ({item.operation} of region {item.region}): "
            f"{why}"
        )

    def _own(self, item: Instruction, names: Iterable[tuple[str, str]]) -> set[Key]:
        """Buffers of the instruction's micro-batch; weights and the batch are there once for all."""
        return {
            (role, owner, 0 if self._facts.is_shared(role, owner) else item.micro_batch)
            for role, owner in names
        }

    def _forward(self, item: Instruction) -> None:
        region, turn = self._facts.graph.regions[item.region], (item.region, item.micro_batch)
        if item.micro_batch in self._begun:
            self._fail(item, "a backward has run before it")
        if item.mode not in ("keep", "drop"):
            self._fail(item, f"mode {item.mode!r} is neither keep nor drop")
        if region.checkpoint >= 0 and item.mode == "keep":
            self._fail(item, "a checkpoint block must be recomputed")
        self._modes[turn] = item.mode
        cost = self._facts.cost_of(item.region)
        made = self._own(item, {("value", name) for name in region.outputs})
        peak = cost.dropped_forward_peak_bytes
        if item.mode == "keep":
            made |= self._own(item, [("saved", region.name)])
            peak = cost.forward_peak_bytes
        needed = self._own(item, self._facts.inputs_of(item.region))
        _require(self._plan, self._phase, item, "reads", needed)
        _require(self._plan, self._phase, item, "writes", made)
        _require_memory(self._plan, self._phase, item, made, peak)

    def _recompute(self, item: Instruction) -> None:
        region, cost = self._facts.graph.regions[item.region], self._facts.cost_of(item.region)
        turn = (item.region, item.micro_batch)
        if self._modes.get(turn) != "drop" or turn in self._recomputed:
            self._fail(item, "its activations have not been dropped")
        self._recomputed.add(turn)
        made = self._own(item, [("saved", region.name)])
        needed = self._own(item, self._facts.inputs_of(item.region, moved_only=True))
        _require(self._plan, self._phase, item, "reads", needed)
        _require(self._plan, self._phase, item, "writes", made)
        _require_memory(self._plan, self._phase, item, made, cost.forward_peak_bytes)

    def _backward(self, item: Instruction) -> None:
        facts, region = self._facts, self._facts.graph.regions[item.region]
        turn = (item.region, item.micro_batch)
        if self._modes.get(turn) is None:
            self._fail(item, "its forward has not run")
        if self._modes[turn] == "drop" and turn not in self._recomputed:
            self._fail(item, "its activations have been dropped and not been recomputed")
        self._begun.add(item.micro_batch)
        gradients, completed = self._gradients(item, region.gradients)
        sent = self._own(item, {("value_gradient", name) for name in facts.gradient_inputs(item.region)})
        received = {("value_gradient", name) for name in region.outputs if name in facts.reached}
        summed = {key for key in gradients | sent if self._sent[key]}
        needed = facts.inputs_of(item.region, moved_only=True) | {("saved", region.name)} | received
        needed_keys = self._own(item, needed) | summed | completed
        _require(self._plan, self._phase, item, "reads", needed_keys)
        _require(self._plan, self._phase, item, "writes", gradients | sent)
        made = (gradients | sent) - summed
        peak = facts.cost_of(item.region).backward_peak_bytes
        _require_memory(self._plan, self._phase, item, made, peak)
        self._require_room_for_norms(item, region.gradients)
        for key in gradients | sent:
            self._sent[key] += 1
        for name in region.gradients:
            self._updates.gradients_sent[name] += 1
        self._updates.backward_done.add(turn)

    def _require_room_for_norms(self, item: Instruction, names: Iterable[str]) -> None:
        """Clipping takes the norm of a 16-bit gradient from an fp32 copy of it, once it is complete."""
        completed = [name for name in names if item.region == self._facts.gradient_senders[name][0]]
        half = [name for name in completed if self._facts.weight_itemsize(name) < _FP32_BYTES]
        needed = max((self._facts.elements(name) * _FP32_BYTES for name in half), default=0)
        if self._plan.clips and item.workspace_bytes < needed:
            self._fail(item, f"{item.workspace_bytes} bytes of workspace; the norm takes {needed}")

    def _gradients(self, item: Instruction, names: Iterable[str]) -> tuple[set[Key], set[Key]]:
        """Gradient buffers that a backward writes, and those of its micro-batch that it adds to the sum.

        What several regions send to a parameter is added up per micro-batch first.
        """
        written, completed = set(), set()
        for name in names:
            senders = self._facts.gradient_senders[name]
            apart = item.micro_batch > 0 or self._further
            alone = ("gradient" if item.micro_batch else "partial_gradient", name, item.micro_batch)
            if len(senders) == 1 or item.region == senders[0] or not apart:
                written.add(("gradient", name, 0))
                if len(senders) > 1 and apart:
                    completed.add(alone)
            else:
                written.add(alone)
        return written, completed
