"""The solver's answer: a placement, and the program that carries it out.

A program is a list of phases; a phase is a list of instructions for a few lanes. Lanes are ordered
queues: an instruction starts after its predecessor on the same lane and after everything in `after`.

Buffers are what instructions read and write. A buffer is either *planned* (it has an offset in the
device arena) or *dynamic* (made by the operators themselves and counted by its lifetime: gradients
and activations are born inside autograd, and copying each into a slot would cost more than it
saves). What waits on disk has an extent there, which does not move.
"""

from __future__ import annotations

from stages.artifacts.graph import DtypeName, Integer, Struct

#: every planned offset, disk extent and transfer length is a multiple of this (O_DIRECT)
ALIGNMENT = 4096

LANES = ("compute", "read", "write")

#: what a plan takes in the process that carries it out: its records, and a tensor per slot.
#: Measured on plans of 10^3 to 10^5 instructions, rounded up.
BYTES_PER_INSTRUCTION = 1200
BYTES_PER_BUFFER = 2000

#: host memory through which a buffer passes between an accelerator and the disk: two blocks of 16 MiB
#: for each direction, so that one fills while the other empties
BOUNCE_BYTES = 4 * 16 * 2**20

#: what an instruction may do, by name
OPERATIONS = (
    "forward",    # compute: run region forward.  mode: keep | drop
    "recompute",  # compute: run region forward again, keeping, RNG restored, buffers untouched
    "backward",   # compute: gradients of the region's weights and inputs
    "update",     # compute: optimizer on elements [start, start+count) of a parameter
    "evaluate",   # compute: run region forward without gradients
    "read",       # read lane: disk extent -> buffer
    "write",      # write lane: buffer -> disk extent
    "free",       # compute: end of a buffer's life where no other instruction ends it
)  # fmt: skip


class Buffer(Struct, frozen=True):
    """A span of bytes with one meaning.

    role: "weight" (a parameter in its compute dtype), "master" (fp32 copy under bf16/fp16),
    "state" (one optimizer state tensor of a parameter), "gradient" (of a parameter),
    "partial_gradient" (what a further batch has sent so far to a parameter of several regions),
    "value", "value_gradient", "saved" (all that autograd keeps of a region), "persistent"
    (a model buffer such as running statistics; never moves).
    A buffer that is moved in pieces appears as one Buffer per piece: `start` and `count` give the
    elements of `owner` that it holds.
    """

    id: Integer
    role: str
    owner: str  # parameter name, value name, or region name
    bytes: Integer
    start: Integer = 0
    count: Integer = 0
    state: str = ""  # role "state": "exp_avg", "exp_avg_sq", "momentum_buffer", ...
    dtype: DtypeName = "float32"  # of its elements; "uint8" for saved activations, which are many tensors
    offset: Integer | None = None  # in the device arena; None: dynamic
    extent: Integer | None = None  # byte offset in its home; None: never leaves the device
    home: str = "disk"  # "disk" | "host": host memory, beside an accelerator
    resident: bool = False  # on the device from before the phase's entry until after its exit
    #: of values, value gradients and saved: whose it is. Of a gradient: 0 is the sum over all
    #: micro-batches, m >= 1 the gradient of m alone until it is complete and joins that sum
    micro_batch: Integer = 0


class Access(Struct, frozen=True):
    """A buffer in one version. A write makes version n+1 from n (or from nothing: 1)."""

    buffer: Integer
    version: Integer


class Instruction(Struct, frozen=True):
    id: Integer  # position in the phase's list; `after` refers to it
    lane: str
    operation: str
    after: list[Integer] = []  # ids on other lanes that must have finished
    reads: list[Access] = []
    writes: list[Access] = []
    frees: list[Integer] = []  # buffers whose memory is returned when this has finished
    region: Integer = -1
    micro_batch: Integer = 0  # forward, recompute, backward
    mode: str = ""  # forward: "keep" | "drop"
    parameter: str = ""  # update
    start: Integer = 0  # update: first element
    count: Integer = 0  # update: number of elements
    #: memory beyond every buffer, held only while the instruction runs
    workspace_bytes: Integer = 0


class Location(Struct, frozen=True):
    """Where a buffer is at a phase border: tier "device" | "disk", and in which version.

    Versions count from the phase's start: an exit state of a whole step equals its entry state
    when the same buffers are on the same tiers, whatever their versions.
    """

    buffer: Integer
    tier: str
    version: Integer


class Phase(Struct, frozen=True):
    """name: "step" (forward, backward and, where exact, the update inside backward), "accumulate" (forward
    and backward of a further batch, adding to gradients that are there), "update" (the optimizer
    alone, after the norm or overflow check), "evaluate"."""

    name: str
    instructions: list[Instruction]
    entry: list[Location]
    exit: list[Location]
    successors: list[str]


class RegionPlacement(Struct, frozen=True):
    """The choices for one region."""

    weights: str  # "resident" | "streamed"
    activations: str  # "keep" | "recompute" | "move"


class Placement(Struct, frozen=True):
    """The solver's choices, from which lowering makes the program.

    gradients: "consume" (updated inside backward as soon as complete), "keep" (until the update
    phase), "move" (to disk until the update phase).
    """

    regions: list[RegionPlacement]
    state: dict[str, str]  # parameter -> "resident" | "streamed" (optimizer state and master)
    gradients: str
    values: dict[str, str]  # value -> "keep" | "move"
    chunk_elements: Integer  # elements of one update chunk, a multiple of 1024
    #: region index -> how many regions ahead of its forward its weights are fetched (>= 0), and for how
    #: many regions after it what moves may still be on its way to disk
    prefetch: list[Integer]
    #: update chunks on the device at once: 1 is read, updated and written alone, 3 overlap all lanes
    chunk_slots: Integer = 2
    #: region index -> how many regions ahead of its backward its weights and what moved are fetched;
    #: empty: as `prefetch`
    prefetch_backward: list[Integer] = []
    #: where above 0: slots of weights and update chunks are filled in the order of their use, as early
    #: as those on the device fit into this many bytes; `prefetch` then speaks of activations alone
    moving_bytes: Integer = 0
    #: with `moving_bytes`: a streamed weight stays if its next use is at most this many regions away
    hold: Integer = 0
    #: weights that stay although their region streams
    resident_weights: list[str] = []
    #: parameter with streamed state -> its leading elements whose state stays, a multiple of 4096
    resident_elements: dict[str, Integer] = {}
    #: elements of an update chunk that reads and writes nothing, a multiple of 4096; 0: `chunk_elements`
    resident_chunk_elements: Integer = 0
    #: slices that the step's batch is cut into (see `stages.artifacts.slicing`)
    micro_batches: Integer = 1
    #: "vertical": all of them go through a region before the next region begins (but for the last
    #: ones, see `Problem.tail`), so that a streamed weight is read once per direction; "horizontal": each
    #: goes through the whole model alone
    micro_batch_order: str = "vertical"


class Prediction(Struct, frozen=True):
    """What the simulator says of one step of the program."""

    peak_bytes: Integer
    step_ns: Integer
    least_feasible_bytes: Integer
    #: lane -> bytes per step; beside an accelerator also "disk_read" and "disk_write", what of them
    #: passes through host memory
    moved_bytes: dict[str, Integer]
    #: no program for the same costs and budget takes less time; 0: the solver gives no bound
    lower_bound_ns: Integer = 0
    binding: str = ""  # the instruction and buffers at the peak, readable

    @property
    def optimality_gap(self) -> float | None:
        """How far the step may be from the fastest one, as a share of the bound."""
        return self.step_ns / self.lower_bound_ns - 1 if self.lower_bound_ns else None


class Plan(Struct, frozen=True):
    solver: str
    budget_bytes: Integer
    device: str
    precision: str
    implementation: str  # of the optimizer, as in Costs
    placement: Placement
    buffers: list[Buffer]
    phases: list[Phase]
    arena_bytes: Integer
    disk_bytes: Integer
    baseline_bytes: Integer
    margin_bytes: Integer
    prediction: Prediction
    solve_ns: Integer
    #: beside an accelerator: extents in pinned host memory, and all that the host must hold (those, the
    #: process, its records of the plan, bounce buffers of what passes through to the disk)
    host_pool_bytes: Integer = 0
    host_bytes: Integer = 0
    #: how slices' losses make the step's loss: "mean" | "token_mean" | "sum"; "" with one slice
    loss: str = ""
    #: whether updates wait until every gradient is known (loss scale, clipping, skipping, accumulation)
    deferred: bool = False
    #: whether gradients are scaled to a norm, which takes their whole norms in fp32 and room in the update
    clips: bool = False
    #: batches whose gradients are added up before an update; above 1 there is a phase "accumulate"
    accumulate: Integer = 1


def bookkeeping_bytes(instructions: int, buffers: int) -> int:
    """Memory of a loaded plan with that many records, which counts in its peak."""
    return instructions * BYTES_PER_INSTRUCTION + buffers * BYTES_PER_BUFFER
