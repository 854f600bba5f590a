"""The profile stage: what each region kind, link and update costs on this machine.

Regions are measured one kind at a time on stand-in tensors, so that the stage never holds more of
the model than the largest region, which any plan must hold too.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from stages.artifacts import graph as g
from stages.artifacts.costs import Costs, RegionCost, SliceCosts
from stages.artifacts.errors import ArtifactError, InfeasibleBudgetError
from stages.artifacts.slicing import BATCH, graph_of_slice
from stages.config import RunConfig
from stages.device.choose import device_named
from stages.device.interface import Device
from stages.optim.groups import make_groups
from stages.region import memory
from stages.region.interpreter import RegionFunction
from stages.room import available_bytes
from stages.trace.profile.cuts import loss_for, numbers_of_slices
from stages.trace.profile.device_links import measure_device_links
from stages.trace.profile.links import measure_links
from stages.trace.profile.optimizer import measure_optimizer
from stages.trace.profile.peak import PeakGauge
from stages.trace.profile.quiet import QUIET_SHARE
from stages.trace.profile.regions import Bench, measure_region
from stages.trace.profile.rounds import bytes_of_twice_the_rows, measure_times
from stages.trace.profile.stand_ins import Case, least_bytes, representative_cases
from stages.trace.profile.training_process import (
    Order,
    measure_training_process,
    warm_up,
)

#: for the rounds of all region kinds together, beyond the four runs that each one gets alone
_TIMING_S = 12.0
_LINKS_S = 6.0
#: code and heap that loading data, initial values and reporting touch in a training process, and that none of
#: the processes which measure does (4 to 9 MB, by what the page cache holds of the libraries)
_TOUCHED_BYTES = 6 << 20
#: what the CUDA allocator reserves beyond live bytes with expandable segments (pages of 2 MiB)
_OVERHEAD_PPM = 40_000


def run(config: RunConfig, graph: g.RegionGraph) -> Costs:
    """Measures `graph` on this machine. Leaves neither files nor a changed random state behind.

    Raises:
        InfeasibleBudgetError: The largest region does not fit into the memory that is there.
        StorageError: The disk tier's folder cannot be used.
        ConfigError: The optimizer cannot be used, or micro-batches are asked for and the loss is not
            made up by theirs.
        ArtifactError: The graph names an operator that is not allowed.
    """
    if config.device.threads:
        torch.set_num_threads(config.device.threads)
    threads = torch.get_num_threads()
    memory.give_back_large_blocks(memory.LARGE_BLOCK_BYTES, threads)
    for region in graph.regions:
        RegionFunction(graph, region, torch.device("cpu"))  # refuses unknown operators before anything runs
    loss, inseparable = loss_for(config, graph)
    numbers = [config.train.micro_batches, *numbers_of_slices(config, graph, loss)]
    smallest = graph_of_slice(graph, max(numbers))
    groups = make_groups(config.optimizer, graph.parameters, graph.precision)
    idle_bytes = measure_training_process(Order(smallest, config.optimizer, graph.precision, threads))
    device = device_named("cpu" if config.device.name == "auto" else config.device.name)
    gauge = PeakGauge(device)
    warm_up(device.target)
    held_bytes = device.held_bytes()
    before = _settled_bytes()
    slices = _measure_slices(config, graph, numbers, gauge, idle_bytes)
    largest = slices.pop(0)
    regions, graph = largest.regions, graph_of_slice(graph, largest.micro_batches)
    # kernel caches and scratch memory that this model's operators leave in the process
    caches_bytes = max(0, _settled_bytes() - before)
    room = gauge.process_peak_bytes - _settled_bytes()
    optimizer = measure_optimizer(graph, groups.base, gauge, room_bytes=room, groups=groups)
    work = _typical_work(graph, representative_cases(graph), regions, device)
    links = measure_links(_existing(config.tiers.folder), seconds=_LINKS_S, compute=work)
    if device.beside_host:
        links = [*measure_device_links(device, seconds=_LINKS_S, compute=work), *links]
    return Costs(
        device=device.name,
        threads=threads,
        source="measured",
        baseline_bytes=max(held_bytes, device.held_bytes())
        if device.beside_host
        else idle_bytes + caches_bytes + _TOUCHED_BYTES,
        # beside an accelerator the stages before training are in host memory, which no budget of it covers
        stage_peak_bytes={} if device.beside_host else {"profile": gauge.process_peak_bytes},
        host_baseline_bytes=max(idle_bytes, _settled_bytes()) if device.beside_host else 0,
        allocator_overhead_ppm=_OVERHEAD_PPM if device.free_bytes() is not None else 0,
        regions=regions,
        links=links,
        optimizer=optimizer,
        micro_batches=largest.micro_batches,
        slices=slices,
        loss=loss,
        inseparable=inseparable,
    )


def _measure_slices(
    config: RunConfig, graph: g.RegionGraph, numbers: Sequence[int], gauge: PeakGauge, idle_bytes: int
) -> list[SliceCosts]:
    """Costs with each number of slices, the largest slices first in the list.

    Small slices are measured first: where the solver may cut the batch, larger ones that would burst
    the budget are left out. Times come last, when it is known how much memory rounds may take.
    """
    found: list[SliceCosts] = []
    needed = 0
    for number in sorted(numbers, reverse=True):
        sliced = graph_of_slice(graph, number)
        rows = f"slices of {sliced.symbols[BATCH].planned} rows" if len(numbers) > 1 else ""
        if found and _bursts(config, gauge.device, needed):
            print(
                f"profile: {rows} and larger are left out: measuring them would take about {needed} bytes, "
                f"more than the budget",
                flush=True,
            )
            break
        if rows:
            print(f"profile: {rows}", flush=True)
        regions = _measure_memory(sliced, gauge, idle_bytes)
        found.insert(0, SliceCosts(number, regions, gauge.process_peak_bytes))
        needed = idle_bytes + bytes_of_twice_the_rows(sliced, regions)
    return [
        msgspec.structs.replace(
            item, regions=_with_times(graph_of_slice(graph, item.micro_batches), item.regions, gauge)
        )
        for item in found
    ]


def _bursts(config: RunConfig, device: Device, needed_bytes: int) -> bool:
    """Whether measuring takes more than the budget, which holds for this process too on the CPU."""
    if device.beside_host or config.wants_curve:
        return False
    return needed_bytes > config.budget_bytes


def _measure_memory(graph: g.RegionGraph, gauge: PeakGauge, idle_bytes: int) -> list[RegionCost]:
    """Each kind alone: its memory, and rough times."""
    cases = representative_cases(graph)
    costs = []
    for position, case in enumerate(cases.values(), start=1):
        _check_room(graph, case, idle_bytes, gauge.device)
        with _running(case):
            costs.append(measure_region(graph, case, gauge))
        print(f"profile: kind {position} of {len(cases)} ({case.region.name}) measured", flush=True)
    return costs


def _with_times(graph: g.RegionGraph, costs: Sequence[RegionCost], gauge: PeakGauge) -> list[RegionCost]:
    """`costs` with the times that kinds take in rounds of all of them."""
    cases = representative_cases(graph)
    free = gauge.device.free_bytes()
    # on the CPU what the largest region has taken; no budget is under that
    room = gauge.process_peak_bytes - _settled_bytes() if free is None else free // 2
    times = measure_times(graph, cases, costs, room_bytes=room, seconds=_TIMING_S, device=gauge.device)
    rows = f" of {graph.symbols[BATCH].planned} rows" if BATCH in graph.symbols else ""
    for kind, found in times.items():
        print(
            f"profile: {cases[kind].region.name}{rows} takes {found.forward_ns / 1e6:.1f} ms forward, "
            f"{found.backward_ns / 1e6:.1f} ms backward",
            flush=True,
        )
    say_if_disturbed(max((found.others_share for found in times.values()), default=0.0))
    return [
        msgspec.structs.replace(
            cost, forward_ns=times[cost.kind].forward_ns, backward_ns=times[cost.kind].backward_ns
        )
        for cost in costs
    ]


def say_if_disturbed(others_share: float) -> None:
    if others_share > QUIET_SHARE:
        print(
            f"profile: other processes took {others_share:.0%} of the processors while regions were timed: "
            f"predicted times may be too long. Profile again on a quiet machine to correct them",
            flush=True,
        )


def _typical_work(
    graph: g.RegionGraph, cases: Mapping[int, Case], costs: Sequence[RegionCost], device: Device
) -> Callable[[], object]:
    """Forward and backward of the kind that a step spends most time in."""
    repeats = Counter(region.kind for region in graph.regions)
    spent = {cost.kind: repeats[cost.kind] * (cost.forward_ns + cost.backward_ns) for cost in costs}
    with torch.random.fork_rng(devices=[]):
        bench = Bench(graph, cases[max(spent, key=spent.__getitem__)], device)

    def work() -> object:
        with torch.random.fork_rng(devices=[]):
            return bench.run_timed()

    return work


@contextmanager
def _running(case: Case) -> Iterator[None]:
    """Says which region could not run."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ArtifactError(
            f"region {case.region.name} does not run: {type(error).__name__}: {error}. Either the model "
            f"fails on such a batch by itself (try it without a plan), or the graph was altered: "
            f"trace again",
            found=str(error),
            expected="a region that runs on a batch of the planned sizes",
        ) from error


def _check_room(graph: g.RegionGraph, case: Case, idle_bytes: int, device: Device) -> None:
    """Refuses, from shapes alone, a region that would get this process killed."""
    needed, free = least_bytes(graph, case), device.free_bytes()
    available = available_bytes() if free is None else free
    if needed > available:
        raise InfeasibleBudgetError(
            f"region {case.region.name} holds at least {needed} bytes during its backward (inputs, weights "
            f"and their gradients); {available} bytes of memory are available here. Use a smaller "
            f"data.batch_size or data.seq_len, or more memory",
            key="budget",
            found=f"{available} bytes available",
            expected=f"{needed} bytes for region {case.region.name}",
            least_feasible_bytes=idle_bytes + needed,
        )


def _settled_bytes() -> int:
    gc.collect()
    memory.trim()
    return memory.resident_bytes()


def _existing(folder: Path) -> Path:
    """`folder` or its nearest ancestor that exists: the same filesystem, and nothing is made there."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder
