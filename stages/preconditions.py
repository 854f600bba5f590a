"""What can be refused before the first stage starts: files that are not there, settings without effect."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from stages.artifacts.errors import ConfigError, DataError
from stages.config import RunConfig


def require_device(config: RunConfig) -> None:
    """Refuses a device that is not here, rather than train on another one.

    Raises:
        ConfigError: There is no CUDA device that torch could use.
    """
    if config.device.name == "cuda" and not has_cuda():
        raise ConfigError(
            "device=cuda: torch sees no CUDA device here. Use device=cpu, leave it out, or install a CUDA "
            "build of torch and the driver",
            key="device",
            found=config.device.name,
            expected="auto or cpu",
        )


def chosen_device(config: RunConfig) -> RunConfig:
    """The configuration with `device=auto` made the accelerator that is here, or the CPU."""
    if config.device.name != "auto":
        return config
    name = "cuda" if has_cuda() else "cpu"
    return dataclasses.replace(config, device=dataclasses.replace(config.device, name=name))


def has_cuda() -> bool:
    """Whether torch can use a CUDA device. Asked in a process of its own: this one holds no torch."""
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg")):
        return False  # no driver; asking torch would take seconds
    line = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", line], check=False, capture_output=True).returncode == 0


def for_hardware(config: RunConfig, only: str) -> RunConfig:
    """The configuration of a plan for `config.hardware`.

    Its batches have the planned sizes alone, unless they are cut: no smaller one will come, and tracing
    sizes as symbols takes twice the time.

    Args:
        only: The stage that was asked for; "": all of them.

    Raises:
        ConfigError: Training was asked for; or the budget is more than the device has.
    """
    hardware = config.hardware
    if only not in ("trace", "profile", "solve"):
        raise ConfigError(
            f"hardware={hardware.name} plans for a machine that need not be here, so nothing can be trained "
            f"on it. Use `python -m stages.solve` with the same arguments for the plan, or leave hardware "
            f"out to train on this machine",
            key="hardware",
            found=hardware.name,
            expected="none (this machine)",
        )
    usable = hardware.size("memory") - hardware.size("context")
    if not config.wants_curve and config.budget_bytes > usable:
        raise ConfigError(
            f"budget={config.budget} is more than {hardware.name} has: {hardware.memory} of memory less "
            f"{hardware.context} for the CUDA context. Give at most {usable}, or another hardware.memory",
            key="budget",
            found=config.budget,
            expected=f"at most {usable} bytes",
        )
    cuts = config.train.micro_batches > 1 or config.solver.micro_batches == "auto"
    trace = dataclasses.replace(config.trace, dynamic=cuts)
    never = dataclasses.replace(config.eval, every=0)
    return dataclasses.replace(config, trace=trace, eval=never)


def require_data(config: RunConfig) -> None:
    """Refuses data whose files are missing, rather than after minutes of tracing and profiling.

    Raises:
        DataError: A file or folder that training will read is not there.
    """
    data = config.data
    expected = "an .npy file" if data.name == "tokens" else "a text file or a folder of them"
    paths = {"data.path": data.path}
    if config.eval.every:
        paths["eval.path"] = config.eval.path
    for key, path in paths.items():
        if data.name != "random" and path:
            _require(
                Path(path).is_file() or (data.name in ("text", "labelled") and Path(path).is_dir()),
                key,
                path,
                expected,
            )
    if data.name in ("text", "labelled") and data.tokenizer != "bytes":
        folder = "bytes, or the folder of a saved Hugging Face tokenizer"
        _require(Path(data.tokenizer).is_dir(), "data.tokenizer", data.tokenizer, folder)


def _require(exists: bool, key: str, path: str, expected: str) -> None:
    if not exists:
        raise DataError(
            f"{key}={path} does not exist; expected {expected}", key=key, found=path, expected=expected
        )


def require_log(config: RunConfig) -> None:
    """Raises:
    ConfigError: `log` asks for a package that is not installed.
    """
    if config.log == "tensorboard" and find_spec("tensorboard") is None:
        raise ConfigError(
            "log=tensorboard needs the package tensorboard, which is not installed; install it with "
            "`pip install tensorboard`, or leave log out (losses.csv has the same numbers)",
            key="log",
            found="no package tensorboard",
            expected="tensorboard, installed",
        )


def require_evaluation_data(config: RunConfig) -> None:
    """Raises:
    ConfigError: `eval.path` names data that no evaluation would read.
    """
    if config.eval.path and (config.data.name == "random" or not config.eval.every):
        why = "data=random reads no files" if config.data.name == "random" else "eval.every is 0"
        raise ConfigError(
            f"eval.path={config.eval.path} has no effect: {why}. Leave it out, or give data=text or "
            f"data=tokens with eval.every above 0",
            key="eval.path",
            found=config.eval.path,
            expected="nothing here",
        )


def require_checkpoint(config: RunConfig) -> None:
    """Raises:
    ConfigError: The folder to resume from is not there.
    """
    if config.resume and not Path(config.resume).is_dir():
        expected = "the folder of a checkpoint, or one with checkpoints in it"
        raise ConfigError(
            f"resume={config.resume} does not exist; expected {expected}",
            key="resume",
            found=config.resume,
            expected=expected,
        )


def require_host_tier(config: RunConfig) -> None:
    """Refuses a budget for a tier that is not there: without an accelerator, RAM is the device tier.

    Raises:
        ConfigError: `tiers.host_budget` is given.
    """
    if config.tiers.host_budget and config.device.name in ("auto", "cpu"):
        raise ConfigError(
            f"tiers.host_budget={config.tiers.host_budget} has no effect on the CPU, where memory is the "
            f"device tier and `budget` bounds it. Leave it out; tiers.disk_budget bounds the disk",
            key="tiers.host_budget",
            found=config.tiers.host_budget,
            expected="nothing, on the CPU",
        )
