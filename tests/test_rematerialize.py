"""Cheap values are made again in backward: the same numbers, less kept, and nothing expensive run twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import fx, nn

from fsdp_compiled import Policy, Program
from fsdp_compiled.analysis.memory import Persistent
from fsdp_compiled.analysis.peak_memory import predict
from fsdp_compiled.ir.nodes import is_random
from tests import models
from tests.chosen import examples
from tests.models import Recipe
from tests.recipes import trained
from tests.simulate import stages

aten = torch.ops.aten


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
