"""What regions, links and the optimizer cost, in integer nanoseconds and bytes."""

from __future__ import annotations

from stages.artifacts.graph import DtypeName, Natural, Struct


class RegionCost(Struct, frozen=True):
    """Cost of one region kind at the planned sizes.

    "Beyond" means memory in excess of what is counted elsewhere: a region's input values and
    weights are always counted elsewhere, and whatever else a field names.
    """

    kind: Natural
    forward_ns: Natural
    backward_ns: Natural  # activations at hand
    #: held from forward to backward when activations are kept, beyond inputs and weights
    #: (deduplicated by storage; an output that autograd saves counts here too)
    saved_bytes: Natural
    #: sizes of those storages in the order in which they were first saved; sums to saved_bytes
    saved_storages: list[Natural]
    #: peak during a forward that keeps activations, beyond inputs and weights: outputs and
    #: saved tensors are included
    forward_peak_bytes: Natural
    #: the same for a forward that drops activations: outputs are included
    dropped_forward_peak_bytes: Natural
    #: peak during backward, beyond inputs, weights, gradients of outputs and the `saved_bytes`
    #: at hand when it starts: gradients of weights and of inputs are included
    backward_peak_bytes: Natural


class LinkCost(Struct, frozen=True):
    """One direction of a link. Bandwidths are in bytes per second; those after the first are never
    above it, and 0 stands for "not measured": as fast as without compute."""

    name: str  # "disk_read", "disk_write"; host to accelerator and back: "upload", "download"
    latency_ns: Natural
    bytes_per_s: Natural
    contended_bytes_per_s: Natural  # while the other direction runs too
    busy_bytes_per_s: Natural = 0  # while regions compute
    busy_contended_bytes_per_s: Natural = 0  # while both happens
    #: share of compute's speed that this link takes while it is active, in parts per million. Links add
    #: up: compute runs at 1 - (the sum over the active ones) of its speed
    compute_slowdown_ppm: Natural = 0
    #: extra time of a transfer per 4096 bytes of a buffer outside the arena: reads into it fault its pages
    #: in, writes copy from unaligned addresses
    scattered_block_ns: Natural = 0


class StateSpec(Struct, frozen=True):
    """One state tensor that the optimizer keeps of a parameter."""

    name: str  # "exp_avg", "exp_avg_sq", "momentum_buffer", ...
    elements: Natural
    dtype: DtypeName


class OptimizerCost(Struct, frozen=True):
    """Update throughput on the device tier for one chunk in memory, and what is kept per parameter."""

    implementation: str  # "fused_adamw", "torch.optim.Adafactor", ...
    #: elementwise: may be updated in pieces (multiples of 1024 elements); else whole parameters
    chunkable: bool
    elements_per_s: Natural
    latency_ns: Natural
    states: dict[str, list[StateSpec]]  # parameter with requires_grad -> its states
    #: peak memory of an update beyond weight, master, gradient and state, per element updated
    workspace_bytes_per_element: Natural = 0


class SliceCosts(Struct, frozen=True):
    """Costs of the regions when the step's batch is cut into `micro_batches` slices."""

    micro_batches: Natural
    regions: list[RegionCost]
    #: largest peak of the profile's process until these were measured; it measures small slices first
    profile_peak_bytes: Natural = 0


class Costs(Struct, frozen=True):
    device: str  # "cpu" | "cuda"
    threads: Natural
    source: str  # "measured" | "roofline"
    #: resident memory of a training process with all libraries, thread stacks and kernel caches,
    #: but no tensor
    baseline_bytes: Natural
    #: largest peak of the processes before training ("trace", "profile"): no budget may be under it
    stage_peak_bytes: dict[str, Natural]
    regions: list[RegionCost]
    links: list[LinkCost]
    optimizer: OptimizerCost
    #: extra memory that the allocator holds per live byte, in parts per million
    allocator_overhead_ppm: Natural = 0
    #: beside an accelerator: host memory of the training process, whatever the plan
    host_baseline_bytes: Natural = 0
    #: slices that the batch was cut into when `regions` were measured
    micro_batches: Natural = 1
    #: the same for other numbers of slices, where the solver may choose
    slices: list[SliceCosts] = []
    #: how slices' losses make the batch's: "mean" | "token_mean" | "sum"; "" where they do not, or
    #: where nobody asked
    loss: str = ""
    #: why they do not
    inseparable: str = ""
