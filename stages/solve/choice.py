"""A placement while a solver works on it: cheap to change, copy and turn into a `Placement`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stages.artifacts.plan import Placement, RegionPlacement
from stages.solve.lowering.step import weight_uses
from stages.solve.problem import Problem, align

#: state of parameters under this many elements is given up last and by itself: a transfer's latency
#: costs more than its bytes
SMALL_ELEMENTS = 65536

CHUNK_SIZES = tuple(2**power for power in range(26, 15, -1))  # 64Mi, 32Mi, ..., 64Ki elements

#: for models of so many billions of parameters that those would be too many chunks: 8Mi to 64Mi elements
LARGER_CHUNK_SIZES = tuple(2**power for power in range(23, 27))

#: a program with more update chunks than this takes longer to plan than it can save
MOST_CHUNKS = 2048


@dataclass(frozen=True)
class WeightGroup:
    """Weights that are placed together: a large one, or all small ones that the same regions use.

    bytes: of their slots. in_place: an update inside backward needs them on the device.
    """

    parameters: tuple[str, ...]
    regions: tuple[int, ...]
    slots: tuple[int, ...]
    bytes: int
    in_place: bool


@dataclass(frozen=True)
class StateGroup:
    """Optimizer state and masters of parameters that are updated after the same backward."""

    parameters: tuple[str, ...]
    region: int
    small: bool
    bytes: int


def weight_groups(problem: Problem) -> tuple[WeightGroup, ...]:
    """Weights that some region uses, grouped."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for parameter in problem.parameters.values():
        if parameter.uses:
            in_place = parameter.updated and not parameter.has_master
            alone = parameter.name if parameter.elements >= SMALL_ELEMENTS else ""
            key = (parameter.uses, parameter.backward_uses, in_place, alone)
            groups.setdefault(key, []).append(parameter.name)
    found = []
    for key, names in groups.items():
        first = problem.parameters[names[0]]
        size = sum(align(problem.parameters[name].bytes) for name in names)
        slots = tuple(weight_uses(problem, first))
        found.append(WeightGroup(tuple(names), first.uses, slots, size, bool(key[2])))
    return tuple(found)


def state_groups(problem: Problem) -> tuple[StateGroup, ...]:
    groups: dict[tuple[int, bool], list[str]] = {}
    for parameter in problem.updated:
        small = parameter.elements < SMALL_ELEMENTS
        groups.setdefault((parameter.update_region, small), []).append(parameter.name)
    return tuple(
        StateGroup(
            tuple(names),
            region,
            small,
            sum(align(piece.bytes) for name in names for piece in problem.parameters[name].pieces),
        )
        for (region, small), names in groups.items()
    )


@dataclass
class Choice:
    """weights, state: whether streamed, per region and per state group.

    held: weight groups that stay although their region streams. kept: leading elements whose state
    stays, up to all of them, of parameters in streamed state groups. prefetch: see `Problem.distances`.
    moving_bytes, hold: as in Placement; estimates know nothing of them. resident_chunk_elements: as there.
    """

    weights: list[bool]
    activations: list[str]
    state: list[bool]
    values: frozenset[str] = frozenset()
    gradients: str = "consume"
    chunk_elements: int = CHUNK_SIZES[0]
    chunk_slots: int = 3
    prefetch: list[int] = field(default_factory=list)
    held: frozenset[int] = frozenset()
    kept: dict[str, int] = field(default_factory=dict)
    moving_bytes: int = 0
    hold: int = 0
    resident_chunk_elements: int = 0

    @property
    def longest_chunk(self) -> int:
        return max(self.chunk_elements, self.resident_chunk_elements)

    def copy(self) -> Choice:
        return replace(
            self,
            weights=list(self.weights),
            activations=list(self.activations),
            state=list(self.state),
            prefetch=list(self.prefetch),
            kept=dict(self.kept),
        )


def everything_resident(problem: Problem) -> Choice:
    """The choice that moves nothing. Checkpoint blocks are recomputed whatever is chosen."""
    return Choice(
        weights=[False] * len(problem.regions),
        activations=[
            "recompute" if region.checkpoint and region.backward else "keep" for region in problem.regions
        ],
        state=[False] * len(state_groups(problem)),
        gradients="keep" if problem.defers_update else "consume",
        prefetch=[0] * problem.distances,
    )


def to_placement(problem: Problem, choice: Choice) -> Placement:
    groups = state_groups(problem)
    state = {
        name: "streamed" if streamed and not is_kept_whole(problem, choice, name) else "resident"
        for streamed, group in zip(choice.state, groups, strict=True)
        for name in group.parameters
    }
    return Placement(
        regions=[
            RegionPlacement("streamed" if streamed else "resident", activations)
            for streamed, activations in zip(choice.weights, choice.activations, strict=True)
        ],
        state=state,
        gradients=choice.gradients,
        values={
            value.name: "move" if value.name in choice.values else "keep"
            for value in problem.values.values()
            if value.producer >= 0
        },
        chunk_elements=choice.chunk_elements,
        prefetch=choice.prefetch[: len(problem.regions)],
        chunk_slots=choice.chunk_slots,
        prefetch_backward=choice.prefetch[: len(problem.regions) - 1 : -1],
        moving_bytes=choice.moving_bytes,
        hold=choice.hold,
        resident_chunk_elements=choice.resident_chunk_elements,
        resident_weights=_held_weights(problem, choice),
        resident_elements={name: count for name, count in choice.kept.items() if state[name] == "streamed"},
        micro_batches=problem.micro_batches,
        micro_batch_order=problem.micro_batch_order,
    )


def is_kept_whole(problem: Problem, choice: Choice, name: str) -> bool:
    """Whether all of a parameter's state stays although its group streams."""
    return choice.kept.get(name, 0) >= problem.parameters[name].elements


def _held_weights(problem: Problem, choice: Choice) -> list[str]:
    if not choice.held:
        return []
    groups = weight_groups(problem)
    return [name for index in sorted(choice.held) for name in groups[index].parameters]


def chunk_sizes(problem: Problem, moving_elements: int | None = None) -> tuple[int, ...]:
    """Chunk lengths worth trying, longest first.

    Args:
        moving_elements: Those whose update moves something, where what stays is updated in long chunks;
            None: all.
    """
    longest = max((parameter.elements for parameter in problem.updated), default=1)
    if not problem.optimizer.chunkable:
        return CHUNK_SIZES[:1]  # whole parameters

    def chunks(size: int) -> int:
        if moving_elements is not None:
            return moving_elements // size
        return sum(-(-parameter.elements // size) for parameter in problem.updated)

    allowed = [size for size in CHUNK_SIZES if chunks(size) <= MOST_CHUNKS + len(problem.updated)]
    useful = [size for size in allowed if size < 2 * longest]
    if allowed:
        return tuple(useful or CHUNK_SIZES[-1:])
    enough = [size for size in LARGER_CHUNK_SIZES if chunks(size) <= MOST_CHUNKS + len(problem.updated)]
    return (enough[0] if enough else LARGER_CHUNK_SIZES[-1],)
