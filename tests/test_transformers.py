"""Architectures from transformers, random weights from their own config classes, on two simulated ranks.

Each is trained five steps and compared, weight by weight, with unsharded eager training on the same batches. Nothing
in the package knows any of them by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy
from tests.simulate import simulate

transformers: Any = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of transformers and of the models' own code
]

VOCABULARY, STEPS = 64, 5
Batch = tuple[torch.Tensor, torch.Tensor]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
DECODER = {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2}


def _text() -> Batch:
    tokens = torch.randint(1, VOCABULARY, (2, 12))
    return tokens, tokens


def _image() -> Batch:
    return torch.randn(2, 3, 16, 16), torch.randint(0, 3, (2,))


def _speech() -> Batch:
    return torch.randn(2, 8, 16), torch.randint(1, VOCABULARY, (2, 6))


def _whisper() -> Any:
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    return transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, num_mel_bins=8, max_source_positions=8, max_target_positions=16,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0, **sides,
    )  # fmt: skip


MODELS: dict[str, tuple[str, Callable[[], Any], Callable[[], Batch]]] = {
    "GPT-2": (
        "GPT2LMHeadModel",
        lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0
        ),
        _text,
    ),
    "Llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**DECODER), _text),
    "Qwen3": ("Qwen3ForCausalLM", lambda: transformers.Qwen3Config(**DECODER, head_dim=8), _text),
    "Gemma": ("GemmaForCausalLM", lambda: transformers.GemmaConfig(**DECODER, head_dim=8), _text),
    "Mixtral": ("MixtralForCausalLM", lambda: transformers.MixtralConfig(**DECODER, num_local_experts=4), _text),
    "BERT": (
        "BertForMaskedLM",
        lambda: transformers.BertConfig(**SIZES, vocab_size=VOCABULARY, max_position_embeddings=16),
        _text,
    ),
    "T5": (
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        _text,
    ),
    "ViT": (
        "ViTForImageClassification",
        lambda: transformers.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=3),
        _image,
    ),
    "Mamba": (
        "MambaForCausalLM",
        lambda: transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
        _text,
    ),
    "Whisper": ("WhisperForConditionalGeneration", _whisper, _speech),
}


def _build(kind: str, config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    model.config.use_cache = False
    return model.eval()  # no dropout: ranks and the reference draw from different streams


def _loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(inputs, labels=labels).loss


def _sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def _eager(model: nn.Module, batches: list[list[Batch]], lr: float = 0.05) -> dict[str, torch.Tensor]:
    optimizer = _sgd(model, lr)
    for batch in batches:
        optimizer.zero_grad()
        for inputs, labels in batch:
            (_loss(model, inputs, labels) / len(batch)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest relative distance between two weights of the same name."""
    return max(
        ((left[name] - right[name]).norm() / (right[name].norm() + 1e-6)).item()
        for name in right
        if right[name].numel()
    )


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_on_two_ranks_as_unsharded(name: str) -> None:
    kind, config, batch = MODELS[name]
    model = _build(kind, config())
    plain, wrong = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(1)
    batches = [[batch(), batch()] for _ in range(STEPS)]
    simulation = simulate(model, _sgd(model), _loss, batches, Policy(lower="eager"))
    expected = _eager(plain, batches)
    assert _furthest(simulation.parameters, expected) < 1e-5
    assert _furthest(_eager(wrong, batches, lr=0.0501), expected) > 1e-5  # control
    assert len(simulation.plan.units) >= 3 and simulation.program.marked("gather")
