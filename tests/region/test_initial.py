"""Initial values are bitwise those of the real constructor, one tensor at a time."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from stages.artifacts import envelope
from stages.artifacts import graph as g
from stages.artifacts.errors import ArtifactError, TraceError
from stages.config import ModelConfig
from stages.region.initial import iterate_initial, replay
from stages.trace import build, parameters
from tests import reference

SEED = 5
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "vocab_size": 96,
}  # fmt: skip
_IDS = {"bos_token_id": 0, "eos_token_id": 0}
_GROUPED = {**_SIZES, "num_key_value_heads": 1}

_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96, **_IDS}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
_OPT = {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}

ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "bloom": ("BloomForCausalLM", "BloomConfig", _SIZES),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED),
    "opt": ("OPTForCausalLM", "OPTConfig", _OPT),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _SIZES),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_SIZES, "image_size": 16, "patch_size": 8}),
}


class ConvBn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.recurrent = nn.LSTM(8, 8, num_layers=2)
        self.embedding = nn.Embedding(9, 8, padding_idx=3)
        self.scale = torch.tensor([0.5, 2.0])


class Awkward(nn.Module):
    """Two live draws of one tensor, a draw overwritten later, a read number, a tie, a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.Parameter(torch.empty(40, 3))
        with torch.no_grad():
            self.pieces[:20].normal_(std=3.0)
        self.between = nn.Linear(7, 5)
        with torch.no_grad():
            self.pieces[20:].uniform_(-1, 1)
        self.overwritten = nn.Parameter(torch.randn(33).mul_(2).fill_(1.5))
        self.after = nn.Parameter(
            torch.randn(31, dtype=torch.float64).float() * self.overwritten.detach()[:31]
        )
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.between.weight
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.register_buffer("rates", torch.tensor(rates), persistent=False)
        self.short = nn.Parameter(torch.randn(9).to(torch.bfloat16))


class Resampled(nn.Module):
    """Its constructor draws again as long as a drawn number is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(17))
        with torch.no_grad():
            while bool(self.weight.normal_()[0] < 0):
                pass
        self.later = nn.Parameter(torch.randn(5))


def own(cls: type[nn.Module]) -> ModelConfig:
    return ModelConfig(name=cls.__name__, source="module", target=f"tests.region.test_initial.{cls.__name__}")


def transformer(name: str) -> ModelConfig:
    target, config, arguments = ARCHITECTURES[name]
    return ModelConfig(name, "transformers", f"transformers.{target}", f"transformers.{config}", arguments)


def graph_of(config: ModelConfig, seed: int = SEED) -> g.RegionGraph:
    """A graph without nodes: only parameters and their initial values, through the artifact's form."""
    built = build.build(config, seed)
    stored, tensors = parameters.describe(built, {})
    graph = g.RegionGraph(
        model=config.name, mode="train", precision="fp32", symbols={}, inputs=[], outputs=[], loss="",
        nodes=[], regions=[], values=[], parameters=stored,
        initial=parameters.initial_values(built, stored, tensors),
    )  # fmt: skip
    return msgspec.json.decode(msgspec.json.encode(graph), type=g.RegionGraph)


def real_tensors(config: ModelConfig, seed: int = SEED) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = reference.build(config.target, config.config, config.arguments)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_same(made: dict[str, Tensor], real: dict[str, Tensor]) -> None:
    assert set(made) == set(real)
    for name, tensor in real.items():
        assert made[name].dtype == tensor.dtype, name
        assert made[name].stride() == tensor.stride(), name
        assert torch.equal(made[name], tensor), name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_initial_tensors_are_those_of_the_real_constructor(name: str) -> None:
    config = transformer(name)
    assert_same(dict(iterate_initial(graph_of(config), SEED)), real_tensors(config))


@pytest.mark.parametrize("cls", [ConvBn, Awkward, Resampled])
def test_own_modules_start_as_their_constructors_make_them(cls: type[nn.Module]) -> None:
    assert_same(dict(iterate_initial(graph_of(own(cls)), SEED)), real_tensors(own(cls)))


def test_one_record_serves_every_seed() -> None:
    graph = graph_of(own(Awkward))
    assert graph.initial.seed is None
    for seed in (0, 11):
        assert_same(dict(iterate_initial(graph, seed)), real_tensors(own(Awkward), seed))


def test_a_constructor_that_branches_on_drawn_numbers_holds_for_its_seed_only() -> None:
    graph = graph_of(own(Resampled))
    assert graph.initial.seed == SEED
    with pytest.raises(ArtifactError, match="seed"):
        list(iterate_initial(graph, SEED + 1))


def test_the_callers_random_state_is_untouched_between_and_after_tensors() -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for _ in iterate_initial(graph_of(own(Awkward)), SEED):
        assert torch.equal(torch.get_rng_state(), before)


def test_a_consumer_that_draws_between_tensors_changes_nothing() -> None:
    made = {}
    for name, tensor in iterate_initial(graph_of(own(Awkward)), SEED):
        torch.randn(3)
        made[name] = tensor
    assert_same(made, real_tensors(own(Awkward)))


def test_tensors_are_let_go_one_by_one() -> None:
    previous: weakref.ref[Tensor] | None = None
    for _, tensor in iterate_initial(graph_of(transformer("gpt2")), SEED):
        assert previous is None or previous() is None
        previous = weakref.ref(tensor)
        del tensor


def test_replay_refuses_a_crafted_tape() -> None:
    ops = [g.InitialOp(["t"], "os.system.default", ["true"], {}, False, ["float32"], [[1]])]
    with pytest.raises(ArtifactError):
        list(replay(ops, {"w": "t"}, 0))
    with pytest.raises(ArtifactError, match="before it is made"):
        list(replay([g.InitialOp(["t"], "aten.neg.default", [g.Ref("x")])], {"w": "t"}, 0))
    with pytest.raises(ArtifactError, match="base64"):
        list(replay([g.InitialOp(["t"], "literal", ["%"], {}, False, ["float32"], [[1]])], {"w": "t"}, 0))


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))


class Seeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(4))


def test_memory_that_nobody_initialised_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match="weight is never initialised"):
        graph_of(own(Uninitialised))


def test_a_constructor_that_seeds_is_refused() -> None:
    before = torch.get_rng_state()
    with pytest.raises(TraceError, match="seed"):
        graph_of(own(Seeding))
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A saved tiny GPT-2, in two files, with tied embeddings."""
    target, config, arguments = ARCHITECTURES["gpt2"]
    torch.manual_seed(77)
    model = reference.build(f"transformers.{target}", f"transformers.{config}", arguments)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path, dict(model.named_parameters())


def directory(path: Path) -> ModelConfig:
    return ModelConfig(name="hf", source="directory", path=str(path))


def test_saved_weights_stream_from_their_files(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, real = saved
    graph = graph_of(directory(folder))
    assert len(graph.initial.files) > 1
    assert_same(dict(iterate_initial(graph, 0)), real)


def test_parameters_that_the_files_lack_keep_the_constructors_values(
    saved: tuple[Path, dict[str, Tensor]],
) -> None:
    from safetensors.torch import load_file, save_file

    folder, real = saved
    (folder / "model.safetensors.index.json").unlink()
    for file in folder.glob("*.safetensors"):
        tensors = {key: value for key, value in load_file(file).items() if key != "transformer.ln_f.weight"}
        save_file(tensors, file)
    with pytest.warns(UserWarning, match=r"transformer\.ln_f\.weight"):
        graph = graph_of(directory(folder))
    made = dict(iterate_initial(graph, 0))
    assert torch.equal(made["transformer.ln_f.weight"], torch.ones(32))
    assert torch.equal(made["transformer.wte.weight"], real["transformer.wte.weight"])


def test_damaged_or_foreign_files_are_refused(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = saved
    graph = graph_of(directory(folder))
    outside = msgspec.structs.replace(graph.initial, files=["../secret.safetensors"])
    with pytest.raises(ArtifactError, match="plain name"):
        list(iterate_initial(msgspec.structs.replace(graph, initial=outside), 0))
    largest = max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-64])
    with pytest.raises(ArtifactError, match="damaged"):
        list(iterate_initial(graph, 0))
    largest.write_bytes(b"\xff" * 64)
    with pytest.raises(ArtifactError, match="no safetensors"):
        list(iterate_initial(graph, 0))


def test_making_initial_values_imports_no_tracing_library(tmp_path: Path) -> None:
    envelope.save(tmp_path / "graph.json", graph_of(transformer("gpt2")))
    code = (
        "import sys; from pathlib import Path\n"
        "from stages.artifacts import envelope, graph as g\n"
        "from stages.region.initial import iterate_initial\n"
        f"graph = envelope.load(Path({str(tmp_path / 'graph.json')!r}), g.RegionGraph)\n"
        "assert len(dict(iterate_initial(graph, 0))) == len(graph.parameters)\n"
        "unwanted = ('torch.export._trace', 'torch._dynamo', 'transformers', 'sympy', 'stages.trace.stage')\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
