"""Builds the configured model on fake tensors, with the history of its initial values."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import traceback
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from stages.artifacts.errors import StageError, TraceError
from stages.config import LoraConfig, ModelConfig
from stages.models import lora
from stages.trace.history import History, recording
from stages.trace.places import error_place
from stages.trace.structure import tensors_in

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HALF_PRECISION = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Built:
    """A model without memory.

    Attributes:
        initial_dtypes: The dtype that each parameter and buffer had before the precision cast.
        on_tape: Each parameter's and buffer's name in `history`; empty for the caller's own module.
        folder: Of saved weights; "" when there are none.
        plain: The real tensor of each fake one that lies in an attribute as neither parameter nor
            buffer, by the fake one's id.
    """

    model: nn.Module
    mode: FakeTensorMode
    initial_dtypes: dict[str, str]
    history: History | None = None
    on_tape: dict[str, str] = field(default_factory=dict)
    export_config: str | None = None
    folder: str = ""
    plain: dict[int, torch.Tensor] = field(default_factory=dict)


def build(config: ModelConfig, seed: int, adapters: LoraConfig | None = None) -> Built:
    """The model that the configuration names, in train mode, in its original dtypes.

    Args:
        adapters: What is added to it after its construction.

    Raises:
        TraceError: It cannot be imported or built, or its weights are views of one another.
        ConfigError: The adapters' layers are not in the model.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with recording(mode, seed) as history:
        model, export_config = _construct(config)
        if adapters is not None and adapters.rank:
            lora.adapt(model, **dataclasses.asdict(adapters))
    _refuse_shared_storage(model)
    on_tape = {name: history.name(tensor) for name, tensor in _tensors(model)}
    folder = config.path if config.source == "directory" else ""
    return Built(model, mode, _dtypes(model), history, on_tape, export_config, folder)


def copied(model: nn.Module) -> Built:
    """The caller's own module as a fake copy; the module itself is left alone."""
    _refuse_shared_storage(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    try:
        with FakeCopyMode(mode):
            copy = deepcopy(model, memo)
    except Exception as error:  # a boundary: attributes of any type may refuse to be copied
        raise TraceError(
            f"{type(model).__name__} cannot be copied for tracing: {type(error).__name__}: {error}. Expected "
            f"attributes that copy.deepcopy takes; a torch.Generator, an open file or a lock is none",
            found=type(error).__name__,
        ) from error
    for part in copy.modules():
        settings: Any = getattr(part, "config", None)
        if getattr(settings, "use_cache", False):
            settings.use_cache = False  # generation caches would only add outputs that training does not use
    plain = {id(fake): real for fake, real in zip(_plain_tensors(copy), _plain_tensors(model), strict=True)}
    return Built(copy, mode, _dtypes(copy), plain=plain)


def _plain_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors in attributes of modules, in nested lists and dicts too, that are not registered."""
    for module in model.modules():
        registries = ("_parameters", "_buffers", "_modules")
        held = {name: value for name, value in vars(module).items() if name not in registries}
        yield from (tensor for _, tensor in tensors_in(held))


def _construct(config: ModelConfig) -> tuple[nn.Module, str | None]:
    """The model and, for Hugging Face models, the configuration to write beside its weights."""
    if config.source == "directory":
        settings = _saved_settings(config)
        target = config.target or f"transformers.{(settings.architectures or ['AutoModelForCausalLM'])[0]}"
        return _with_settings(_model_class(_imported(target), settings, target), config, settings)
    target = _imported(config.target)
    if config.config:
        return _with_settings(target, config, _call(_imported(config.config), config, **config.arguments))
    model = _call(target, config, **config.arguments)
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        message = f"{config.target} gave a {found}; expected a torch.nn.Module"
        raise TraceError(message, key="model.target", found=found)
    return model, None


def _with_settings(target: Any, config: ModelConfig, settings: Any) -> tuple[nn.Module, str]:
    cache: bool = getattr(settings, "use_cache", False)
    if cache:
        settings.use_cache = False  # generation caches would only add outputs that training does not use
    model = _call(target, config, settings)
    written = deepcopy(settings)
    if cache:
        written.use_cache = cache
    written.architectures = [type(model).__name__]
    return model, written.to_json_string()


def _model_class(target: Any, settings: Any, name: str) -> Any:
    """The class itself, or the one that an Auto class chooses for `settings`."""
    mapping = getattr(target, "_model_mapping", None)
    if mapping is None:
        return target
    if type(settings) not in mapping:
        kind = type(settings).__name__
        message = f"{name} has no model for a {kind}; expected a class with the head that you want"
        raise TraceError(message, key="model.target", found=name)
    found = mapping[type(settings)]
    return found[0] if isinstance(found, (list, tuple)) else found


def _saved_settings(config: ModelConfig) -> Any:
    """The saved configuration, with `config.arguments` in place of its values."""
    from transformers import AutoConfig

    folder = config.path
    if not (Path(folder) / "config.json").is_file():
        raise TraceError(
            f"model.path={folder} has no config.json; expected a folder written by save_pretrained",
            key="model.path",
            found=folder,
        )
    try:
        settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise TraceError(f"{folder}/config.json cannot be read: {error}", key="model.path") from error
    for name, value in config.arguments.items():
        if not hasattr(settings, name):
            known = [key for key in dir(settings) if not key.startswith("_")]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            message = f"model.arguments.{name} is not in the configuration of {folder}{hint}"
            raise TraceError(message, key=f"model.arguments.{name}", found=name)
        setattr(settings, name, value)
    return settings


def _call(target: Any, config: ModelConfig, *args: Any, **kwargs: Any) -> Any:
    """Calls the user's class; whatever it raises is reported with its type and place."""
    try:
        return target(*args, **kwargs)
    except StageError:
        raise
    except Exception as error:  # a boundary: the user's code may raise anything
        _, place = error_place(error, None)
        raise TraceError(
            f"building {config.target or config.path} raised {type(error).__name__}: {error}"
            f"{f' ({place})' if place else ''}. Expected it to build from model.arguments={config.arguments}",
            key="model.arguments",
        ) from error


def _imported(path: str) -> Any:
    """The object that "package.Class" names.

    Raises:
        TraceError: It does not exist, or its module raises while it is imported: type, file and
            line of the original are in the message.
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        return getattr(module, name)
    except AttributeError as error:
        if not hasattr(error, "name") or error.name != name:
            raise _import_failure(path, error) from error
        near = difflib.get_close_matches(name, dir(importlib.import_module(module_name)), 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise TraceError(f"{module_name} has no {name!r}.{hint}", key="model.target", found=path) from error
    except Exception as error:  # a boundary: the user's module may raise anything
        raise _import_failure(path, error) from error


def _import_failure(path: str, error: Exception) -> TraceError:
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if "importlib" not in frame.filename]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" at {error.filename}:{error.lineno}"
    return TraceError(
        f"importing {path} raised {type(error).__name__}: {error}{where}. Expected an importable class",
        key="model.target",
        found=path,
    )


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _refuse_shared_storage(model: nn.Module) -> None:
    """Each parameter and buffer must have storage of its own: a slot in memory holds one of them."""
    owner: dict[int, tuple[str, int]] = {}
    for name, tensor in _tensors(model):
        other, same = owner.setdefault(tensor.untyped_storage()._cdata, (name, id(tensor)))
        if same != id(tensor) and tensor.numel():
            raise TraceError(
                f"{other} and {name} are different tensors over one storage; expected tied weights to be "
                f"the same Parameter object. Assign the module's attribute instead of its .data",
                found=f"{other}, {name}",
            )


def _dtypes(model: nn.Module) -> dict[str, str]:
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in _tensors(model)}


def cast_parameters(built: Built, precision: str) -> None:
    """Casts floating parameters, not buffers, to the compute dtype; tied ones stay tied.

    fp32 leaves every parameter as the constructor made it.

    Raises:
        TraceError: In fp32, a parameter that trains has 16 bits: updates without a master would lose
            most of each step, and with one they are those of another precision.
    """
    if precision == "fp32":
        for name, parameter in built.model.named_parameters():
            if parameter.requires_grad and parameter.dtype in _HALF_PRECISION:
                dtype = _HALF_PRECISION[parameter.dtype]
                raise TraceError(
                    f"parameter {name!r} that trains is {str(parameter.dtype).removeprefix('torch.')}, and "
                    f"precision=fp32 keeps no fp32 master of it. Use precision={dtype}, or call .float() on "
                    f"the model",
                    key="precision",
                    found="fp32",
                    expected=dtype,
                )
        return
    dtype = COMPUTE_DTYPES[precision]
    originals: list[nn.Parameter] = []  # kept, so that no id is used twice
    cast: dict[int, nn.Parameter] = {}
    with built.mode, torch.no_grad():
        for module in built.model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not parameter.is_floating_point():
                    continue
                if id(parameter) not in cast:
                    originals.append(parameter)
                    cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                # through the module's own __setattr__: recurrent modules keep lists of their weights
                setattr(module, name, cast[id(parameter)])
