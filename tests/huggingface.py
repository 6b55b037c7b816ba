"""Small models of many architectures from transformers, with random weights, and what they train on.

transformers is imported when a model is built, and not before: collecting the tests does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

VOCABULARY = 64
Batch = tuple[torch.Tensor, torch.Tensor]


def _text() -> Batch:
    tokens = torch.randint(1, VOCABULARY, (2, 12))
    return tokens, tokens


def _image() -> Batch:
    return torch.randn(2, 3, 16, 16), torch.randint(0, 3, (2,))


def _speech() -> Batch:
    return torch.randn(2, 8, 16), torch.randint(1, VOCABULARY, (2, 6))


@dataclass(frozen=True)
class Architecture:
    """A model's class, the sizes of its config, and how to make a batch of two examples."""

    model: str
    config: str
    sizes: dict[str, Any]
    batch: Callable[[], Batch] = _text


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
DECODER = {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2}
WHISPER = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
} | {
    "vocab_size": VOCABULARY, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip

MODELS = {
    "GPT-2": Architecture("GPT2LMHeadModel", "GPT2Config", GPT2),
    "Llama": Architecture("LlamaForCausalLM", "LlamaConfig", DECODER),
    "Qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "Gemma": Architecture("GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 8}),
    "OPT": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {**SIZES, "vocab_size": VOCABULARY, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 16},
    ),
    "Gemma 2": Architecture("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 8}),
    "Mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "BERT": Architecture(
        "BertForMaskedLM", "BertConfig", {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
    ),
    "T5": Architecture("T5ForConditionalGeneration", "T5Config", T5),
    "ViT": Architecture(
        "ViTForImageClassification", "ViTConfig", {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 3}, _image
    ),
    "Mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "Whisper": Architecture("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, _speech),
}


def build(name: str) -> nn.Module:
    """Without dropout: ranks and the reference draw from different streams."""
    wanted, transformers = MODELS[name], import_module("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, wanted.model)(getattr(transformers, wanted.config)(**wanted.sizes))
    model.config.use_cache = False
    return model.eval()


def loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(inputs, labels=labels).loss
