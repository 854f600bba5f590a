"""The configuration's schema: one dataclass per Hydra group, and sizes as text.

Needs neither Hydra nor OmegaConf: a stage reads the composed configuration from JSON
(`load_composed`), so that the training process does not hold the libraries that composed it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stages.artifacts.errors import ConfigError
from stages.artifacts.slicing import ORDERS
from stages.artifacts.store import default_folder
from stages.hardware import HardwareConfig as HardwareConfig
from stages.sizes import format_size as format_size
from stages.sizes import parse_size as parse_size
from stages.training import LossScaleConfig as LossScaleConfig
from stages.training import SchedulerConfig as SchedulerConfig
from stages.training import TrainConfig as TrainConfig
from stages.training import require as _require

#: what OmegaConf calls a value that must be given
MISSING: Any = "???"

#: a budget that stands for all of them
CURVE = "curve"

PRECISIONS = ("fp32", "bf16", "fp16")
SOLVERS = ("resident", "layerwise", "greedy_sync", "greedy_async", "milp", "auto")
REPLANNING = ("auto", "never", "always")
#: emulated: an accelerator in host memory, to try its plans without one
DEVICES = ("auto", "cpu", "cuda", "emulated")
DATASETS = ("text", "labelled", "tokens", "random")
MODEL_SOURCES = ("transformers", "directory", "module")


def _require_one_of(key: str, found: str, options: tuple[str, ...]) -> None:
    _require(found in options, key, found, "one of " + ", ".join(options))


def _require_optional_size(key: str, found: str) -> None:
    if found:
        parse_size(found, key)


_LEFT_OUT = "nothing with solver.micro_batches=auto, which chooses the number"


@dataclass
class ModelConfig:
    """What to train.

    source: "transformers" (a model class built from a configuration), "directory" (a saved Hugging
    Face model, its weights used), "module" (anybody's own torch module).
    """

    name: str = MISSING
    source: str = MISSING
    target: str = ""  # "transformers.GPT2LMHeadModel", "package.Class"
    config: str = ""  # "transformers.GPT2Config"
    arguments: dict[str, Any] = field(default_factory=dict)  # of the configuration or the class
    path: str = ""  # source "directory"
    inputs: list[str] = field(default_factory=lambda: ["input_ids", "labels"])  # fed with tokens

    def __post_init__(self) -> None:
        _require_one_of("model.source", self.source, MODEL_SOURCES)
        if self.source == "directory":
            _require(bool(self.path), "model.path", self.path, "the folder of a saved Hugging Face model")
        if self.source == "module":
            _require("." in self.target, "model.target", self.target, "a class by name, as in package.Class")
        _require(bool(self.inputs), "model.inputs", self.inputs, "at least one input name")


@dataclass
class LoraConfig:
    """Low-rank adapters beside frozen layers (`stages.models.lora`)."""

    rank: int = 0  # 0: none, all weights train
    alpha: float = 16.0  # what an adapter adds is scaled by alpha / rank
    dropout: float = 0.0
    targets: list[str] = field(default_factory=list)  # patterns of layers: "query", "h.*.c_attn"
    train: list[str] = field(default_factory=list)  # patterns of what trains as a whole, as a new head

    def __post_init__(self) -> None:
        _require(self.rank >= 0, "lora.rank", self.rank, "at least 0 (0: no adapters)")
        _require(self.alpha > 0, "lora.alpha", self.alpha, "more than 0")
        _require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "from 0 up to, not including, 1")
        wanted = "the names of linear layers, such as [query,value]"
        _require(not self.rank or bool(self.targets), "lora.targets", self.targets, wanted)
        given = self.targets or self.train
        _require(
            bool(self.rank) or not given, "lora.rank", self.rank, "at least 1 where lora.targets are given"
        )


@dataclass
class DataConfig:
    name: str = MISSING  # "text" | "labelled" | "tokens" | "random"
    #: text: file or folder, "": Python's own sources; labelled: a folder of folders; tokens: an .npy file
    path: str = ""
    tokenizer: str = "bytes"  # or a folder with a saved Hugging Face tokenizer
    batch_size: int = 4
    seq_len: int = 256

    def __post_init__(self) -> None:
        _require_one_of("data.name", self.name, DATASETS)
        _require(self.batch_size >= 1, "data.batch_size", self.batch_size, "at least 1")
        _require(self.seq_len >= 1, "data.seq_len", self.seq_len, "at least 1")
        _require(bool(self.tokenizer), "data.tokenizer", self.tokenizer, "bytes or the folder of a tokenizer")
        if self.name == "tokens":
            _require(bool(self.path), "data.path", self.path, "an .npy file of int64 [rows, seq_len]")

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of the model's input `name`: [batch, seq], but one label a row where rows are labelled."""
        one = self.name == "labelled" and name == "labels"
        return (self.batch_size,) if one else (self.batch_size, self.seq_len)


@dataclass
class OptimizerConfig:
    name: str = MISSING  # "adamw", "sgd", "adam", ... or a class: "torch.optim.Adafactor"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)  # anything else that the class takes
    #: each with a `pattern` of parameter names (or a list of them) and settings of its own; `optional: true`
    #: where it may match none. The first that matches counts; what none matches makes the last group
    groups: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _require(bool(self.name), "optimizer.name", self.name, "adamw, adam, sgd or a class by name")
        for key in ("lr", "eps", "weight_decay", "momentum"):
            value = getattr(self, key)
            in_range = math.isfinite(value) and value >= 0
            _require(in_range, f"optimizer.{key}", value, "a finite number, at least 0")
        in_range = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _require(in_range, "optimizer.betas", self.betas, "two numbers from 0 up to, not including, 1")
        for number, group in enumerate(self.groups):
            key = f"optimizer.groups[{number}]"
            _require(bool(group.get("pattern")), key, group, "a pattern of parameter names, and settings")
            fixed = [name for name in ("name", "groups", "arguments") if name in group]
            _require(not fixed, key, group, "settings by their own names; all groups share one optimizer")


@dataclass
class SolverConfig:
    name: str = MISSING  # resident | layerwise | greedy_sync | greedy_async | milp | auto
    time_limit_s: float = 10.0
    #: whether a plan whose first steps are not as predicted is solved again with corrected costs; "always"
    #: (tests): whatever the first steps were
    replan: str = "auto"
    micro_batches: str = "given"  # given (train.micro_batches) | auto
    micro_batch_order: str = "auto"  # auto | vertical (region by region) | horizontal (one by one)

    def __post_init__(self) -> None:
        _require_one_of("solver.name", self.name, SOLVERS)
        _require_one_of("solver.replan", self.replan, REPLANNING)
        _require_one_of("solver.micro_batches", self.micro_batches, ("given", "auto"))
        _require_one_of("solver.micro_batch_order", self.micro_batch_order, ("auto", *ORDERS))
        _require(self.time_limit_s > 0, "solver.time_limit_s", self.time_limit_s, "more than 0 seconds")


@dataclass
class DeviceConfig:
    name: str = MISSING  # auto | cpu | cuda
    threads: int = 0  # 0: what torch chooses

    def __post_init__(self) -> None:
        _require_one_of("device.name", self.name, DEVICES)
        _require(self.threads >= 0, "device.threads", self.threads, "at least 0 (0: what torch chooses)")


@dataclass
class TiersConfig:
    disk: str = ""  # "": a private folder under the user's cache folder, removed at exit
    host_budget: str = ""
    disk_budget: str = ""

    def __post_init__(self) -> None:
        _require_optional_size("tiers.host_budget", self.host_budget)
        _require_optional_size("tiers.disk_budget", self.disk_budget)

    @property
    def folder(self) -> Path:
        """Where the disk tier makes its private folder; perhaps not there yet."""
        return Path(self.disk) if self.disk else default_folder()


@dataclass
class TraceConfig:
    granularity: str = "block"  # block | fine
    dynamic: bool = True
    mode: str = "train"  # train | eval: which behaviour of dropout, batch norm, ... is traced

    def __post_init__(self) -> None:
        _require_one_of("trace.granularity", self.granularity, ("block", "fine"))
        _require_one_of("trace.mode", self.mode, ("train", "eval"))


@dataclass
class ExportConfig:
    initial: str = ""
    final: str = ""
    shard: str = "5GB"  # bytes of one file at most, unless a single tensor is larger

    def __post_init__(self) -> None:
        parse_size(self.shard, "export.shard")

    @property
    def shard_bytes(self) -> int:
        return parse_size(self.shard, "export.shard")


@dataclass
class CheckpointConfig:
    every: int = 0  # steps between checkpoints; 0: none
    keep: int = 2  # the newest ones; older are removed
    dir: str = ""  # "": checkpoints/ in the run folder
    on_stop: bool = True  # whether a run that SIGTERM or SIGINT ends saves its state, whatever `every` is

    def __post_init__(self) -> None:
        _require(self.every >= 0, "checkpoint.every", self.every, "at least 0 (0: none)")
        _require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")


@dataclass
class EvalConfig:
    every: int = 0  # steps between evaluations; 0: never
    batches: int = 1
    path: str = ""

    def __post_init__(self) -> None:
        _require(self.every >= 0, "eval.every", self.every, "at least 0 (0: never)")
        _require(self.batches >= 1, "eval.batches", self.batches, "at least 1")


@dataclass
class RuntimeConfig:
    lane: str = "cpu"  # cpu | adversarial (tests)
    #: auto (the page pool where it can be compiled) | pool (required) | system
    allocator: str = "auto"

    def __post_init__(self) -> None:
        _require_one_of("runtime.allocator", self.allocator, ("auto", "pool", "system"))
        _require_one_of("runtime.lane", self.lane, ("cpu", "adversarial"))


@dataclass
class RunConfig:
    """The whole configuration of a job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    budget: str = MISSING
    precision: str = "fp32"
    steps: int = 20
    seed: int = 0
    store: str = ""
    log: str = "csv"  # csv | tensorboard (as well)
    resume: str = ""  # a checkpoint, or a folder of them: its newest

    def __post_init__(self) -> None:
        if self.budget not in (MISSING, CURVE):
            parse_size(self.budget, "budget")
        _require_one_of("precision", self.precision, PRECISIONS)
        _require_one_of("log", self.log, ("csv", "tensorboard"))
        _require(self.steps >= 1, "steps", self.steps, "at least 1")
        micro_batches, auto = self.train.micro_batches, self.solver.micro_batches == "auto"
        fits = micro_batches <= self.data.batch_size
        _require(
            fits, "train.micro_batches", micro_batches, f"at most data.batch_size={self.data.batch_size}"
        )
        _require(not auto or micro_batches == 1, "train.micro_batches", micro_batches, _LEFT_OUT)
        # torch.manual_seed takes this range; NumPy's generators refuse negative seeds
        _require(0 <= self.seed < 2**63, "seed", self.seed, "an integer from 0 to 2^63 - 1")

    @property
    def wants_curve(self) -> bool:
        """Whether plans over many budgets are asked for, and no training."""
        return self.budget == CURVE

    @property
    def budget_bytes(self) -> int:
        return parse_size(self.budget, "budget")


def load_composed(path: Path) -> RunConfig:
    """Reads the configuration that `save_composed` wrote.

    Raises:
        ConfigError: The file is missing, or holds what the schema does not know.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path} is not a composed configuration: {error}. Run `python -m stages.run` without --composed",
            key="composed",
            found=str(path),
        ) from error


def save_composed(config: RunConfig, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
