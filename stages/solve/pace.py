"""How long a step takes, estimated slot by slot on three lanes.

The updates of a region's weights are one pipelined block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stages.artifacts.costs import LinkCost
from stages.artifacts.plan import bookkeeping_bytes
from stages.solve.choice import Choice
from stages.solve.lowering.windows import Window
from stages.solve.problem import Piece, PlannedParameter, Problem, align


@dataclass(frozen=True)
class UpdateCost:
    """Updating the weights of one region: times of each lane, chunks, bytes of one chunk, and bytes of
    the plan's records for it."""

    read_ns: float
    compute_ns: float
    write_ns: float
    chunks: int
    chunk_bytes: int
    record_bytes: int


@dataclass(frozen=True)
class Updated:
    """A parameter to update; whether its weight and its state are streamed, and the leading elements
    whose state stays all the same."""

    parameter: PlannedParameter
    weight_moves: bool
    state_moves: bool
    kept: int = 0
    home: str = "host"  # of its state, beside an accelerator


@dataclass(frozen=True)
class Transfer:
    """Something that comes from its home for each of its windows.

    stores_at: the slot that makes it and sends it there (the first window then needs no fetch); -1
    when it is there at entry. lag: slots that may pass until it has left.
    """

    bytes: int
    count: int
    stays: tuple[Window, ...]
    stores_at: int
    lag: int
    home: str = "host"  # beside an accelerator


def transfer_ns(link: LinkCost, size_bytes: int, transfers: int, *, contended: bool) -> float:
    speed = link.contended_bytes_per_s if contended else link.bytes_per_s
    return transfers * link.latency_ns + size_bytes * 1e9 / max(1, speed)


def update_cost(
    problem: Problem,
    updated: Iterable[Updated],
    chunk_elements: int,
    longest_chunk: int,
    gradients: str,
) -> UpdateCost:
    """Cost of updating parameters one after another.

    Args:
        chunk_elements: Of an update that reads or writes.
        longest_chunk: Elements of one that does neither.
    """
    read = write = compute = 0.0
    chunks = chunk_bytes = records = 0
    for item in updated:
        parameter, weight_moves = item.parameter, item.weight_moves
        state_moves = item.state_moves and item.kept < parameter.elements
        size, kept = parameter.elements, item.kept if state_moves else 0
        into, out, reads, writes = _per_element(parameter, weight_moves, state_moves, gradients)
        state_alone = reads == writes == len(whole_pieces(parameter)) * state_moves
        length = min(chunk_elements if reads or writes else longest_chunk, size)
        kept_length = longest_chunk if state_alone else length
        if not problem.optimizer.chunkable:
            length = kept_length = size
        moving, resting = -(-(size - kept) // length), -(-kept // kept_length)
        units = moving + resting
        saved = kept * sum([piece.itemsize for piece in whole_pieces(parameter)])
        link_in, link_out = problem.link("read", item.home), problem.link("write", item.home)
        pieces = moving if state_alone else units
        read += transfer_ns(link_in, into * size - saved, reads * pieces, contended=True)
        write += transfer_ns(link_out, out * size - saved, writes * pieces, contended=True)
        if weight_moves and not parameter.has_master and gradients == "consume":
            write += transfer_ns(problem.write, parameter.bytes, 1, contended=True)
        compute += units * problem.optimizer.latency_ns
        compute += size * 1e9 / max(1, problem.optimizer.elements_per_s)
        chunks += pieces if reads or writes else 0
        chunk_bytes = max(chunk_bytes, align(max(into, out) * length))
        records += pieces * bookkeeping_bytes(1 + reads + writes, max(reads, writes))
        records += (units - pieces) * bookkeeping_bytes(1, 0)
    return UpdateCost(read, compute, write, chunks, chunk_bytes, records)


def whole_pieces(parameter: PlannedParameter) -> list[Piece]:
    """Optimizer state and master that grow with their parameter: those that stream."""
    return [piece for piece in parameter.pieces if piece.elements == parameter.elements]


def _per_element(
    parameter: PlannedParameter, weight_moves: bool, state_moves: bool, gradients: str
) -> tuple[int, int, int, int]:
    """Bytes read and written per element, and transfers each way per chunk."""
    pieces = whole_pieces(parameter)
    into = out = sum(piece.itemsize for piece in pieces) if state_moves else 0
    reads = writes = len(pieces) if state_moves else 0
    if weight_moves and (parameter.has_master or gradients != "consume"):
        out, writes = out + parameter.itemsize, writes + 1
        if not parameter.has_master:
            into, reads = into + parameter.itemsize, reads + 1
    if gradients == "move":
        into, reads = into + parameter.itemsize, reads + 1
    return into, out, reads, writes


def step_ns(
    problem: Problem, choice: Choice, transfers: Iterable[Transfer], updates: dict[int, UpdateCost]
) -> float:
    """Runs the lanes slot by slot."""
    slots = problem.slots
    fetches, stores = _queues(problem, choice, transfers)
    ready, deadline = [0.0] * slots, [0.0] * (slots + 1)
    compute = read = write = 0.0
    for slot, turn in enumerate(problem.turns):
        index = turn.region
        compute = max(compute, deadline[slot])
        for use, duration in fetches[slot]:
            read = max(read, compute) + duration
            ready[use] = read
        compute = max(compute, ready[slot]) + _compute_ns(problem, choice, index, forward=turn.forward)
        for until, duration in stores[slot]:
            write = max(write, compute) + duration
            deadline[min(until, slots)] = write
        completes = not turn.forward and turn.micro_batch == problem.last_micro_batch
        if completes and choice.gradients == "consume" and index in updates:
            compute, read, write = _pipeline(updates[index], choice.chunk_slots, compute, read, write)
    end = max(compute, read, write)
    if problem.accumulates:
        moved = sum([parameter.bytes for parameter in problem.updated]) if choice.gradients == "move" else 0
        fetched = transfer_ns(problem.read, moved, len(problem.updated) if moved else 0, contended=False)
        end += (problem.accumulate - 1) * (end + fetched)
    if choice.gradients != "consume":
        for cost in updates.values():
            lanes = (cost.read_ns, cost.compute_ns, cost.write_ns)
            end += max(*lanes, sum(lanes) / choice.chunk_slots)
    return end


def _compute_ns(problem: Problem, choice: Choice, index: int, *, forward: bool) -> int:
    region = problem.regions[index]
    if forward:
        return region.cost.forward_ns
    if not region.backward:
        return 0
    again = region.cost.forward_ns if choice.activations[index] == "recompute" else 0
    return region.cost.backward_ns + again


Queues = list[list[tuple[int, float]]]


def _queues(problem: Problem, choice: Choice, transfers: Iterable[Transfer]) -> tuple[Queues, Queues]:
    """Per slot: fetches (slot of the use, ns) and stores (slot that waits for it, ns)."""
    fetches: Queues = [[] for _ in range(problem.slots)]
    stores: Queues = [[] for _ in range(problem.slots)]
    for item in transfers:
        made_here = item.stores_at >= 0
        duration = transfer_ns(problem.link("read", item.home), item.bytes, item.count, contended=False)
        for stay in item.stays[1:] if made_here else item.stays:
            fetches[stay.fetch].append((stay.first, duration))
        if made_here and len(item.stays) > 1:
            link = problem.link("write", item.home)
            duration = transfer_ns(link, item.bytes, item.count, contended=False)
            stores[item.stores_at].append((item.stays[0].last + 1 + item.lag, duration))
    if choice.gradients == "move":
        _store_gradients(problem, choice, stores)
    for queue in fetches:
        queue.sort()
    return fetches, stores


def _store_gradients(problem: Problem, choice: Choice, stores: Queues) -> None:
    for parameter in problem.updated:
        slot = problem.update_slot(parameter.update_region)
        duration = transfer_ns(problem.write, parameter.bytes, 1, contended=False)
        stores[slot].append((slot + 1 + choice.prefetch[parameter.update_region], duration))


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
