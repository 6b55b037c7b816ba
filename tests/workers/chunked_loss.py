"""A model with a head, its loss cut into slices and not; and on several ranks, beside eager PyTorch on all batches.

torchrun --nproc-per-node N chunked_loss.py RESULT
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compiled import Policy, chunked_cross_entropy, compile_sharded, fully_shard
from fsdp_compiled.distributed.device_mesh import connect
from fsdp_compiled.distributed.mesh import exchange
from tests.launch import answer, told


class Head(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.embed(tokens)))


class Whole(Head):
    """Returns the loss, cut into slices of so many rows."""

    rows: int | None = None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return uncut(self, tokens, targets) if self.rows is None else cut(self, tokens, targets, self.rows)


def plain(vocabulary: int, width: int, rows: int | None) -> Whole:
    model = Whole(vocabulary, width)
    model.rows = rows
    return model


def uncut(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(model.hidden(tokens)), targets)


def cut(model: Any, tokens: torch.Tensor, targets: torch.Tensor, rows: int) -> torch.Tensor:
    return chunked_cross_entropy(model.hidden(tokens), model.head.weight, targets, rows=rows)


def data(rows: int, vocabulary: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A third of the first half's targets do not count."""
    draw = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(vocabulary, (rows,), generator=draw) for _ in range(2))
    targets[: rows // 2 : 3] = -100
    return tokens, targets


def cut_head(world: int) -> str:
    """Each rank would have a part of the logits: refused, by name."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("shard", "tp"))
    model = Head(64, 8)
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sharded = compile_sharded(
        model, optimizer, loss=partial(cut, rows=16), mesh=mesh, policy=Policy(lower="eager")
    )  # fmt: skip
    said = told(lambda: sharded.step(*data(100, 64)))
    return "" if "A head that tensor parallelism cuts holds a part of the logits" in said else said


def main() -> dict[str, Any]:
    mesh = connect(None)
    batches = [data(100, 64, seed) for seed in range(mesh.world)]
    eager = plain(64, 8, None)
    optimizer = torch.optim.SGD(eager.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        for batch in batches:
            (eager(*batch) / mesh.world).backward()
        optimizer.step()
    wanted = eager.state_dict()
    faces = {}
    model: Any = Head(64, 8)
    policy = Policy(lower="eager")
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), lr=1.0), loss=partial(cut, rows=16), policy=policy
    )
    for _ in range(3):
        sharded.step(*batches[mesh.rank])
    faces["step"] = exchange(sharded.full_state_dict(), mesh)[0]
    by_policy = replace(policy, loss_rows=16)
    model = Head(64, 8)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), loss=uncut, policy=by_policy)
    for _ in range(3):
        sharded.step(*batches[mesh.rank])
    faces["step, by the policy"] = exchange(sharded.full_state_dict(), mesh)[0]
    for face, rows, chosen in (("", 16, policy), (", by the policy", None, by_policy)):
        model = plain(64, 8, rows)
        fully_shard(model, policy=chosen)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        for _ in range(3):
            optimizer.zero_grad()
            (0.5 * model(*batches[mesh.rank])).backward()  # a derivative by the loss that is not 1
            optimizer.step()
        faces[f"a loop of one's own{face}"] = {name: one.full_tensor() for name, one in model.named_parameters()}
    whole = {
        face: "".join(
            f"{name} is off by {float((value - wanted[name]).abs().max())} "
            for name, value in weights.items()
            if not torch.allclose(value, wanted[name], rtol=1e-6, atol=1e-6)
        )
        for face, weights in faces.items()
    }
    return whole | {"a head that is cut": cut_head(mesh.world)}


if __name__ == "__main__":
    answer(main)
