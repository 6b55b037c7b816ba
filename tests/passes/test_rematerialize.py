"""Cheap values are made again in backward: the same numbers, less kept, and nothing expensive run twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, Program, compile_sharded
from fsdp_compiled.analysis.memory import Persistent
from fsdp_compiled.analysis.peak_memory import predict
from fsdp_compiled.ir.nodes import is_random
from tests import models
from tests.chosen import examples
from tests.models import Recipe
from tests.recipes import trained
from tests.simulate import stages

aten = torch.ops.aten
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.scale).square().mean()


def policy(recompute: str | None) -> Policy:
    return Policy(lower="eager", bucket_mb=0, recompute=recompute)


def built(recompute: str | None) -> tuple[Program, int]:
    """The program, and the predicted bytes at the height of a step."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, plan = stages(model, optimizer, None, (torch.ones(512, 32),), policy(recompute))
    return found[-1], predict(found[-1], plan, Persistent()).peak.nbytes


def heavy(program: Program) -> Counter[str]:
    """How often each operator runs that is not cheap: products and random numbers."""
    return Counter(
        str(node.target)
        for node in program.graph.nodes
        if node.op == "call_function" and (is_random(node) or "mm" in str(node.target))
    )


def crossing(program: Program) -> dict[fx.Node, torch.Tensor]:
    """What forward makes and backward reads."""
    return {
        node: node.meta["val"]
        for node in program.graph.nodes
        if node.meta.get("phase") == "forward" and any(user.meta.get("phase") == "backward" for user in node.users)
    }


def test_less_is_kept_and_nothing_heavy_runs_twice() -> None:
    (plain, high), (remade, low) = built(None), built("cheap")
    assert "rematerialize" in remade.history and "rematerialize" not in plain.history
    assert low < 0.75 * high
    assert heavy(plain) == heavy(remade)
    kept = {str(node.target) for node in crossing(remade)}
    assert "aten.gelu.default" in {str(node.target) for node in crossing(plain)} and "aten.gelu.default" not in kept
    gelus = [node for node in remade.graph.nodes if node.target is aten.gelu.default]
    assert Counter(node.meta["phase"] for node in gelus) == {"forward": 3, "backward": 3}


def test_what_is_made_again_is_made_just_before_it_is_read() -> None:
    nodes = list(built("cheap")[0].graph.nodes)
    for node in nodes:
        if node.target is aten.gelu.default and node.meta["phase"] == "backward":
            first = min(nodes.index(user) for user in node.users)
            assert first - nodes.index(node) <= 3


@settings(max_examples=examples(3, 12), deadline=None, derandomize=True)
@given(models.recipes())
def test_generated_models_train_to_the_same_bits(what: Recipe) -> None:
    ours, plain = (trained(replace(what, policy=replace(what.policy, recompute=how))) for how in ("cheap", None))
    assert all(map(torch.equal, ours.losses, plain.losses))
    for name, value in plain.parameters.items():
        assert torch.equal(ours.parameters[name], value), name
    for mine, theirs in zip(ours.buffers, plain.buffers, strict=True):
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


@pytest.mark.parametrize(("lower", "rematerializes"), [("inductor", True), ("eager", False)])
def test_left_to_itself_it_depends_on_whether_anything_fuses(lower: str, rematerializes: bool) -> None:
    assert Policy(lower=lower).rematerializes == rematerializes
    assert (
        not Policy(lower=lower, recompute=None).rematerializes and Policy(lower=lower, recompute="cheap").rematerializes
    )


# Casts of a residual.


class RMSNorm(nn.Module):
    """In float32, as Llama's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.float()
        return self.weight * (whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Residual(nn.Module):
    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x.float().square().mean()


def cast(recompute: str | None) -> tuple[Program, int]:
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = replace(policy(recompute), precision=HALF)
    found, plan = stages(model, optimizer, None, (torch.ones(512, 32),), wanted)
    return found[-1], predict(found[-1], plan, Persistent()).peak.nbytes


def test_of_a_residual_that_is_cast_up_the_residual_is_kept() -> None:
    """Once, in its own dtype, where autograd keeps the norm's float32 copy of it."""
    (plain, high), (kept, low) = cast(None), cast("cheap")
    size = 512 * 32
    wide = [value for value in crossing(plain).values() if value.numel() == size and value.dtype == torch.float32]
    left = [value for value in crossing(kept).values() if value.numel() == size]
    assert len(wide) >= 4 and {value.dtype for value in left} == {torch.bfloat16}
    assert len(left) == 4  # the input, as it was given or cast, counts as the others do
    assert low <= high - 3 * size * 2
    assert heavy(kept) == heavy(plain)


def test_the_numbers_are_the_same_bits_where_a_residual_is_cast_up_again() -> None:
    policies = [Policy(lower="eager", recompute=recompute, precision=HALF) for recompute in (None, "cheap")]
    results = []
    for one in policies:
        torch.manual_seed(0)
        model = Residual(8)
        sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=one)
        losses = [sharded.step(torch.linspace(-1, 1, 32).view(4, 8)).item() for _ in range(3)]
        results.append((losses, [value.clone() for value in sharded.full_state_dict().values()]))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))
