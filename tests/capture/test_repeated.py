"""What is inserted for a unit that is like an earlier one is what would be inserted for it by itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy
from fsdp_compiled.ir.edit import Edit, Insertion, Scope
from fsdp_compiled.ir.nodes import mutated
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Buffer
from tests import simulate
from tests.toys import squares


class Block(nn.Module):
    """Odd sizes, dims in another order, a parameter that is frozen, and one that nothing reads."""

    def __init__(self, width: int, frozen: bool = False, unread: bool = False) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, 5, bias=False), nn.LayerNorm(5)
        self.linear.weight.data = torch.randn(width, 5).t()
        self.norm.bias.requires_grad_(not frozen)
        self.scale = nn.Parameter(torch.ones(3))
        self.unread = unread

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x).relu())
        return x + y if self.unread else x + y * self.scale.sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds: list[dict[str, bool]] = [{}, {}, {"frozen": True}, {"unread": True}, {}, {"frozen": True}]
        self.layers, self.head = nn.ModuleList(Block(5, **kind) for kind in kinds), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def stages(policy: Policy, shard: int, kind: str = "step") -> tuple[Program, ...]:
    module = model()
    groups = [[one for one in module.parameters() if (one.dim() > 1) == matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.1)
    return simulate.stages(
        module, optimizer, squares, (torch.ones(2, 5),), policy, shard=shard, kind=kind, traced_as=__name__
    )[0]


def described(program: Program) -> list[Any]:
    """Its text, and all that is noted of its nodes."""

    def layouts(node: fx.Node) -> list[Any]:
        values = pytree.tree_leaves(node.meta.get("val"))
        return [(one.shape, one.stride(), one.dtype) for one in values if isinstance(one, torch.Tensor)]

    names = ("phase", "mark", "path", "parameter", "idle")
    noted = [(layouts(node), [node.meta.get(name) for name in names]) for node in program.graph.nodes]
    return [program.text(), program.ports, noted]


def by_itself(
    edit: Edit, key: Hashable, given: Sequence[fx.Node], of: Scope, make: Callable[[], Sequence[fx.Node]]
) -> Sequence[fx.Node]:
    return make()


POLICIES = {
    "zero3": Policy(lower="eager", bucket_mb=0, clip=1.0),
    "zero1": Policy(lower="eager", shard="zero1", bucket_mb=0),
    "several blocks a unit": Policy(lower="eager", bucket_mb=0.0003),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("shard", [1, 3])
def test_programs_are_those_of_units_made_by_themselves(name: str, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated: list[Scope] = []
    again = Insertion.again

    def counted(self: Insertion, graph: fx.Graph, given: Sequence[fx.Node], of: Scope, *rest: Any) -> list[fx.Node]:
        repeated.append(of)
        return again(self, graph, given, of, *rest)

    monkeypatch.setattr(Insertion, "again", counted)
    found = stages(POLICIES[name], shard)
    assert len(repeated) > 2
    monkeypatch.setattr(Edit, "again", by_itself)
    assert [described(one) for one in found] == [described(one) for one in stages(POLICIES[name], shard)]


def test_what_is_written_in_place_is_the_units_own() -> None:
    program = stages(POLICIES["zero3"], 2)[-1]
    written = [(node, targets[0]) for node in program.graph.nodes if (targets := mutated(node))]
    returned = [(node.meta["val"], target.meta["val"]) for node, target in written if node.meta["val"] is not None]
    assert len(returned) > 20 and all(value is target for value, target in returned)


def test_units_that_are_not_alike_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without what tells them apart, another program comes of it, or none."""
    wanted = described(stages(POLICIES["zero3"], 2)[-1])
    monkeypatch.setattr(Buffer, "lies", None)
    again = Edit.again
    monkeypatch.setattr(Edit, "again", lambda edit, key, *rest: again(edit, key[0], *rest))
    try:
        found = described(stages(POLICIES["zero3"], 2)[-1])
    except Exception:
        return
    assert found != wanted
