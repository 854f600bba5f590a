"""Only computations are reachable by name."""

from __future__ import annotations

import operator
import subprocess
import sys

import pytest
import torch

from stages.artifacts.errors import ArtifactError
from stages.region.operators import DTYPE_NAMES, DTYPES, operator_name, resolve

COMPUTATIONS = [
    "aten.linear.default", "aten.scaled_dot_product_attention.default", "aten.lstm.input",
    "aten.batch_norm.default", "aten.add_.Tensor", "aten.__and__.Tensor", "aten.div.Tensor_mode",
    "aten.cross_entropy_loss.default", "aten.dropout.default", "aten.split.Tensor", "aten.einsum.default",
    "aten.numpy_T.default", "aten.mT.default", "aten._upsample_bilinear2d_aa.default",
]  # fmt: skip

REFUSED = [
    "aten.from_file.default",  # reads a file
    "aten.save.default", "aten.warn.default", "aten.manual_seed.default",  # effects, no tensors
    "aten.item.default", "aten._local_scalar_dense.default", "aten.sym_size.int",  # leave the tensors
    "aten.set_.source_Tensor", "aten.resize_.default",  # rebind memory
    "aten.linear.__class__", "aten.__class__.default", "aten.linear.op", "aten.linear._schema",  # attributes
    "aten.__init__.default", "aten.name.default", "aten.linear.overloads",
    "os.system.default", "builtins.eval", "prims.add.default", "torch.load.default", "c10d.send.default",
    "aten.no_such_operator.default", "aten.linear", "aten.linear.default.", "aten.linear.default\n",
    "", "eval",
]  # fmt: skip


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_a_computation_resolves_to_its_overload_and_back(name: str) -> None:
    overload = resolve(name)
    assert isinstance(overload, torch._ops.OpOverload)
    assert operator_name(overload) == name


def test_getitem_is_pythons() -> None:
    assert resolve("getitem") is operator.getitem
    assert operator_name(operator.getitem) == "getitem"


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_by_name(name: str) -> None:
    with pytest.raises(ArtifactError) as refusal:
        resolve(name)
    assert refusal.value.found == name


def test_no_reachable_operator_touches_files_streams_or_storages() -> None:
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, base = schema.name.partition("::")
        try:
            resolve(f"{namespace}.{base}.{schema.overload_name or 'default'}")
        except ArtifactError:
            continue
        kinds = " ".join(str(argument.type) for argument in schema.arguments)
        assert namespace == "aten"
        assert "Storage" not in kinds
        assert "Stream" not in kinds
        assert "file" not in base
        assert "filename" not in [argument.name for argument in schema.arguments]


def test_dtype_tables_are_inverse() -> None:
    assert {DTYPES[name] for name in DTYPES} == set(DTYPE_NAMES)
    assert all(DTYPE_NAMES[dtype] == name for name, dtype in DTYPES.items())


def test_the_module_imports_no_tracing_library() -> None:
    code = (
        "import sys, stages.region.operators as o; o.resolve('aten.linear.default');"
        "unwanted = ('torch.export._trace', 'transformers', 'sympy', 'torch._dynamo');"
        "print([name for name in unwanted if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
