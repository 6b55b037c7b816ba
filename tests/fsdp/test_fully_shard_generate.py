"""`generate` of transformers on a model that `fully_shard` took, with and without registering it as a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_compiled as ours

TOKENS = torch.tensor([[1, 4, 5]])


def language_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def generated(model: Any) -> list[list[int]]:
    return model.generate(TOKENS, max_new_tokens=4, min_new_tokens=4, do_sample=False).tolist()


@pytest.mark.parametrize(
    "register",
    [lambda *_: None, ours.register_fsdp_forward_method, theirs.register_fsdp_forward_method],
    ids=["as it is", "ours", "FSDP2's"],
)
def test_generate_gives_what_it_gives_unsharded(register: Callable[..., None]) -> None:
    expected = generated(language_model())
    model = ours.fully_shard(language_model())
    register(model, "generate")
    assert generated(model) == expected


class Around(nn.Module):
    """As peft's: what it generates with does not go through its forward."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def generate(self, *args: Any, **named: Any) -> Any:
        return self.inner.generate(*args, **named)

    def forward(self, **named: Any) -> Any:
        return self.inner(**named)


def test_generate_of_a_model_around_another_is_gathered_for() -> None:
    expected = generated(language_model())
    model = Around(language_model())
    ours.fully_shard(model.inner.model.layers[0])
    ours.fully_shard(model)
    theirs.register_fsdp_forward_method(model, "generate")
    with torch.no_grad():
        assert generated(model) == expected
    assert generated(model) == expected
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert model.inner.lm_head.weight.grad is not None


def test_a_registered_generate_gathers_once_and_posts_one_call() -> None:
    model = ours.fully_shard(language_model())
    ours.register_fsdp_forward_method(model, "generate")
    gathered = []
    group = model.__dict__["_fsdp_compiled"].group
    unshard = group.unshard
    group.unshard = lambda: (gathered.append(1), unshard())
    generated(model)
    assert len(gathered) == 1
    assert model.training is False and isinstance(model.lm_head.weight, DTensor)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def test_a_method_that_computes_with_parameters_needs_ours() -> None:
    model = ours.fully_shard(Coder())
    x = torch.ones(1, 4)
    expected = model(x)
    theirs.register_fsdp_forward_method(model, "encode")
    result = model.encode(x)
    assert torch.equal(result, expected) and isinstance(model.into.weight, DTensor)
    with pytest.raises(RuntimeError, match=r"would be lost.*fsdp_compiled\.register_fsdp_forward_method"):
        result.sum().backward()
    del model.encode
    ours.register_fsdp_forward_method(model, "encode")
    assert torch.equal(model.encode(x), expected)


def test_what_else_asks_for_the_state_of_fsdp2_is_refused_by_name() -> None:
    model = ours.fully_shard(Coder())
    with pytest.raises(NotImplementedError, match="not there on modules that"):
        theirs.share_comm_ctx([model])
