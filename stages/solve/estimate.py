"""Memory and time of a choice without lowering it: what the greedy solvers compare candidates by.

Memory follows the lowering slot by slot (it differs by what packing wastes). The solvers lower and
simulate what they settle on, and correct the estimate by what they find.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from stages.artifacts.plan import bookkeeping_bytes
from stages.solve.choice import (
    Choice,
    StateGroup,
    WeightGroup,
    everything_resident,
    state_groups,
    weight_groups,
)
from stages.solve.homes import NO_SPILL, Spill, spill_of
from stages.solve.lowering.step import saved_uses, value_uses
from stages.solve.lowering.windows import Window, windows
from stages.solve.moments import Memory, Positions
from stages.solve.pace import Transfer, UpdateCost, Updated, step_ns, update_cost, whole_pieces
from stages.solve.problem import PlannedParameter, PlannedRegion, Problem, align

#: (position, bytes that begin or, negative, end there)
Change = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Estimate:
    memory: Memory
    step_ns: float


@dataclass(frozen=True)
class _Details:
    """What several parts of an estimate need of a choice."""

    choice: Choice
    streamed: list[bool]  # per weight group
    updates: dict[int, UpdateCost]  # per region
    spill: Spill


class Estimator(Positions):
    """Estimates choices for one problem; what does not depend on the choice is computed once."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem
        self.weights: tuple[WeightGroup, ...] = weight_groups(problem)
        self.states: tuple[StateGroup, ...] = state_groups(problem)
        self._batches = range(problem.micro_batches)
        self._value_slots = {
            (value.name, batch): value_uses(problem, value, batch)
            for value in problem.values.values()
            if value.producer >= 0
            for batch in self._batches
        }
        weight_of = {name: index for index, group in enumerate(self.weights) for name in group.parameters}
        state_of = {name: index for index, group in enumerate(self.states) for name in group.parameters}
        self._updated_in: dict[int, list[PlannedParameter]] = defaultdict(list)
        for parameter in problem.updated:
            self._updated_in[parameter.update_region].append(parameter)
        self._group_of = {
            parameter.name: (weight_of.get(parameter.name), state_of[parameter.name])
            for parameter in problem.updated
        }
        self._groups_in = {
            region: tuple(dict.fromkeys(self._group_of[parameter.name] for parameter in updated))
            for region, updated in self._updated_in.items()
        }
        #: bytes of gradients that a region's backward makes, with the first micro-batch and with others
        self._new_gradients = [[0, 0] for _ in range(self.count)]
        self._base = self._change_of_fixed()
        # what the plan records beside updates: two fetches of each weight, a few instructions a region
        weights, values = len(problem.parameters), len(problem.values)
        self._records = bookkeeping_bytes(
            2 * weights + 5 * self.count * len(self._batches), 3 * weights + 2 * values * len(self._batches)
        )
        self._cache: dict[tuple[object, ...], object] = {}

    def estimate(self, choice: Choice) -> Estimate:
        details = self._details(choice)
        return Estimate(self._memory(details), self._step_ns(details))

    def memory(self, choice: Choice) -> Memory:
        return self._memory(self._details(choice))

    def _windows(self, key: tuple[object, ...], uses: list[int], choice: Choice, lag: int) -> list[Window]:
        distances = [choice.prefetch[self.distance_of(use)] for use in uses]
        if key[0] == "weight":
            distances = [self.problem.lead_slots(distance) for distance in distances]
        leads = tuple(distances)
        known = (*key, leads, lag)
        found = self._cache.get(known)
        if found is None:
            by_use = dict(zip(uses, leads, strict=True))
            found = self._cache[known] = windows(uses, by_use.__getitem__, lag)
        assert isinstance(found, list)
        return found

    # what a choice means

    def _details(self, choice: Choice) -> _Details:
        streamed = [
            index not in choice.held and any(choice.weights[region] for region in group.regions)
            for index, group in enumerate(self.weights)
        ]
        spill = self._spill(choice, streamed)
        updates = {region: self._update(choice, streamed, region, spill) for region in self._updated_in}
        return _Details(choice, streamed, updates, spill)

    def _spill(self, choice: Choice, streamed: list[bool]) -> Spill:
        """What host memory does not hold of what this choice has beyond an accelerator."""
        problem = self.problem
        if problem.host is None:
            return NO_SPILL
        moving = sum([problem.values[name].bytes for name in choice.values])
        for region, how in zip(problem.regions, choice.activations, strict=True):
            moving += region.saved_extent_bytes if how == "move" else 0
        moving *= problem.micro_batches
        if choice.gradients == "move":
            moving += sum([parameter.bytes for parameter in problem.updated])
        weights = [group.bytes if moves else 0 for group, moves in zip(self.weights, streamed, strict=True)]
        states = [group.bytes if moves else 0 for group, moves in zip(self.states, choice.state, strict=True)]
        return spill_of(problem.host.room_bytes, weights, moving, states)

    def _update(self, choice: Choice, streamed: list[bool], region: int, spill: Spill) -> UpdateCost:
        """What updating the weights whose gradients are complete in `region` moves and takes."""
        flags = tuple(
            [
                (weight is not None and streamed[weight], choice.state[state])
                for weight, state in self._groups_in[region]
            ]
        )
        kept = tuple(
            [choice.kept.get(item.name, 0) for item in self._updated_in[region]] if choice.kept else ()
        )
        far = tuple([state in spill.states for _, state in self._groups_in[region]]) if spill.states else ()
        lengths = choice.chunk_elements, choice.longest_chunk
        known = ("update", region, *lengths, choice.gradients, flags, kept, far)
        found = self._cache.get(known)
        if found is None:
            by_group = dict(zip(self._groups_in[region], flags, strict=True))
            updated = [
                Updated(
                    parameter,
                    *by_group[self._group_of[parameter.name]],
                    choice.kept.get(parameter.name, 0),
                    "disk" if self._group_of[parameter.name][1] in spill.states else "host",
                )
                for parameter in self._updated_in[region]
            ]
            found = update_cost(self.problem, updated, *lengths, choice.gradients)
            self._cache[known] = found
        assert isinstance(found, UpdateCost)
        return found

    # memory

    def _memory(self, details: _Details) -> Memory:
        choice = details.choice
        planned = [0] * (self.positions + 1)
        resident = sum(
            group.bytes
            for streamed, group in zip(details.streamed, self.weights, strict=True)
            if not streamed
        )
        resident += sum(
            group.bytes for streamed, group in zip(choice.state, self.states, strict=True) if not streamed
        )
        resident += self._kept_bytes(choice)
        if self.problem.host is None:  # else the process that keeps the records is not on the device
            resident += self._records + sum(cost.record_bytes for cost in details.updates.values())
        for index, streamed in enumerate(details.streamed):
            if streamed:
                self._add_weight(planned, index, choice)
        moving = list(accumulate(planned[:-1]))
        self._add_chunks(details, moving)
        return Memory(resident, moving, self._dynamic(choice))

    def _kept_bytes(self, choice: Choice) -> int:
        """Optimizer state that stays of parameters whose other state streams."""
        total = 0
        for name, elements in choice.kept.items():
            if choice.state[self._group_of[name][1]]:
                parameter = self.problem.parameters[name]
                total += sum([piece.itemsize for piece in whole_pieces(parameter)]) * elements
        return total

    def _add_weight(self, change: list[int], index: int, choice: Choice) -> None:
        group = self.weights[index]
        stays = self._windows(("weight", index), list(group.slots), choice, 0)
        for stay in stays:
            last = self.begins(stay.last)
            if stay is stays[-1] and group.in_place and choice.gradients == "consume":
                last = self.ends(stay.last)
            change[self.begins(stay.fetch)] += group.bytes
            change[last + 1] -= group.bytes

    def _add_chunks(self, details: _Details, planned: list[int]) -> None:
        slots = details.choice.chunk_slots
        if details.choice.gradients != "consume":
            planned[-1] += slots * max((cost.chunk_bytes for cost in details.updates.values()), default=0)
            return
        waiting = 0
        for region in sorted(details.updates, reverse=True):
            size = details.updates[region].chunk_bytes
            last = self.problem.update_slot(region)
            for position in range(self.begins(self._first_of_updates(region)), self.begins(last) + 1):
                planned[position] += max(waiting, (slots - 1) * size)
            planned[self.ends(last)] += slots * size
            waiting = (slots - 1) * size

    def _first_of_updates(self, region: int) -> int:
        """The slot from which chunks may be on their way to a region's updates."""
        together = self.problem.stays_in_tail and region < self.problem.tail
        return self.problem.backward_slot(region) if together else self.problem.update_slot(region)

    def _dynamic(self, choice: Choice) -> list[int]:
        change, work = list(self._base), [0] * self.positions
        for name in choice.values:
            self._apply(change, self.value_change(name, choice, moves=False), -1)
            self._apply(change, self.value_change(name, choice, moves=True), 1)
        for region in self.problem.regions:
            how = choice.activations[region.index]
            back = self.problem.distance_of(region.index, forward=False)
            known = ("region", region.index, how)
            if how == "move":
                known = (*known, choice.prefetch[region.index], choice.prefetch[back])
            if known not in self._cache:
                self._cache[known] = self.region_change(region, choice)
            ends, forward_work, backward_work = self._cache[known]  # type: ignore[misc]
            self._apply(change, ends, 1)
            for batch in self._batches:
                work[self.begins(self.problem.forward_slot(region.index, batch))] = forward_work
                back = self.problem.backward_slot(region.index, batch)
                work[self.begins(back)] = backward_work[batch > 0 or self.problem.accumulates]
        self._add_gradients(change, choice)
        updating = choice.longest_chunk * self.problem.optimizer.workspace_bytes_per_element
        for position in self.updates:
            work[position] = updating
        work[-1] = updating
        held = list(map(add, accumulate(change[:-1]), work))
        held[0] = max(held[0], self.problem.initial_bytes)  # before the first step
        if self.problem.allocator_overhead_ppm:
            held = list(map(self.problem.as_allocated, held))
        return held

    @staticmethod
    def _apply(change: list[int], difference: Change, sign: int) -> None:
        for position, size in difference:
            change[position] += sign * size

    def _stay_change(self, stays: list[Window], size: int, lag: int) -> Change:
        """A dynamic buffer: made by its first use, ended by its last, and between on its way to disk."""
        change = []
        for number, stay in enumerate(stays):
            first = self.begins(stay.fetch if number else stay.first)
            last = self.begins(stay.last) if number == len(stays) - 1 else self.ends(stay.last + lag)
            change += [(first, size), (last + 1, -size)]
        return tuple(change)

    def value_change(self, name: str, choice: Choice, *, moves: bool) -> Change:
        size, change = self.problem.values[name].bytes, []
        for batch in self._batches:
            slots = self._value_slots[name, batch]
            lag = choice.prefetch[self.problem.values[name].producer]
            stays = [Window(0, slots[0], slots[-1])]
            if moves:
                stays = self._windows(("value", name, batch), slots, choice, lag)
            change += self._stay_change(stays, size, lag)
        return tuple(change)

    def region_change(self, region: PlannedRegion, choice: Choice) -> tuple[Change, int, tuple[int, int]]:
        """Saved activations; workspace forward; backward with the first micro-batch and with others."""
        cost = region.cost
        how = choice.activations[region.index]
        made = sum(self.problem.values[name].bytes for name in region.outputs)
        forward = max(0, cost.dropped_forward_peak_bytes - made)
        if not region.backward:
            return (), forward, (0, 0)
        if how != "recompute":
            forward = max(0, cost.forward_peak_bytes - made - cost.saved_bytes)
        # a recompute comes before the gradients, which count from the same position on
        again = cost.forward_peak_bytes - cost.saved_bytes if how == "recompute" else 0
        beyond = max(cost.backward_peak_bytes, again)
        first, others = self._new_gradients[region.index]
        change = [item for batch in self._batches for item in self._saved_change(region, choice, batch)]
        return tuple(change), forward, (max(0, beyond - first), max(0, beyond - others))

    def _saved_change(self, region: PlannedRegion, choice: Choice, batch: int) -> Change:
        uses = saved_uses(self.problem, region.index, batch)
        how, lag = choice.activations[region.index], choice.prefetch[region.index]
        stays = [Window(0, uses[1] if how == "recompute" else uses[0], uses[1])]
        if how == "move":
            stays = self._windows(("saved", region.index, batch), uses, choice, lag)
        return self._stay_change(stays, region.cost.saved_bytes, lag)

    def _change_of_fixed(self) -> list[int]:
        """Batch, buffers, values that stay, gradients of values; fills in what each backward makes."""
        problem = self.problem
        change = [0] * (self.positions + 1)
        change[0] += sum(item.bytes for item in problem.persistent.values())
        for value in problem.values.values():
            if value.producer < 0:
                change[0] += value.bytes * problem.micro_batches
                continue
            for batch in self._batches:
                slots = self._value_slots[value.name, batch]
                self._apply(change, self._stay_change([Window(0, slots[0], slots[-1])], value.bytes, 0), 1)
                if value.receives_gradient:
                    maker = problem.backward_slot(max(value.backward_consumers), batch)
                    change[self.begins(maker)] += value.bytes
                    change[self.begins(problem.backward_slot(value.producer, batch)) + 1] -= value.bytes
            if value.receives_gradient:
                for batch in range(2):
                    self._new_gradients[max(value.backward_consumers)][batch] += value.bytes
        for parameter in problem.updated:
            first, several = max(parameter.gradient_regions), len(parameter.gradient_regions) > 1
            self._new_gradients[first][0] += parameter.bytes
            # elsewhere the sum of those before stands while the addend is made, unless it gets a buffer
            self._new_gradients[first][1] += parameter.bytes if several else 0
        return change

    def dynamic(self, choice: Choice) -> list[int]:
        """Bytes of tensors outside the arena, with workspace and the allocator's part, at each position."""
        return self._dynamic(choice)

    def update_costs(self, choice: Choice) -> dict[int, UpdateCost]:
        """What updating takes, by the region whose backward completes the gradients."""
        return self._details(choice).updates

    def moving_elements(self, choice: Choice) -> int:
        """Elements whose update reads or writes something."""
        details, total = self._details(choice), 0
        for parameter in self.problem.updated:
            weight, state = self._group_of[parameter.name]
            in_pieces = parameter.has_master or choice.gradients != "consume"
            weight_moves = weight is None or details.streamed[weight]  # what no region reads is away
            if choice.gradients == "move" or (weight_moves and in_pieces):
                total += parameter.elements
            elif choice.state[state]:
                total += parameter.elements - min(parameter.elements, choice.kept.get(parameter.name, 0))
        return total

    def moved_bytes(self, choice: Choice, region: int) -> int:
        """Bytes that leave for disk after a region's forward."""
        planned = self.problem.regions[region]
        saved = planned.saved_extent_bytes if choice.activations[region] == "move" else 0
        values = [self.problem.values[name] for name in planned.outputs if name in choice.values]
        return saved + sum(align(value.bytes) for value in values)

    def base_change(self, position: int) -> int:
        """How dynamic memory that no choice alters changes at a position."""
        return self._base[position]

    def value_windows(self, name: str, choice: Choice, batch: int) -> list[Window]:
        """When a micro-batch's value that moves is on the device."""
        slots, lag = self._value_slots[name, batch], choice.prefetch[self.problem.values[name].producer]
        return self._windows(("value", name, batch), slots, choice, lag)

    def gradient_bytes(self, gradients: str) -> list[int]:
        """Gradients of parameters at each position, if fetches and stores are beside their use."""
        choice = everything_resident(self.problem)
        choice.gradients = gradients
        return list(accumulate(self._change_by_gradients(choice)[:-1]))

    def _add_gradients(self, change: list[int], choice: Choice) -> None:
        leads = tuple(choice.prefetch) if choice.gradients == "move" else ()
        known = ("gradients", choice.gradients, leads)
        found = self._cache.get(known)
        if found is None:
            found = self._cache[known] = self._change_by_gradients(choice)
        assert isinstance(found, list)
        change[:] = map(add, change, found)

    def _change_by_gradients(self, choice: Choice) -> list[int]:
        change = [0] * (self.positions + 1)
        for parameter in self.problem.updated:
            region = parameter.update_region
            slot = self.problem.update_slot(region)
            last = {
                "consume": self.ends(slot),
                "keep": self.positions - 1,
                "move": self.ends(slot + choice.prefetch[region]),
            }[choice.gradients]
            first = self.begins(self.problem.backward_slot(max(parameter.gradient_regions)))
            if self.problem.accumulates and choice.gradients == "keep":
                first = 0  # further batches find it
            change[first] += parameter.bytes
            change[last + 1] -= parameter.bytes
            self._apply(change, self._partial_gradients(parameter), 1)
            if self.problem.accumulates:
                self._apply(change, self._partial_of_further_batch(parameter, choice.gradients), 1)
        return change

    def _partial_of_further_batch(self, parameter: PlannedParameter, gradients: str) -> Change:
        """What a further batch's first micro-batch sends from several regions, beside the sum. On disk the
        sum is away until the last of them: until then, the partial one takes no more than the sum of the
        first batch, which counts already."""
        first, last = max(parameter.gradient_regions), min(parameter.gradient_regions)
        if first == last:
            return ()
        begins = self.begins(self.problem.backward_slot(last if gradients == "move" else first))
        ends = self.begins(self.problem.backward_slot(last))
        return ((begins, parameter.bytes), (ends + 1, -parameter.bytes))

    def _partial_gradients(self, parameter: PlannedParameter) -> Change:
        """Gradients of single micro-batches that are complete only after several regions."""
        first, last = max(parameter.gradient_regions), min(parameter.gradient_regions)
        change: list[tuple[int, int]] = []
        for batch in self._batches[1:] if first != last else ():
            change.append((self.begins(self.problem.backward_slot(first, batch)), parameter.bytes))
            change.append((self.begins(self.problem.backward_slot(last, batch)) + 1, -parameter.bytes))
        return tuple(change)

    # time

    def _step_ns(self, details: _Details) -> float:
        choice, spill = details.choice, details.spill
        near = "disk" if spill.activations else "host"
        transfers = [
            Transfer(
                group.bytes,
                len(group.parameters),
                tuple(stays),
                stores_at=-1,
                lag=0,
                home="disk" if index in spill.weights else "host",
            )
            for index, group in enumerate(self.weights)
            if details.streamed[index]
            for stays in (self._windows(("weight", index), list(group.slots), choice, 0),)
        ]
        for batch in self._batches:
            transfers += self._transfers_of_activations(choice, batch, near)
        return step_ns(self.problem, choice, transfers, details.updates)

    def _transfers_of_activations(self, choice: Choice, batch: int, near: str) -> Iterator[Transfer]:
        for name in choice.values:
            slots = self._value_slots[name, batch]
            lag = choice.prefetch[self.problem.values[name].producer]
            stays = self._windows(("value", name, batch), slots, choice, lag)
            yield Transfer(self.problem.values[name].bytes, 1, tuple(stays), slots[0], lag, near)
        for region in self.problem.regions:
            if region.backward and choice.activations[region.index] == "move":
                slots = saved_uses(self.problem, region.index, batch)
                lag = choice.prefetch[region.index]
                stays = self._windows(("saved", region.index, batch), slots, choice, lag)
                yield Transfer(region.cost.saved_bytes, 1, tuple(stays), slots[0], lag, near)
