"""What a run reports: `summary.json`."""

from __future__ import annotations

from stages.artifacts.graph import Struct


class Summary(Struct, frozen=True, omit_defaults=False):
    """Seconds, bytes and counts of one run; see the field names for units."""

    model: str
    device: str
    precision: str
    solver: str
    optimizer_implementation: str
    threads: int
    allocator: str  # of large blocks: "page pool", "glibc", or the file of another one
    versions: dict[str, str]
    steps: int
    budget_bytes: int
    peak_bytes: int  # largest of peak_bytes_by_stage
    peak_bytes_by_stage: dict[str, int]
    predicted_peak_bytes: int
    baseline_bytes: int
    least_feasible_bytes: int
    step_time_s: float  # median after the first step
    predicted_step_time_s: float
    lower_bound_step_time_s: float | None  # None: the solver gives no bound
    optimality_gap: float | None
    solve_time_s: float
    tokens_per_s: float
    micro_batches: int
    losses: list[float]
    grad_norms: list[float | None]
    skipped_steps: list[int]
    moved_bytes_per_step: dict[str, int]  # "disk_read", "disk_write"
    placement: dict[str, dict[str, int]]  # what -> choice -> count
    step_peak_bytes: list[int] = []
    step_times_s: list[float] = []
    evaluations: list[dict[str, float]] = []
    #: that each step used, of each param group in order; skipped steps would have used it
    learning_rates: list[list[float]] = []
    loss_scales: list[float] = []  # with which each step's gradients were made; 1 but for fp16
    #: the step after which the run went over to another plan; None: it kept its plan
    replanned_at: int | None = None
    #: the checkpoint's step where the run was resumed
    resumed_at: int | None = None
    #: what the plan of the run's first step predicted; `predicted_...` is of the last plan
    original_predicted_peak_bytes: int | None = None
    original_predicted_step_time_s: float | None = None
