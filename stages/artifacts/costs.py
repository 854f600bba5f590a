"""What regions, links and the optimizer cost, in integer nanoseconds and bytes."""

from __future__ import annotations

from stages.artifacts.graph import Struct


class RegionCost(Struct):
    """Cost of one region kind at the planned sizes.

    "Beyond" means memory in excess of what is counted elsewhere: a region's input values and
    weights are always counted elsewhere, and whatever else a field names.
    """

    kind: int
    forward_ns: int
    backward_ns: int  # activations at hand
    #: held from forward to backward when activations are kept, beyond inputs and weights
    #: (deduplicated by storage; an output that autograd saves counts here too)
    saved_bytes: int
    #: sizes of those storages in the order in which they were first saved; sums to saved_bytes
    saved_storages: list[int]
    #: peak during a forward that keeps activations, beyond inputs and weights: outputs and
    #: saved tensors are included
    forward_peak_bytes: int
    #: the same for a forward that drops activations: outputs are included
    dropped_forward_peak_bytes: int
    #: peak during backward, beyond inputs, weights, gradients of outputs and the `saved_bytes`
    #: at hand when it starts: gradients of weights and of inputs are included
    backward_peak_bytes: int


class LinkCost(Struct):
    """One direction of a link. Bandwidths are in bytes per second."""

    name: str  # "disk_read", "disk_write"
    latency_ns: int
    bytes_per_s: int
    contended_bytes_per_s: int  # while the other direction runs too


class StateSpec(Struct):
    """One state tensor that the optimizer keeps of a parameter."""

    name: str  # "exp_avg", "exp_avg_sq", "momentum_buffer", ...
    elements: int
    dtype: str


class OptimizerCost(Struct):
    """Update throughput on the device tier for one chunk in memory, and what is kept per parameter."""

    implementation: str  # "fused_adamw", "torch.optim.Adafactor", ...
    #: elementwise: may be updated in pieces (multiples of 1024 elements); else whole parameters
    chunkable: bool
    elements_per_s: int
    latency_ns: int
    states: dict[str, list[StateSpec]]  # parameter with requires_grad -> its states
    #: peak memory of an update beyond weight, master, gradient and state, per element updated
    workspace_bytes_per_element: int = 0


class Costs(Struct):
    device: str  # "cpu"
    threads: int
    source: str  # "measured" | "roofline"
    #: resident memory of a training process with all libraries, thread stacks and kernel caches,
    #: but no tensor
    baseline_bytes: int
    #: largest peak of the processes before training ("trace", "profile"): no budget may be under it
    stage_peak_bytes: dict[str, int]
    regions: list[RegionCost]
    links: list[LinkCost]
    optimizer: OptimizerCost
    #: extra memory that the allocator holds per live byte, in parts per million
    allocator_overhead_ppm: int = 0
