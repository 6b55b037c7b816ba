"""Architectures from transformers, random weights from their own config classes, on two simulated ranks.

Each is trained three steps and compared, weight by weight, with unsharded eager training on the same batches. Nothing
in the package knows any of them by name.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compiled import CaptureError, Policy, compile_sharded, fully_shard
from fsdp_compiled.capture import dynamo
from tests import huggingface
from tests.chosen import chosen
from tests.huggingface import MODELS, Batch
from tests.simulate import simulate
from tests.toys import sgd

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of transformers and of the models' own code
]

STEPS = 3


def _eager(model: nn.Module, batches: list[list[Batch]], lr: float = 0.05) -> dict[str, torch.Tensor]:
    optimizer = sgd(model, lr)
    for batch in batches:
        optimizer.zero_grad()
        for inputs, labels in batch:
            (huggingface.loss(model, inputs, labels) / len(batch)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest relative distance between two weights of the same name."""
    return max(
        ((left[name] - right[name]).norm() / (right[name].norm() + 1e-6)).item()
        for name in right
        if right[name].numel()
    )


# Llama, Gemma, OPT and GPT-2 are decoders as Mixtral is, and as Qwen3, which test_tensor_parallel_models trains; BERT
# and ViT are encoders, Whisper an encoder and decoder as T5.
REPEATED = ("Qwen3", "Llama", "Gemma", "BERT", "Whisper", "GPT-2", "ViT", "T5", "OPT", "Gemma 2")


@pytest.mark.parametrize("name", chosen(MODELS, [name for name in MODELS if name not in REPEATED]))
def test_it_trains_on_two_ranks_as_unsharded(name: str) -> None:
    pytest.importorskip("transformers")
    model, batch = huggingface.build(name), MODELS[name].batch
    plain, wrong = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(1)
    batches = [[batch(), batch()] for _ in range(STEPS)]
    simulation = simulate(model, sgd(model, 0.05), huggingface.loss, batches, Policy(lower="eager"))
    expected = _eager(plain, batches)
    assert _furthest(simulation.parameters, expected) < 1e-5
    assert _furthest(_eager(wrong, batches, lr=0.0501), expected) > 1e-5  # control
    assert len(simulation.plan.units) >= 3 and simulation.program.marked("gather")


@pytest.mark.parametrize("control", [False, True], ids=["it is", "control"])
def test_losses_of_routers_are_trained(control: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers collects them by hooks, which it puts there when it is first asked for them."""
    pytest.importorskip("transformers")
    if control:
        monkeypatch.setattr(dynamo, "_put_hooks", lambda *_: False)
    plain = huggingface.build("Mixtral")
    plain.config.output_router_logits, plain.router_aux_loss_coef = True, 0.5
    model, loop = copy.deepcopy(plain), fully_shard(copy.deepcopy(plain))
    tokens = torch.arange(12).view(2, 6)

    def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]

    sharded = compile_sharded(model, sgd(model), loss=loss_of, policy=Policy(lower="eager"))
    if control:
        with pytest.raises(CaptureError, match="capturing_hooks"):
            sharded.step(tokens)
        return
    sharded.step(tokens)
    for one in (plain, loop):
        optimizer = sgd(one)
        loss_of(one, tokens).backward()
        optimizer.step()
    named = [{name: full_tensor(one) for name, one in each.named_parameters()} for each in (plain, loop, model)]
    assert _furthest(named[1], named[0]) < 1e-6 and _furthest(named[2], named[0]) < 1e-6
    plain.config.output_router_logits = False
    assert loss_of(plain, tokens) < loss_of(loop, tokens) - 0.1
