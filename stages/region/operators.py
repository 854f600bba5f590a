"""Operators by name: the only way from text in an artifact to something that runs.

A graph file is data that anybody could have written. So a name reaches an operator only if it is
spelt like one, is an overload of ATen, and its schema says that it computes tensors from tensors:
no file names, streams, storages, generators or devices' state, nothing that resizes or rebinds a
tensor's memory, and no Python attribute on the way.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from stages.artifacts.errors import ArtifactError

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32,
    "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8,
    "uint8": torch.uint8, "bool": torch.bool,
    "complex64": torch.complex64, "complex128": torch.complex128,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

LAYOUTS: dict[str, torch.layout] = {"strided": torch.strided}

MEMORY_FORMATS: dict[str, torch.memory_format] = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
MEMORY_FORMAT_NAMES = {value: name for name, value in MEMORY_FORMATS.items()}

SPECIAL_FLOATS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}

#: `x.T` and its kin are the only computations with capitals in their names
_NAME = re.compile(
    r"aten\.(numpy_T|matrix_H|mT|mH|[a-z][a-z0-9_]*|_[a-z][a-z0-9_]*|__[a-z]+__)\.([A-Za-z][A-Za-z0-9_]*)"
)

#: private operators that eager code or the history of initial values really contains
_PRIVATE = {
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_cdist_forward", "_conj", "_convolution", "_copy_from",
    "_embedding_bag", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_grouped_mm", "_linalg_det", "_linalg_eigh",
    "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "_log_softmax", "_neg_view",
    "_pack_padded_sequence", "_pad_packed_sequence", "_reshape_alias", "_reshape_copy",
    "_sample_dirichlet", "_scaled_dot_product_flash_attention_for_cpu",
    "_softmax", "_stack", "_standard_gamma", "_to_copy", "_trilinear",
    "_unsafe_index", "_unsafe_index_put", "_unsafe_view",
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "_weight_norm", "_weight_norm_interface",
}  # fmt: skip

#: Python's bit operators on tensors; the only names with double underscores
_BITWISE = {
    "__and__", "__or__", "__xor__", "__lshift__", "__rshift__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip

#: public names whose schema looks like a computation but which rebind memory, read files, leave the
#: tensor world or only assert
_REFUSED = {
    "from_file", "set_", "set", "set_data", "resize", "resize_", "resize_as_", "resize_as",
    "resize_as_sparse_", "resize_as_sparse", "sparse_resize_", "sparse_resize_and_clear_",
    "record_stream", "item", "is_pinned", "pin_memory", "data", "requires_grad_", "retain_grad",
    "rename", "rename_", "align_to", "refine_names", "lift", "swap_tensors",
}  # fmt: skip

#: backends that hold packed weights or need tensors of another layout
_REFUSED_PREFIXES = (
    "quantized",
    "fbgemm_",
    "mkldnn_",
    "to_mkldnn",
    "cudnn_",
    "miopen_",
    "sparse_",
    "to_sparse",
)

_FORBIDDEN_TYPES = ("Storage", "Stream", "Future", "RRef", "Any", "Dict", "QScheme", "__torch__", "DeviceObj")

#: text arguments by operator: all others are refused
_TEXT_ARGUMENTS = {
    "rounding_mode", "approximate", "indexing", "equation", "reduce", "UPLO", "mode", "ord", "side",
    "padding", "padding_side", "pad_mode", "interpolation", "driver", "norm", "p",
}  # fmt: skip


def _refuse(name: str, reason: str) -> ArtifactError:
    return ArtifactError(
        f"operator {name!r} cannot be used: {reason}. Expected an ATen operator that computes tensors, "
        f'such as "aten.linear.default", or "getitem"',
        found=name,
        expected="an allowed operator",
    )


def _check_schema(name: str, schema: torch.FunctionSchema) -> None:
    """Tensors must come out, and only plain data may go in."""
    if not any("Tensor" in str(result.type) for result in schema.returns):
        raise _refuse(name, "it gives no tensor")
    for part in (*schema.arguments, *schema.returns):
        kind = str(part.real_type if hasattr(part, "real_type") else part.type)
        if any(forbidden in kind for forbidden in _FORBIDDEN_TYPES):
            raise _refuse(name, f"its schema has a {kind}")
        if "str" in kind and part.name not in _TEXT_ARGUMENTS:
            raise _refuse(name, f"it takes the text {part.name!r}")


@cache
def resolve(op: str) -> Callable[..., Any]:
    """The callable that `op` names: "getitem", or "aten.<operator>.<overload>".

    Raises:
        ArtifactError: The name is not that of an allowed computation.
    """
    if op == "getitem":
        return operator.getitem
    match = _NAME.fullmatch(op)
    if match is None:
        raise _refuse(op, "it is not spelt like an operator")
    base, overload_name = match.groups()
    if base.startswith("__"):
        allowed = base in _BITWISE
    elif base.startswith("_"):
        allowed = base in _PRIVATE
    else:
        allowed = base not in _REFUSED and not base.startswith(_REFUSED_PREFIXES)
    if not allowed:
        raise _refuse(op, "it is not on the list of allowed operators")
    # the registry decides what exists, so that no attribute is looked up by a name from a file
    registered = "" if overload_name == "default" else overload_name
    overloads = torch._C._jit_get_operation(f"aten::{base}")[1]
    if overloads is None or registered not in overloads:
        raise _refuse(op, "no such overload exists")
    found = getattr(getattr(torch.ops.aten, base), overload_name)
    if not isinstance(found, torch._ops.OpOverload):
        raise _refuse(op, "no such overload exists")
    _check_schema(op, found._schema)
    return found


def overload(op: str) -> torch._ops.OpOverload:
    """The overload that `op` names, for its schema and tags.

    Raises:
        ArtifactError: It is not the name of an allowed ATen operator.
    """
    found = resolve(op)
    if not isinstance(found, torch._ops.OpOverload):
        raise _refuse(op, "it has no schema")
    return found


def operator_name(target: object) -> str:
    """The inverse of `resolve`.

    Raises:
        ArtifactError: `target` has no name that `resolve` accepts.
    """
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, base = target._schema.name.partition("::")
        name = f"{namespace}.{base}.{target._overloadname}"
        resolve(name)
        return name
    raise _refuse(str(target), "it is no ATen operator")


def dtype(name: str) -> torch.dtype:
    """The dtype called `name`. Raises ArtifactError for an unknown one."""
    return _by_name(DTYPES, name, "dtype")


def layout(name: str) -> torch.layout:
    """The layout called `name`. Raises ArtifactError for an unknown one."""
    return _by_name(LAYOUTS, name, "layout")


def memory_format(name: str) -> torch.memory_format:
    """The memory format called `name`. Raises ArtifactError for an unknown one."""
    return _by_name(MEMORY_FORMATS, name, "memory format")


def special_float(name: str) -> float:
    """The float that JSON cannot hold. Raises ArtifactError for an unknown one."""
    return _by_name(SPECIAL_FLOATS, name, "float")


_Item = TypeVar("_Item")


def _by_name(table: dict[str, _Item], name: str, what: str) -> _Item:
    if name not in table:
        expected = ", ".join(table)
        raise ArtifactError(
            f"found {what} {name!r}; expected one of {expected}", found=name, expected=expected
        )
    return table[name]
