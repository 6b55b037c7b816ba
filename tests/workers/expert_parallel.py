"""Experts that ranks along tp have some of each, and tokens that are sent to them, on 2 x 2 and 1 x 4 ranks.

torchrun --nproc-per-node 4 expert_parallel.py RESULT [CASE ...]; 2 ranks, as 1 x 2: what is refused on as few
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.ir.nodes import is_collective
from tests.cut_models import (
    VOCABULARY,
    WIDTH,
    adamw,
    compare,
    copies_equal,
    loss_fn,
    ours,
    sgd,
    two_by_two,
    unsharded,
)
from tests.launch import answer_all, told
from tests.toys import EAGER

warnings.filterwarnings("ignore")
EXPERTS, CHOSEN = 8, 2


class Experts(nn.Module):
    """A mixture of eight experts, two for each token, which has room in each: no token is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.tp: DeviceMesh | None = None
        self.way = "right"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, width]``, on each rank along tp the same, of which it routes its own part."""
        if self.tp is None:
            return self.sent(x, self.router(x), self.up, self.down)
        own = DTensor.from_local(x, self.tp, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])
        scores = self.router(own.to_local()) if self.way == "router" else self.router(own).to_local()
        weights = scores, self.up.to_local(), self.down.to_local()  # type: ignore[operator]
        y = DTensor.from_local(self.sent(own.to_local(), *weights), self.tp, [Shard(0)], run_check=False)
        return y.redistribute(placements=[Replicate()]).to_local()

    def sent(self, x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        tokens = len(x)
        chosen = scores.topk(CHOSEN, -1).indices
        share = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * scores.softmax(-1)  # [tokens, experts]
        # Each token has a place of its own in every expert's row: [experts, room, width].
        y = self.exchange(torch.where(share.T[:, :, None] > 0, x[None], 0))
        y = y.unflatten(0, (-1, len(up))).transpose(0, 1).flatten(1, 2)  # [own experts, ranks * room, width]
        y = torch.bmm(F.silu(torch.bmm(y, up)), down)
        y = self.exchange(y.unflatten(1, (-1, tokens)).transpose(0, 1).flatten(0, 1).contiguous())
        return (y * share.T[:, :, None]).sum(0)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp is None or self.way == "kept":
            return x
        group: Any = self.tp
        if self.way == "other group":
            group = OTHER[0]
        splits = None
        if self.way == "unequal":
            splits = [len(x) - 1, 1] if self.tp.size() == 2 else [len(x) - 3, 1, 1, 1]
        if self.way == "distributed.nn":
            return all_to_all_single(torch.empty_like(x), x, group=self.tp.get_group())
        return funcol.all_to_all_single_autograd(x, splits, splits, group)


OTHER: list[Any] = []  # groups that are no axis of the mesh


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.experts = nn.Embedding(VOCABULARY, WIDTH), Experts()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        return self.head(x + self.experts(x.flatten(0, 1)).view_as(x))


def build(tp: DeviceMesh | None, way: str = "right") -> Mixture:
    torch.manual_seed(0)
    model = Mixture()
    if tp is not None:
        experts = model.experts
        experts.tp, experts.way = tp, way
        if way != "router":
            distribute_module(experts.router, tp)
        for name in ("up", "down"):
            setattr(experts, name, nn.Parameter(distribute_tensor(getattr(experts, name).detach(), tp, [Shard(0)])))
    return model


def trained(mesh: DeviceMesh, make: Any, way: str = "right", policy: Policy = EAGER) -> Any:
    model = build(mesh["tp"], way)
    sharded = compile_sharded(model, make(model), loss=loss_fn, mesh=mesh, policy=policy)
    return sharded, ours(sharded, mesh["shard"].get_local_rank())


def values() -> Any:
    """Beside one process: AdamW under ZeRO-3 on 2 x 2, SGD on 1 x 4; with tokens that stay where they are."""
    square, four = two_by_two(), init_device_mesh("cpu", (1, 4), mesh_dim_names=("shard", "tp"))
    found: dict[str, Any] = {}
    for name, mesh, make in (("2 x 2", square, adamw), ("1 x 4", four, sgd)):
        sharded, mine = trained(mesh, make)
        reference = build(None)
        found[name] = compare(mine, unsharded(reference, make(reference), mesh["shard"].size()))
        found[f"{name} copies"] = copies_equal(sharded, mesh)
        nodes = [node for node in sharded.program.graph.nodes if node.op == "call_function" and is_collective(node)]
        found[f"{name} counts"] = Counter(
            f"{str(node.target).split('.')[1].removesuffix('_')} {node.args[-1]}" for node in nodes
        )
    reference = build(None)
    found["control"] = compare(trained(four, sgd, "kept")[1], unsharded(reference, sgd(reference), 1))
    found["program"] = str(sharded.program)
    return found


def other_group() -> Any:
    OTHER.append(dist.new_group([0, 1, 2, 3]))
    return {"other group": told(lambda: trained(two_by_two(), sgd, "other group"))}


def refusals() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    ways = "router", "unequal", "distributed.nn"
    return {way: told(lambda way=way: trained(mesh, sgd, way)) for way in ways}  # type: ignore[misc]


def inductor() -> Any:
    square = two_by_two()
    return compare(trained(square, sgd, policy=replace(EAGER, lower="inductor"))[1], trained(square, sgd)[1])


if __name__ == "__main__":
    named = [case for case in (inductor,) if case.__name__ in sys.argv[2:]]
    answer_all(named or {"2": (refusals,), "4": (values, other_group)}[os.environ["WORLD_SIZE"]], sys.argv[1])
