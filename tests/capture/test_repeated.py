"""What passes insert for units that are alike: tensors of their own."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_compiled import Policy
from fsdp_compiled.ir.nodes import mutated
from fsdp_compiled.ir.program import Program
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


def test_what_is_written_in_place_is_the_units_own() -> None:
    program = stages(Policy(lower="eager", bucket_mb=0, clip=1.0), 2)[-1]
    written = [(node, targets[0]) for node in program.graph.nodes if (targets := mutated(node))]
    returned = [(node.meta["val"], target.meta["val"]) for node, target in written if node.meta["val"] is not None]
    assert len(returned) > 20 and all(value is target for value, target in returned)
