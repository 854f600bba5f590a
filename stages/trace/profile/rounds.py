"""Times of forward and backward, taken as a training step meets them.

A region that runs again and again on the same tensors finds them in the processor's caches, and its
results land on pages that it freed a moment ago. In a step every region has weights of its own, and
what it keeps stays until its backward. So kinds run in rounds that are small steps: forward of all,
several copies of those that repeat, then backward in reverse, as far as memory has room.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from stages.artifacts import graph as g
from stages.artifacts.costs import RegionCost
from stages.device.cpu import Cpu
from stages.device.interface import Device
from stages.trace.profile.quiet import QUIET_SHARE, Moment
from stages.trace.profile.regions import Bench, timed
from stages.trace.profile.stand_ins import Case, representative_cases

#: copies of a repeated kind in one round at most: more only make the round longer
_MOST_COPIES = 4
_LEAST_ROUNDS = 3
_CPU = Cpu()
_MOST_ROUNDS = 12


@dataclass(frozen=True)
class Times:
    """others_share: of the processors, what other processes took meanwhile."""

    forward_ns: int
    backward_ns: int
    others_share: float


@dataclass(frozen=True)
class Member:
    """A kind in a round: how often, and what one copy holds from its forward to its backward."""

    case: Case
    copies: int
    held_bytes: int
    peak_bytes: int


@dataclass
class _Round:
    others_share: float
    forward_ns: dict[int, list[int]] = field(default_factory=dict)
    backward_ns: dict[int, list[int]] = field(default_factory=dict)


def measure_times(
    graph: g.RegionGraph,
    cases: Mapping[int, Case],
    costs: Sequence[RegionCost],
    *,
    room_bytes: int,
    seconds: float,
    device: Device = _CPU,
) -> dict[int, Times]:
    """Times of every kind.

    Args:
        costs: Of each case, measured alone.
        room_bytes: What may be held at once. A kind that needs more than that runs alone.
        seconds: About how long all rounds take; up to twice as long on a busy machine.
    """
    groups = group_kinds(graph, cases, costs, room_bytes)
    alone = {cost.kind: cost.forward_ns + cost.backward_ns for cost in costs}
    weights = [sum(alone[member.case.region.kind] * member.copies for member in group) for group in groups]
    found: dict[int, Times] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for group, weight in zip(groups, weights, strict=True):
            found |= _measure_group(graph, group, seconds * weight / max(1, sum(weights)), device)
    return found


def group_kinds(
    graph: g.RegionGraph, cases: Mapping[int, Case], costs: Sequence[RegionCost], room_bytes: int
) -> list[list[Member]]:
    """Kinds in the order of the model, cut into rounds that fit `room_bytes`; then copies while they fit."""
    repeats = Counter(region.kind for region in graph.regions)
    groups: list[list[Member]] = []
    for member in _members(graph, cases, costs):
        if groups and _need(groups[-1] + [member]) <= room_bytes:
            groups[-1].append(member)
        else:
            groups.append([member])
    return [_with_copies(group, repeats, room_bytes) for group in groups]


def _members(graph: g.RegionGraph, cases: Mapping[int, Case], costs: Sequence[RegionCost]) -> list[Member]:
    sizes = g.planned_sizes(graph)
    specs = {value.name: value.spec for value in graph.values}
    specs |= {spec.name: spec.spec for spec in graph.inputs}
    specs |= {parameter.name: parameter.spec for parameter in graph.parameters}
    first = {region.kind: index for index, region in reversed(list(enumerate(graph.regions)))}
    members = []
    for cost in sorted(costs, key=lambda cost: first[cost.kind]):
        case = cases[cost.kind]
        tensors = [*case.region.inputs, *case.region.parameters, *case.received, *case.sums]
        held = sum(g.storage_bytes(specs[name], sizes) for name in tensors) + cost.saved_bytes
        peak = max(cost.forward_peak_bytes - cost.saved_bytes, cost.backward_peak_bytes)
        members.append(Member(case, 1, held, peak))
    return members


def bytes_of_twice_the_rows(graph: g.RegionGraph, costs: Sequence[RegionCost]) -> int:
    """About what measuring the largest kind holds on twice as many rows: weights and what grows with rows."""
    cases, sizes = representative_cases(graph), g.planned_sizes(graph)
    weights = {item.name: g.storage_bytes(item.spec, sizes) for item in graph.parameters}
    needed = []
    for member in _members(graph, cases, costs):
        region = member.case.region
        # gradients of weights are in the peak
        fixed = sum(weights[name] for name in (*region.parameters, *region.gradients))
        needed.append(2 * (member.held_bytes + member.peak_bytes) - fixed)
    return max(needed, default=0)


def _need(group: Sequence[Member]) -> int:
    held = sum(member.copies * member.held_bytes for member in group)
    return held + max(member.peak_bytes for member in group)


def _with_copies(group: list[Member], repeats: Mapping[int, int], room_bytes: int) -> list[Member]:
    for copies in range(2, _MOST_COPIES + 1):
        for index, member in enumerate(group):
            more = Member(member.case, copies, member.held_bytes, member.peak_bytes)
            wider = [*group[:index], more, *group[index + 1 :]]
            if copies <= repeats[member.case.region.kind] and _need(wider) <= room_bytes:
                group = wider
    return group


def _measure_group(
    graph: g.RegionGraph, group: Sequence[Member], seconds: float, device: Device
) -> dict[int, Times]:
    benches = [Bench(graph, member.case, device) for member in group for _ in range(member.copies)]
    _run(benches)  # makes the gradients that arrive from outside, and pays for kernel caches
    started = time.monotonic()
    rounds: list[_Round] = []
    while len(rounds) < _LEAST_ROUNDS or (
        len(rounds) < _MOST_ROUNDS and _wants_more(rounds, seconds, time.monotonic() - started)
    ):
        rounds.append(_run(benches))
    chosen = quiet_ones(rounds)
    share = median(one.others_share for one in chosen)
    return {
        member.case.region.kind: Times(
            forward_ns=_median_of([one.forward_ns for one in chosen], member.case.region.kind),
            backward_ns=_median_of([one.backward_ns for one in chosen], member.case.region.kind),
            others_share=share,
        )
        for member in group
    }


def _wants_more(rounds: Sequence[_Round], seconds: float, elapsed_s: float) -> bool:
    quiet = sum(one.others_share <= QUIET_SHARE for one in rounds)
    return elapsed_s < (seconds if quiet >= _LEAST_ROUNDS else 2 * seconds)


def quiet_ones(rounds: Sequence[_Round]) -> list[_Round]:
    """The rounds that others left alone; where there are too few, those that they disturbed least."""
    quiet = [one for one in rounds if one.others_share <= QUIET_SHARE]
    if len(quiet) >= _LEAST_ROUNDS:
        return quiet
    return sorted(rounds, key=lambda one: one.others_share)[:_LEAST_ROUNDS]


def _median_of(times: Sequence[Mapping[int, list[int]]], kind: int) -> int:
    return int(median(time_ns for one in times for time_ns in one[kind]))


def _run(benches: Sequence[Bench]) -> _Round:
    """One small step: every forward, then every backward, each of which lets go of its gradients."""
    moment = Moment.now()
    result = _Round(0.0)
    tapes = []
    for bench in benches:
        (outputs, tape), time_ns = timed(lambda bench=bench: bench.forward(keep=True), bench.device)
        result.forward_ns.setdefault(bench.kind, []).append(time_ns)
        bench.receive(outputs, tape)
        outputs.clear()
        tapes.append(tape)
        del tape
    for bench in reversed(benches):
        _, time_ns = timed(lambda bench=bench: bench.backward(tapes.pop()).clear(), bench.device)
        result.backward_ns.setdefault(bench.kind, []).append(time_ns)
    return _Round(moment.others_share(), result.forward_ns, result.backward_ns)
