"""Memory and time of a choice without lowering it: what the greedy solvers compare candidates by.

Memory follows the lowering slot by slot (it differs by what packing wastes); time runs the three
lanes slot by slot, with the update of a region's weights as one pipelined block. The solvers lower
and simulate what they settle on, and correct the estimate by what they find.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from stages.artifacts.costs import LinkCost
from stages.solve.choice import Choice, StateGroup, WeightGroup, state_groups, weight_groups
from stages.solve.lowering.windows import Window, windows
from stages.solve.problem import PlannedParameter, PlannedRegion, PlannedValue, Problem, align


@dataclass(frozen=True)
class Memory:
    """Bytes: of what is resident in the arena, and, per position, of what moves and what is dynamic."""

    resident: int
    planned: list[int]
    dynamic: list[int]

    @cached_property
    def peak_bytes(self) -> int:
        return self.resident + max(self.planned) + max(self.dynamic)

    def at(self, position: int) -> int:
        return self.resident + self.planned[position] + self.dynamic[position]


@dataclass(frozen=True)
class UpdateCost:
    """Updating the weights of one region: times of each lane, chunks, and bytes of one chunk."""

    read_ns: float
    compute_ns: float
    write_ns: float
    chunks: int
    chunk_bytes: int


def transfer_ns(link: LinkCost, size_bytes: int, transfers: int, *, contended: bool) -> float:
    speed = link.contended_bytes_per_s if contended else link.bytes_per_s
    return transfers * link.latency_ns + size_bytes * 1e9 / max(1, speed)


class Estimator:
    """Positions: forward of each region, then backward and update of each in reverse, then the
    update phase."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.weights: tuple[WeightGroup, ...] = weight_groups(problem)
        self.states: tuple[StateGroup, ...] = state_groups(problem)
        self.count = len(problem.regions)
        self.positions = 3 * self.count + 1
        self._values = [value for value in problem.values.values() if value.producer >= 0]
        self._constant = sum(item.bytes for item in problem.persistent.values())
        self._constant += sum(item.bytes for item in problem.values.values() if item.producer < 0)
        self._value_slots = {value.name: self._uses(value) for value in self._values}
        self._gradient_change = self._fixed_gradients()
        self._group_of_state = {
            name: index for index, group in enumerate(self.states) for name in group.parameters
        }
        self._group_of_weight = {
            name: index for index, group in enumerate(self.weights) for name in group.parameters
        }
        self._updated_in: dict[int, list[PlannedParameter]] = defaultdict(list)
        for parameter in problem.updated:
            self._updated_in[parameter.update_region].append(parameter)
        # what an update's cost depends on: the groups of its weights and of their state
        self._groups_in = {
            region: (
                tuple({self._group_of_weight[item.name] for item in updated if item.uses}),
                tuple({self._group_of_state[item.name] for item in updated}),
            )
            for region, updated in self._updated_in.items()
        }
        self._stays: dict[tuple[object, ...], list[Window]] = {}
        self._update_costs: dict[tuple[object, ...], UpdateCost] = {}
        self._gradient_changes: dict[str, list[int]] = {}

    # positions

    def begins(self, slot: int) -> int:
        return slot if slot < self.count else self.count + 2 * (slot - self.count)

    def ends(self, slot: int) -> int:
        """The last position of a slot: its update."""
        return min(slot if slot < self.count else self.begins(slot) + 1, self.positions - 2)

    def _uses(self, value: PlannedValue) -> list[int]:
        back = [self.problem.backward_slot(region) for region in value.backward_consumers]
        return sorted((value.producer, *value.consumers, *back))

    def _windows(self, key: object, uses: list[int], choice: Choice, lag: int) -> list[Window]:
        leads = tuple(choice.prefetch[self.region_of(use)] for use in uses)
        known = (key, leads, lag)
        if known not in self._stays:
            by_use = dict(zip(uses, leads, strict=True))
            self._stays[known] = windows(uses, by_use.__getitem__, lag)
        return self._stays[known]

    def region_of(self, slot: int) -> int:
        return slot if slot < self.count else 2 * self.count - 1 - slot

    # memory

    def memory(self, choice: Choice) -> Memory:
        planned, resident = self._planned(choice)
        return Memory(resident, planned, self._dynamic(choice))

    def _planned(self, choice: Choice) -> tuple[list[int], int]:
        change = [0] * (self.positions + 1)
        resident = 0
        for index, group in enumerate(self.weights):
            if not self.is_streamed(choice, index):
                resident += group.bytes
                continue
            stays = self._windows(("weight", index), list(group.slots), choice, 0)
            for number, stay in enumerate(stays):
                last = self.begins(stay.last)
                if number == len(stays) - 1 and group.in_place and choice.gradients == "consume":
                    last = self.ends(stay.last)
                change[self.begins(stay.fetch)] += group.bytes
                change[last + 1] -= group.bytes
        for streamed, state in zip(choice.state, self.states, strict=True):
            resident += 0 if streamed else state.bytes
        planned = list(accumulate(change[:-1]))
        self._add_chunks(choice, planned)
        return planned, resident

    def _add_chunks(self, choice: Choice, planned: list[int]) -> None:
        if choice.gradients != "consume":
            sizes = [self.update_cost(choice, region).chunk_bytes for region in self._updated_in]
            planned[-1] += choice.chunk_slots * max(sizes, default=0)
            return
        waiting = 0
        for region in sorted(self._updated_in, reverse=True):
            size = self.update_cost(choice, region).chunk_bytes
            position = self.begins(self.problem.backward_slot(region))
            planned[position] += max(waiting, (choice.chunk_slots - 1) * size)
            planned[position + 1] += choice.chunk_slots * size
            waiting = (choice.chunk_slots - 1) * size

    def is_streamed(self, choice: Choice, group: int) -> bool:
        return any(choice.weights[region] for region in self.weights[group].regions)

    def update_cost(self, choice: Choice, region: int) -> UpdateCost:
        """What updating the weights whose gradients are complete in `region` moves and takes."""
        weights, states = self._groups_in.get(region, ((), ()))
        known = (
            region,
            choice.chunk_elements,
            choice.gradients,
            tuple(self.is_streamed(choice, group) for group in weights),
            tuple(choice.state[group] for group in states),
        )
        if known not in self._update_costs:
            self._update_costs[known] = self._compute_update_cost(choice, region)
        return self._update_costs[known]

    def _compute_update_cost(self, choice: Choice, region: int) -> UpdateCost:
        problem, deferred = self.problem, choice.gradients != "consume"
        read = write = compute = 0.0
        chunks = chunk_bytes = 0
        for parameter in self._updated_in.get(region, ()):
            length = min(choice.chunk_elements, parameter.elements) if problem.optimizer.chunkable else 0
            length = length or parameter.elements
            units = -(-parameter.elements // length)
            into, out, reads, writes = self._bytes_per_element(choice, parameter, deferred)
            size = parameter.elements
            read += transfer_ns(problem.read, into * size, reads * units, contended=True)
            write += transfer_ns(problem.write, out * size, writes * units, contended=True)
            if self._writes_whole(choice, parameter, deferred):
                write += transfer_ns(problem.write, parameter.bytes, 1, contended=True)
            compute += units * problem.optimizer.latency_ns + size * 1e9 / problem.optimizer.elements_per_s
            chunks += units if reads or writes else 0
            chunk_bytes = max(chunk_bytes, align(max(into, out) * length))
        return UpdateCost(read, compute, write, chunks, chunk_bytes)

    def _bytes_per_element(
        self, choice: Choice, parameter: PlannedParameter, deferred: bool
    ) -> tuple[int, int, int, int]:
        """Read and written per element, and transfers per chunk."""
        pieces = [piece for piece in parameter.pieces if piece.elements == parameter.elements]
        moves = choice.state[self._group_of_state[parameter.name]]
        state = sum(piece.itemsize for piece in pieces) if moves else 0
        into = out = state
        reads = writes = len(pieces) if moves else 0
        streamed = self.is_streamed(choice, self._group_of_weight[parameter.name])
        if streamed and (parameter.has_master or deferred):
            out, writes = out + parameter.itemsize, writes + 1
            if not parameter.has_master:
                into, reads = into + parameter.itemsize, reads + 1
        if deferred and choice.gradients == "move":
            into, reads = into + parameter.itemsize, reads + 1
        return into, out, reads, writes

    def _writes_whole(self, choice: Choice, parameter: PlannedParameter, deferred: bool) -> bool:
        streamed = self.is_streamed(choice, self._group_of_weight[parameter.name])
        return streamed and not parameter.has_master and not deferred

    def _dynamic(self, choice: Choice) -> list[int]:
        change = list(self._gradient_change)
        for value in self._values:
            slots, moves = self._value_slots[value.name], value.name in choice.values
            self._add_dynamic(change, ("value", value.name), slots, value.bytes, choice, moves)
        total_work = [0] * self.positions
        for region in self.problem.regions:
            self._add_region(change, total_work, region, choice)
        self._add_gradients(change, choice)
        total = list(accumulate(change[:-1]))
        work = choice.chunk_elements * self.problem.optimizer.workspace_bytes_per_element
        for position in range(self.count + 1, self.positions, 2):
            total_work[position] = max(total_work[position], work)
        total_work[-1] = work
        return [here + extra for here, extra in zip(total, total_work, strict=True)]

    def _add_dynamic(
        self, change: list[int], key: object, slots: list[int], size: int, choice: Choice, moves: bool
    ) -> None:
        lag = choice.prefetch[self.region_of(slots[0])]
        stays = self._windows(key, slots, choice, lag) if moves else [Window(0, slots[0], slots[-1])]
        for number, stay in enumerate(stays):
            first = self.begins(stay.fetch if number else stay.first)
            last = self.begins(stay.last) if number == len(stays) - 1 else self.ends(stay.last + lag)
            change[first] += size
            change[last + 1] -= size

    def _add_region(
        self, change: list[int], work: list[int], region: PlannedRegion, choice: Choice
    ) -> None:
        cost, back = region.cost, self.problem.backward_slot(region.index)
        how = choice.activations[region.index]
        made = sum(self.problem.values[name].bytes for name in region.outputs)
        if not region.backward or how == "recompute":
            work[region.index] = max(0, cost.dropped_forward_peak_bytes - made)
        else:
            work[region.index] = max(0, cost.forward_peak_bytes - made - cost.saved_bytes)
        if not region.backward:
            return
        new = self._new_gradients[region.index]
        again = cost.forward_peak_bytes - cost.saved_bytes - new if how == "recompute" else 0
        work[self.begins(back)] = max(0, cost.backward_peak_bytes - new, again)
        slots = [back] if how == "recompute" else [region.index, back]
        key = ("saved", region.index)
        self._add_dynamic(change, key, slots, cost.saved_bytes, choice, how == "move")

    def _fixed_gradients(self) -> list[int]:
        """What no choice changes: batch, buffers, gradients of values; and what each backward makes."""
        change = [0] * (self.positions + 1)
        change[0] += self._constant
        self._new_gradients = [0] * self.count
        for value in self._values:
            if value.receives_gradient:
                maker = max(value.backward_consumers)
                change[self.begins(self.problem.backward_slot(maker))] += value.bytes
                change[self.begins(self.problem.backward_slot(value.producer)) + 1] -= value.bytes
                self._new_gradients[maker] += value.bytes
        for parameter in self.problem.updated:
            self._new_gradients[max(parameter.gradient_regions)] += parameter.bytes
        return change

    def _add_gradients(self, change: list[int], choice: Choice) -> None:
        key = choice.gradients
        if key not in self._gradient_changes or key == "move":
            self._gradient_changes[key] = self._change_by_gradients(choice)
        for position, difference in enumerate(self._gradient_changes[key]):
            change[position] += difference

    def _change_by_gradients(self, choice: Choice) -> list[int]:
        change = [0] * (self.positions + 1)
        for region, updated in self._updated_in.items():
            slot = self.problem.backward_slot(region)
            last = {
                "consume": self.ends(slot),
                "keep": self.positions - 1,
                "move": self.ends(slot + choice.prefetch[region]),
            }[choice.gradients]
            for parameter in updated:
                change[self.begins(self.problem.backward_slot(max(parameter.gradient_regions)))] += parameter.bytes
                change[last + 1] -= parameter.bytes
        return change

    # time

    def step_ns(self, choice: Choice) -> float:
        """Simulates the lanes slot by slot."""
        fetches, stores = self._transfers(choice)
        compute = read = write = ready_write = 0.0
        slots = 2 * self.count
        ready, deadline = [0.0] * (slots + 1), [0.0] * (slots + 1)
        for slot in range(slots):
            region = self.problem.regions[self.region_of(slot)]
            compute = max(compute, deadline[slot])
            for use, duration in fetches[slot]:
                read = max(read, compute) + duration
                ready[use] = read
            compute = max(compute, ready[slot]) + self._compute_ns(region, slot, choice)
            for until, duration in stores[slot]:
                write = max(write, compute) + duration
                deadline[min(until, slots)] = write
            if slot >= self.count and choice.gradients == "consume":
                cost = self.update_cost(choice, region.index)
                compute, read, write = _pipeline(cost, choice.chunk_slots, compute, read, write)
        end = max(compute, read, write, ready_write, deadline[slots])
        if choice.gradients != "consume":
            for region in self._updated_in:
                cost = self.update_cost(choice, region)
                lanes = (cost.read_ns, cost.compute_ns, cost.write_ns)
                end += max(*lanes, sum(lanes) / choice.chunk_slots)
        return end

    def _compute_ns(self, region: PlannedRegion, slot: int, choice: Choice) -> int:
        if slot < self.count:
            return region.cost.forward_ns
        if not region.backward:
            return 0
        again = region.cost.forward_ns if choice.activations[region.index] == "recompute" else 0
        return region.cost.backward_ns + again

    def _transfers(
        self, choice: Choice
    ) -> tuple[list[list[tuple[int, float]]], list[list[tuple[int, float]]]]:
        """Per slot: fetches (slot of the use, ns) and stores (slot that waits for it, ns)."""
        fetches: list[list[tuple[int, float]]] = [[] for _ in range(2 * self.count)]
        stores: list[list[tuple[int, float]]] = [[] for _ in range(2 * self.count)]
        for index, group in enumerate(self.weights):
            if self.is_streamed(choice, index):
                duration = transfer_ns(
                    self.problem.read, group.bytes, len(group.parameters), contended=False
                )
                for stay in self._windows(("weight", index), list(group.slots), choice, 0):
                    fetches[stay.fetch].append((stay.first, duration))
        for key, slots, size in self._moved(choice):
            lag = choice.prefetch[self.region_of(slots[0])]
            stays = self._windows(key, slots, choice, lag)
            for before, stay in zip(stays, stays[1:], strict=False):
                duration = transfer_ns(self.problem.read, size, 1, contended=False)
                fetches[stay.fetch].append((stay.first, duration))
                duration = transfer_ns(self.problem.write, size, 1, contended=False)
                if before is stays[0]:
                    stores[slots[0]].append((before.last + 1 + lag, duration))
        if choice.gradients == "move":
            for parameter in self.problem.updated:
                slot = self.problem.backward_slot(parameter.update_region)
                duration = transfer_ns(self.problem.write, parameter.bytes, 1, contended=False)
                stores[slot].append((slot + 1 + choice.prefetch[parameter.update_region], duration))
        for queue in fetches:
            queue.sort()
        return fetches, stores

    def _moved(self, choice: Choice) -> Iterable[tuple[object, list[int], int]]:
        for name in choice.values:
            yield ("value", name), self._value_slots[name], self.problem.values[name].bytes
        for region in self.problem.regions:
            if region.backward and choice.activations[region.index] == "move":
                slots = [region.index, self.problem.backward_slot(region.index)]
                yield ("saved", region.index), slots, region.cost.saved_bytes


def _pipeline(
    cost: UpdateCost, slots: int, compute: float, read: float, write: float
) -> tuple[float, float, float]:
    """Ends of the lanes after an update of `cost.chunks` chunks, of which `slots` fit at once."""
    if not cost.chunks:
        return compute + cost.compute_ns, read, write
    last_read, last_write = cost.read_ns / cost.chunks, cost.write_ns / cost.chunks
    last_compute = cost.compute_ns / cost.chunks
    if slots == 1:
        start = max(compute, write, read)
        compute = start + cost.read_ns + cost.compute_ns + cost.write_ns - last_write
        return compute, compute, compute + last_write
    whole = (cost.read_ns + cost.compute_ns + cost.write_ns) / slots
    start = compute
    # what is fetched ahead of the first update: one chunk less than there are slots
    read = max(read, start - (slots - 1) * last_read) + cost.read_ns
    compute = max(start + cost.compute_ns, read + last_compute, start + whole - last_write)
    write = max(write + cost.write_ns, compute + last_write)
    return max(compute, write - slots * last_write), max(read, write - slots * last_write), write
