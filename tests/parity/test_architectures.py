"""Small configurations of many of transformers' architectures, held against the plain loop.

Each trains two steps at its least budget, bitwise; `REFUSED` says which are refused, where and why.
The table in docs/models.md is this file's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.artifacts.errors import TraceError
from tests import reference
from tests.models_for_tests import SmallModel, tokens
from tests.parity import harness
from tests.parity.harness import LEARNING_RATE, LEAST, SEED

WIDTH, VOCABULARY, LENGTH = 64, 512, 32

#: name -> what the refusal names: the operation at the line of the model's own source
REFUSED = {
    "bloom": r"modeling_bloom\.py:\d+.*GeLUFunction",  # an autograd.Function of its own
    "longformer": r"modeling_longformer\.py:\d+.*hidden_states\.view",  # sizes divided as tensors
    "m2m100": r"modeling_m2m_100\.py:\d+.*`if dropout_probability",  # layers dropped by a drawn number
    "wav2vec2": r"modeling_wav2vec2\.py:\d+.*`if not skip_the_layer",  # the same
}


def hf(name: str, target: str, config: str, batch: Any = tokens, **arguments: Any) -> SmallModel:
    return SmallModel(name, f"transformers.{target}", f"transformers.{config}", arguments, batch)


D = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
DEC = dict(D, num_key_value_heads=2)
ENC = dict(D, max_position_embeddings=LENGTH + 8)


def images(labels: int, size: int = 32) -> Any:
    def make(g: torch.Generator, rows: int) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.randn(rows, 3, size, size, generator=g),
            "labels": torch.randint(0, labels, (rows,), generator=g),
        }

    return make


def clip(g: torch.Generator, rows: int) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(0, VOCABULARY - 2, (rows, 16), generator=g),
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=g),
        "attention_mask": torch.ones(rows, 16, dtype=torch.int64),
        "return_loss": True,
    }


def whisper(g: torch.Generator, rows: int) -> dict[str, Any]:
    return {
        "input_features": torch.randn(rows, 20, 64, generator=g),
        "labels": torch.randint(0, VOCABULARY, (rows, 16), generator=g),
    }


def seqcls(g: torch.Generator, rows: int) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(5, VOCABULARY, (rows, LENGTH), generator=g),
        "attention_mask": torch.ones(rows, LENGTH, dtype=torch.int64),
        "labels": torch.randint(0, 2, (rows,), generator=g),
    }


def wav(g: torch.Generator, rows: int) -> dict[str, Any]:
    return {
        "input_values": torch.randn(rows, 2000, generator=g),
        "labels": torch.randint(0, 2, (rows,), generator=g),
    }


S2S = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
ALL = [
    hf(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        n_layer=2,
        n_embd=WIDTH,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
    ),
    hf("llama", "LlamaForCausalLM", "LlamaConfig", **DEC),
    hf("qwen2", "Qwen2ForCausalLM", "Qwen2Config", **DEC),
    hf("qwen3", "Qwen3ForCausalLM", "Qwen3Config", head_dim=16, **DEC),
    hf("gemma", "GemmaForCausalLM", "GemmaConfig", head_dim=16, **DEC),
    hf("gemma2", "Gemma2ForCausalLM", "Gemma2Config", head_dim=16, **DEC),
    hf("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=16, sliding_window=8, **DEC),
    hf("mistral", "MistralForCausalLM", "MistralConfig", **DEC),
    hf("mistral_window", "MistralForCausalLM", "MistralConfig", sliding_window=8, **DEC),
    hf("phi", "PhiForCausalLM", "PhiConfig", **D),
    hf("phi3", "Phi3ForCausalLM", "Phi3Config", pad_token_id=0, **DEC),
    hf(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        hidden_size=WIDTH,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        word_embed_proj_dim=WIDTH,
    ),
    hf("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", **D),
    hf(
        "gpt_neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        hidden_size=WIDTH,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        window_size=8,
    ),
    hf(
        "gptj",
        "GPTJForCausalLM",
        "GPTJConfig",
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        rotary_dim=8,
        vocab_size=VOCABULARY,
    ),
    hf(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
    ),
    hf(
        "bloom",
        "BloomForCausalLM",
        "BloomConfig",
        hidden_size=WIDTH,
        n_layer=2,
        n_head=2,
        vocab_size=VOCABULARY,
    ),
    hf("falcon", "FalconForCausalLM", "FalconConfig", **D),
    hf(
        "mpt",
        "MptForCausalLM",
        "MptConfig",
        d_model=WIDTH,
        n_heads=4,
        n_layers=2,
        vocab_size=VOCABULARY,
        max_seq_len=LENGTH,
    ),
    hf("stablelm", "StableLmForCausalLM", "StableLmConfig", **DEC),
    hf("cohere", "CohereForCausalLM", "CohereConfig", **DEC),
    hf("granite", "GraniteForCausalLM", "GraniteConfig", **DEC),
    hf("olmo2", "Olmo2ForCausalLM", "Olmo2Config", **DEC),
    hf("smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", **dict(DEC, pad_token_id=0)),
    hf("olmoe", "OlmoeForCausalLM", "OlmoeConfig", num_experts=4, num_experts_per_tok=2, **DEC),
    hf(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        **DEC,
    ),
    hf(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        **DEC,
    ),
    hf("bert", "BertForMaskedLM", "BertConfig", **ENC),
    hf("bert_cls", "BertForSequenceClassification", "BertConfig", seqcls, **ENC),
    hf("roberta", "RobertaForMaskedLM", "RobertaConfig", **ENC),
    hf("xlm_roberta", "XLMRobertaForMaskedLM", "XLMRobertaConfig", **ENC),
    hf(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        dim=WIDTH,
        hidden_dim=2 * WIDTH,
        n_layers=2,
        n_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    ),
    hf("albert", "AlbertForMaskedLM", "AlbertConfig", embedding_size=32, **ENC),
    hf("electra", "ElectraForMaskedLM", "ElectraConfig", embedding_size=32, **ENC),
    hf("deberta", "DebertaForMaskedLM", "DebertaConfig", **ENC),
    hf("deberta_v2", "DebertaV2ForMaskedLM", "DebertaV2Config", **ENC),
    hf(
        "deberta_v2_rel",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        **ENC,
    ),
    hf("mpnet", "MPNetForMaskedLM", "MPNetConfig", **ENC),
    hf(
        "modernbert",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
        local_attention=8,
        **D,
    ),
    hf(
        "fnet",
        "FNetForMaskedLM",
        "FNetConfig",
        **{k: v for k, v in ENC.items() if k != "num_attention_heads"},
    ),
    hf("bigbird", "BigBirdForMaskedLM", "BigBirdConfig", attention_type="original_full", **ENC),
    hf("longformer", "LongformerForMaskedLM", "LongformerConfig", attention_window=8, **ENC),
    hf(
        "xlnet",
        "XLNetLMHeadModel",
        "XLNetConfig",
        d_model=WIDTH,
        n_layer=2,
        n_head=4,
        d_inner=2 * WIDTH,
        vocab_size=VOCABULARY,
    ),
    hf(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=WIDTH,
        d_ff=2 * WIDTH,
        d_kv=16,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=2,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    ),
    hf(
        "mt5",
        "MT5ForConditionalGeneration",
        "MT5Config",
        d_model=WIDTH,
        d_ff=2 * WIDTH,
        d_kv=16,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=2,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    ),
    hf("bart", "BartForConditionalGeneration", "BartConfig", **S2S),
    hf("mbart", "MBartForConditionalGeneration", "MBartConfig", **S2S),
    hf("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", **S2S),
    hf("marian", "MarianMTModel", "MarianConfig", decoder_start_token_id=0, pad_token_id=0, **S2S),
    hf("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", **S2S),
    hf("m2m100", "M2M100ForConditionalGeneration", "M2M100Config", **S2S),
    hf(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        whisper,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        vocab_size=VOCABULARY,
        num_mel_bins=20,
        max_source_positions=32,
        max_target_positions=32,
        decoder_start_token_id=0,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    ),
    hf(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        images(2),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    ),
    hf(
        "deit",
        "DeiTForImageClassification",
        "DeiTConfig",
        images(2),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    ),
    hf(
        "dinov2",
        "Dinov2ForImageClassification",
        "Dinov2Config",
        images(2),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    ),
    hf(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        images(2),
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    hf(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        images(2),
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
    ),
    hf(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        images(2),
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
    ),
    SmallModel(
        "clip",
        "transformers.CLIPModel",
        "transformers.CLIPConfig",
        {
            "text_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 16,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
            },
            "projection_dim": 16,
        },
        clip,
    ),
    hf(
        "wav2vec2",
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        wav,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=[16, 16],
        conv_stride=[5, 4],
        conv_kernel=[10, 8],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    ),
    hf(
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        hidden_size=WIDTH,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
        state_size=4,
    ),
    hf(
        "mamba2",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        hidden_size=WIDTH,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
        state_size=16,
        num_heads=8,
        head_dim=16,
        expand=2,
        n_groups=1,
        chunk_size=16,
    ),
    hf(
        "rwkv", "RwkvForCausalLM", "RwkvConfig", hidden_size=WIDTH, num_hidden_layers=2, vocab_size=VOCABULARY
    ),
]


def _train_plainly(model: SmallModel, batches: list[dict[str, Tensor]]) -> reference.Result:
    optimizer = reference.adamw(lr=LEARNING_RATE)
    return reference.train(model.build, batches, optimizer=optimizer, steps=2, seed=SEED)


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in ALL if model.name not in REFUSED], ids=lambda m: m.name)
def test_it_trains_as_in_the_plain_loop(model: SmallModel, tmp_path: Path) -> None:
    batches = model.batches(2)
    expected = _train_plainly(model, batches)
    found = harness.train(model, "fp32", batches, LEAST, steps=2, disk=tmp_path)
    assert found.losses == expected.losses
    for name, tensor in expected.final.items():
        assert torch.equal(found.final[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in ALL if model.name in REFUSED], ids=lambda m: m.name)
def test_it_is_refused_at_its_own_line(model: SmallModel) -> None:
    with pytest.raises(TraceError, match=REFUSED[model.name]):
        harness.traced(model, "fp32", 2)
