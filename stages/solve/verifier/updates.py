"""Each element of a parameter is updated once per step if it has a gradient, and never otherwise."""

from __future__ import annotations

from collections import defaultdict

from stages.artifacts.plan import Buffer, Instruction, Phase, Plan
from stages.solve.errors import PlanError
from stages.solve.verifier.needs import GraphFacts

_CHUNK_MULTIPLE = 1024
_FP32_BYTES = 4
_HALF_PRECISION = ("float16", "bfloat16")


class UpdateCheck:
    """Collects the updates of a step.

    gradients_sent, backward_done: kept up to date by whoever walks phase "step".
    """

    def __init__(self, plan: Plan, facts: GraphFacts) -> None:
        self._plan, self._facts = plan, facts
        self._spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.gradients_sent: dict[str, int] = defaultdict(int)
        #: (region, micro-batch)
        self.backward_done: set[tuple[int, int]] = set()

    def take(self, phase: Phase, item: Instruction) -> None:
        """Checks one update: complete gradient, all state, master and weight of its elements."""
        name = item.parameter
        where = f"phase {phase.name}, instruction {item.id} (update of {name})"
        micro_batches = self._plan.placement.micro_batches
        if not self._facts.gradient_senders.get(name):
            raise PlanError(f"{where}: no gradient reaches it")
        if self.gradients_sent[name] != len(self._facts.gradient_senders[name]) * micro_batches:
            raise PlanError(f"{where}: its gradient is not complete")
        turns = {
            (region, batch) for region in self._facts.update_after[name] for batch in range(micro_batches)
        }
        if not turns <= self.backward_done:
            raise PlanError(f"{where}: a backward still reads it")
        if (self._plan.precision == "fp16" or self._plan.deferred) and phase.name != "update":
            raise PlanError(f"{where}: the norm and the check for inf and nan come first")
        self._check_chunk(where, item)
        self._check_accesses(where, item)
        self._spans[name].append((item.start, item.start + item.count))
        per_element = self._facts.costs.optimizer.workspace_bytes_per_element
        if self._plan.clips and self._facts.parameters[name].spec.dtype not in _HALF_PRECISION:
            per_element += _FP32_BYTES  # the scaled gradient; under masters there is one anyway
        if item.workspace_bytes < item.count * per_element:
            raise PlanError(f"{where}: counts {item.workspace_bytes} bytes of workspace, which is too little")

    def _check_chunk(self, where: str, item: Instruction) -> None:
        elements, end = self._facts.elements(item.parameter), item.start + item.count
        whole = item.start == 0 and item.count == elements
        chunk = item.start % _CHUNK_MULTIPLE == 0 and (end == elements or end % _CHUNK_MULTIPLE == 0)
        if (
            item.count < 1
            or end > elements
            or not (whole or (chunk and self._facts.costs.optimizer.chunkable))
        ):
            raise PlanError(f"{where}: cannot update elements {item.start} to {end} of {elements}")

    def _check_accesses(self, where: str, item: Instruction) -> None:
        name, end = item.parameter, item.start + item.count
        reads = [self._plan.buffers[access.buffer] for access in item.reads]
        writes = [self._plan.buffers[access.buffer] for access in item.writes]
        half = self._facts.parameters[name].spec.dtype in _HALF_PRECISION
        both = [("state", spec.name) for spec in self._facts.costs.optimizer.states.get(name, [])]
        both += [("master", "")] if half else []
        needed = [("reads", reads, key) for key in [*both, ("gradient", "")]]
        needed += [("writes", writes, key) for key in [*both, ("weight", "")]]
        if not half:
            needed.append(("reads", reads, ("weight", "")))
        for direction, buffers, (role, state) in needed:
            found = [
                buffer
                for buffer in buffers
                if (buffer.role, buffer.owner, buffer.state) == (role, name, state)
            ]
            if not any(self._covers(buffer, item.start, end) for buffer in found):
                raise PlanError(
                    f"{where}: its {direction} lack elements {item.start} to {end} of {state or role}"
                )

    def _covers(self, buffer: Buffer, start: int, end: int) -> bool:
        """Whether a buffer holds the elements; a state of another size is always whole."""
        specs = self._facts.costs.optimizer.states.get(buffer.owner, [])
        sizes = {spec.name: spec.elements for spec in specs}
        if buffer.role == "state" and sizes[buffer.state] != self._facts.elements(buffer.owner):
            return buffer.start == 0 and buffer.count == sizes[buffer.state]
        count = buffer.count or self._facts.elements(buffer.owner)
        return buffer.start <= start and end <= buffer.start + count

    def finish(self) -> None:
        """Every element of what received a gradient has been updated once."""
        for name, senders in self._facts.gradient_senders.items():
            reached = 0
            for start, end in sorted(self._spans.get(name, [])):
                if start != reached:
                    problem = "twice" if start < reached else "never"
                    raise PlanError(f"elements around {min(start, reached)} of {name} are updated {problem}")
                reached = end
            if senders and reached != self._facts.elements(name):
                raise PlanError(f"elements of {name} from {reached} on are never updated")
