"""The configuration's schema: one dataclass per Hydra group, and sizes as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


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


@dataclass
class DataConfig:
    name: str = MISSING  # "text" | "tokens" | "random"
    path: str = ""
    tokenizer: str = "bytes"  # or a folder
    batch_size: int = 4
    seq_len: int = 512


@dataclass
class OptimizerConfig:
    name: str = MISSING  # "adamw", "sgd", "adam", ... or a class: "torch.optim.Adafactor"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)  # anything else that the class takes


@dataclass
class SolverConfig:
    name: str = MISSING  # resident | layerwise | greedy_sync | greedy_async
    time_limit_s: float = 10.0


@dataclass
class DeviceConfig:
    name: str = MISSING  # auto | cpu | cuda
    threads: int = 0  # 0: what torch chooses


@dataclass
class TiersConfig:
    disk: str = ""  # "": a private folder under the user's cache folder, removed at exit
    host_budget: str = ""
    disk_budget: str = ""


@dataclass
class TraceConfig:
    granularity: str = "block"  # block | fine
    dynamic: bool = True


@dataclass
class ExportConfig:
    initial: str = ""
    final: str = ""


@dataclass
class EvalConfig:
    every: int = 0  # steps between evaluations; 0: never
    batches: int = 1
    path: str = ""


@dataclass
class RuntimeConfig:
    lane: str = "cpu"  # cpu | adversarial (tests)


@dataclass
class RunConfig:
    """The whole configuration of a job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    budget: str = MISSING
    precision: str = "fp32"
    steps: int = 20
    seed: int = 0
    store: str = ""
