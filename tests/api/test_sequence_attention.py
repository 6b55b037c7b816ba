"""Context parallelism: ranks with stretches of sequences, beside eager PyTorch on whole ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, SequenceAttention, compile_sharded
from fsdp_compiled.capture.layers_across_ranks import part_of
from fsdp_compiled.ir.nodes import is_collective
from tests.long_sequences import Long, eager, loss, sgd, spread
from tests.simulate import simulate, stages


def furthest(found: Any, wanted: dict[str, torch.Tensor]) -> float:
    """Keys' biases have no gradient but rounding errors."""
    return max((found[name] - value).abs().max().item() for name, value in wanted.items() if ".k.bias" not in name)


@pytest.mark.parametrize(
    ("axis", "shard", "replicate", "shape", "keys"),
    [
        ("shard", 4, 1, "zero3", 2),
        pytest.param("shard", 2, 2, "zero3", 4, marks=pytest.mark.exhaustive),
        ("replicate", 2, 2, "zero2", 4),
    ],
)
def test_stretches_train_as_whole_sequences_do(axis: Any, shard: int, replicate: int, shape: Any, keys: int) -> None:
    torch.manual_seed(0)
    model = Long(axis, keys)
    losses, weights = eager(copy.deepcopy(model), 1 if replicate == 1 else 2)
    steps = spread(shard, replicate) if axis == "shard" else spread(replicate, shard, across=True)
    found = simulate(
        model, sgd(model), loss, steps, Policy(shard=shape, lower="eager"), shard=shard, replicate=replicate
    )
    assert found.losses == pytest.approx(losses, rel=1e-6)
    assert furthest(found.parameters, weights) < 1e-6
    if replicate > 1:
        return
    for block in model.blocks:
        block.attend = Alone()
    control = simulate(
        model, sgd(model), loss, steps, Policy(shard=shape, lower="eager"), shard=shard, replicate=replicate
    )
    assert furthest(control.parameters, weights) > 1e-3


class Alone(nn.Module):
    """The broken control: each rank attends to its own stretch alone."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_an_attention_gathers_keys_values_and_positions() -> None:
    torch.manual_seed(0)
    counts = []
    for module in (SequenceAttention("shard"), Alone()):
        model = Long()
        for block in model.blocks:
            block.attend = module
        batch = spread(2, 1)[0][0]
        programs, _ = stages(model, sgd(model), loss, batch, Policy(lower="eager"), shard=2)
        phases = [node.meta["phase"] for node in programs[-1].graph.nodes if is_collective(node)]
        counts.append([phases.count(phase) for phase in ("forward", "backward")])
    # Of each of two blocks: keys, values and positions; and the gradients of keys and values.
    assert [one - other for one, other in zip(*counts, strict=True)] == [6, 4]


def test_what_is_refused() -> None:
    model = Long()
    with pytest.raises(ValueError, match=r'blocks.0.attend is a SequenceAttention.*weigh is "rows"'):
        compile_sharded(model, sgd(model), loss=loss, policy=Policy(weigh="rows"))
    with pytest.raises(ValueError, match="axis is 'time'; expected one of 'shard', 'replicate'"):
        SequenceAttention("time")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="A sequence of 18 is given to 4 ranks in two pieces each"):
        part_of(torch.arange(18), 0, 4, 0)
    assert part_of(torch.arange(8), 1, 2, 0).tolist() == [2, 3, 4, 5]
