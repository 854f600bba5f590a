"""From a command line to a composed, validated configuration and one command to run with it.

Composing needs Hydra; training must not hold it. So each job's configuration is written as JSON
into its run folder, and this process is *replaced* by the command that does the work (`os.execv`);
in a sweep, it runs one such command per job and waits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

import stages
from stages.artifacts.errors import ConfigError, StageError, StorageError
from stages.config import RunConfig, save_composed
from stages.overrides import GROUPS, OverrideChecker, check_composed, schema_keys, unknown_key_error
from stages.process import exit_code, report_error, run_child, signal_of
from stages.stopping import ALL, PARENT

#: exit code of a refusal
REFUSED = 2
#: Hydra's flags whose value is the next argument
_FLAGS_WITH_VALUE = (
    "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
    "--package", "-p", "--cfg", "-c", "--info", "-i", "--experimental-rerun",
)  # fmt: skip

#: makes the command line that runs a job, from the path of its configuration and its run folder
Command = Callable[[Path, Path], list[str]]


class JobFailedError(Exception):
    """A job of a sweep ended with `code`; its own process has said why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the job ended with exit code {code}")
        self.code = code


def config_folder() -> Path:
    """Where the configuration groups lie: inside the installed package, else beside it in a checkout."""
    package = Path(stages.__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def register_schema() -> None:
    """Makes the dataclasses of stages/config.py the base that every YAML file is merged onto."""
    ConfigStore.instance().store(name="schema", node=RunConfig)


def main(command: Command, arguments: list[str]) -> NoReturn:
    """Composes `arguments` and hands over to `command`; never returns.

    Exits with code 2 after a refusal, with one message on stderr and `error.json` in the run folder.
    """
    try:
        checked = check_arguments(arguments)
        code = _compose_and_run(command, checked)
    except StageError as error:
        code = refuse(error, requested_run_folder(arguments))
    except JobFailedError as failure:
        code = failure.code
    sys.exit(code)


def refuse(error: StageError, run_folder: Path) -> int:
    """Reports `error` on stderr and in `run_folder`/error.json; returns the exit code."""
    report_error(error.to_record(), run_folder)
    print(f"error: {error}", file=sys.stderr, flush=True)
    return REFUSED


def requested_run_folder(arguments: list[str]) -> Path:
    """The run folder as far as it is known before anything could be composed."""
    for argument in reversed(arguments):
        key, _, value = argument.partition("=")
        if key.lstrip("+") == "hydra.run.dir" and "${" not in value:
            return Path(value.strip("'\""))
    return Path("outputs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")


def check_arguments(arguments: list[str]) -> list[str]:
    """The arguments as Hydra should get them.

    Raises:
        ConfigError: See `OverrideChecker.normalise`; or a sweep's own key is also set.
    """
    folders = [config_folder(), *_person_folders(arguments)]
    checker = OverrideChecker(folders)
    flags: list[str] = []
    overrides: list[str] = []
    is_value = False
    for argument in arguments:
        if is_value or argument.startswith("-"):
            flags.append(argument)
        else:
            overrides.append(checker.normalise(argument))
        is_value = argument in _FLAGS_WITH_VALUE
    _check_sweep(overrides, folders)
    if "--help" in arguments or "-h" in arguments:
        # the help shows a composed configuration, which a missing model or budget would prevent
        keys = {override.partition("=")[0] for override in overrides}
        overrides += [item for item in ("model=gpt2", "budget=8GB") if item.partition("=")[0] not in keys]
    # Hydra's parser takes no argument after a flag (`model=gpt2 -m budget=1GB,2GB`), so flags come last
    return [*overrides, *flags]


def _person_folders(arguments: list[str]) -> Iterator[Path]:
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, joined = flag.partition("=")
        if name in ("--config-dir", "-cd"):
            yield Path(joined if equals else value)


def _check_sweep(overrides: list[str], folders: list[Path]) -> None:
    """Hydra lets an argument silently replace a sweep's values, and then runs one job."""
    given: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        given[key] = value
    name = given.get("sweep")
    if name is None:
        return
    files = [path for folder in folders if (path := folder / "sweep" / f"{name}.yaml").is_file()]
    for file in files:
        content = OmegaConf.load(file)
        params = dict(OmegaConf.select(content, "hydra.sweeper.params") or {})
        params |= {str(key): value for key, value in content.items() if key != "hydra"}
        for key in params:
            if key in given:
                message = (
                    f"sweep={name} sets {key} to {params[key]}, and {key}={given[key]} fixes it; remove one "
                    f"of the two, or give your own values: -m {key}=VALUE,VALUE"
                )
                raise ConfigError(
                    message, key=key, found=given[key], expected=f"no {key}=, or no sweep={name}"
                )


def _compose_and_run(command: Command, arguments: list[str]) -> int:
    register_schema()
    code = 0

    def job(composed: DictConfig) -> None:
        nonlocal code
        code = _run_job(command, composed)

    # Hydra then raises what it would otherwise print as a stack trace; it goes no further than here
    previous = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    argv, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error) from error
    except OSError as error:
        folder = requested_run_folder(arguments)
        if error.filename is None or Path(error.filename) not in (folder, *folder.parents):
            raise
        raise StorageError(
            f"cannot make the run folder {folder}: {error.strerror or error}. Give another as hydra.run.dir",
            key="hydra.run.dir",
            found=str(error),
            expected="a folder that can be made and written",
        ) from error
    finally:
        sys.argv = argv
        _restore("HYDRA_FULL_ERROR", previous)
    return code


def _restore(name: str, previous: str | None) -> None:
    if previous is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = previous


def _run_job(command: Command, composed: DictConfig) -> int:
    run_folder = Path(HydraConfig.get().runtime.output_dir)
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        config = to_config(composed)
    except StageError as error:
        code = refuse(error, run_folder)
    else:
        file = run_folder / "config.json"
        save_composed(config, file)
        line = command(file, run_folder)
        # ours for Hydra, which still needs it in a sweep, and not for the job
        environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
        sys.stdout.flush()
        sys.stderr.flush()
        if not in_sweep:
            os.execve(line[0], line, environment)
        code = run_child(line, {**environment, PARENT: str(os.getpid())}, finishes=True)
        if signal_of(code) in ALL:
            sys.exit(exit_code(code))  # and none of the sweep's other jobs
    if in_sweep and code != 0:
        # the launcher finishes the other jobs, and only then raises it
        raise JobFailedError(code)
    return code


def to_config(composed: DictConfig) -> RunConfig:
    """The validated dataclass of a composed configuration.

    Raises:
        ConfigError: A key is unknown or missing, or a value cannot be used.
    """
    try:
        content = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        assert isinstance(content, dict)
        check_composed({str(key): value for key, value in content.items()})
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    assert isinstance(config, RunConfig)
    return config


def compose(arguments: list[str]) -> RunConfig:
    """The configuration of one command line, without running anything.

    Raises:
        ConfigError: As `main` would report.
    """
    register_schema()
    try:
        with hydra.initialize_config_dir(str(config_folder()), version_base="1.3", job_name="stages"):
            return to_config(hydra.compose("config", overrides=check_arguments(arguments)))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error) from error


def explain(error: BaseException) -> ConfigError:
    """What went wrong while composing, in one message that names the key."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OmegaConfBaseException) and inner.full_key:
            return _explain_value(inner)
        inner = inner.__cause__ or inner.__context__
    text = str(error)
    for group in GROUPS:
        if f"You must specify '{group}'" in text:
            options = ", ".join(OverrideChecker([config_folder()]).options(group))
            message = f"{group} is missing; give {group}=OPTION with one of: {options}"
            return ConfigError(message, key=group, found="", expected=options)
    return ConfigError(text.strip())


def _explain_value(error: OmegaConfBaseException) -> ConfigError:
    key = str(error.full_key)
    if isinstance(error, MissingMandatoryValue):
        example = {"budget": "budget=8GB"}.get(key, f"{key}=VALUE")
        return ConfigError(f"{key} is missing; give it as in {example}", key=key, found="", expected=example)
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        section = key.rpartition(".")[0]
        siblings = error.parent_node.keys() if isinstance(error.parent_node, DictConfig) else []
        return unknown_key_error(key, [f"{section}.{name}" for name in siblings], f" (+{key}=VALUE adds it)")
    first = str(error).strip().splitlines()[0]
    found = "" if error.value is None else str(error.value)
    expected = _expected_type(key)
    return ConfigError(
        f"{key} cannot be used: {first}; expected {expected}", key=key, found=found, expected=expected
    )


def _expected_type(key: str) -> str:
    kind = schema_keys().get(key)
    return "a value that fits" if kind is None else str(getattr(kind, "__name__", kind))
