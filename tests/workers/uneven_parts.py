"""Parts of different sizes along tp: 10 over 4, 41 over 2 and 4, 5 over 4, where the last rank has nothing.

torchrun --nproc-per-node 4 uneven_parts.py RESULT [CASE ...]
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import Sharded, compile_sharded
from tests.cut_models import (
    RANK,
    TIME,
    WIDTH,
    adamw,
    batch,
    compare,
    copies_equal,
    loss_fn,
    mean,
    ours,
    sgd,
    two_by_two,
    unsharded,
    whole,
)
from tests.launch import answer_all, told
from tests.toys import EAGER

warnings.filterwarnings("ignore")
CLASSES = 41  # of which batches have 40
STEPS = 3


class Uneven(nn.Module):
    """An embedding and a head of 41, tied, and layers of 10 and of 5."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.few, self.back = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.norm(x + self.back(F.silu(self.few(x)))))


def build(seed: int = 0) -> Uneven:
    torch.manual_seed(seed)
    return Uneven()


def cut(model: Uneven, tp: DeviceMesh, classes: bool = False) -> Uneven:
    out = Shard(-1) if classes else Replicate()
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(), "few": ColwiseParallel(use_local_output=False), "back": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=out, use_local_output=not classes),
    }  # fmt: skip
    parallelize_module(model, tp, plan)
    model.head.weight = model.tokens.weight
    return model


def one_by_four() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 4), mesh_dim_names=("shard", "tp"))


def made(mesh: DeviceMesh, make: Callable[[nn.Module], Any] = adamw, seed: int = 0, **options: Any) -> Sharded:
    classes = options.pop("classes", False)
    model = cut(build(seed), mesh["tp"], classes) if "tp" in (mesh.mesh_dim_names or ()) else build(seed)
    return compile_sharded(model, make(model), loss=loss_fn, mesh=mesh, policy=replace(EAGER, **options))


@functools.cache
def by_patterns() -> tuple[Sharded, Any]:
    """A whole model that is cut by patterns over two, AdamW; and what its training came to."""
    square, model = two_by_two(), build()
    styles = {"tokens": "embedding_rowwise", "head": "colwise_gather_output", "up": "colwise", "down": "rowwise"}
    styles |= {"few": "colwise", "back": "rowwise"}
    sharded = compile_sharded(model, adamw(model), loss=loss_fn, mesh=square, policy=replace(EAGER, tp=styles))
    return sharded, ours(sharded, square["shard"].get_local_rank())


def plain(mesh: DeviceMesh, make: Callable[[nn.Module], Any]) -> Any:
    """PyTorch alone with the same plan, on the batches of one row."""
    model = cut(build(), mesh["tp"])
    optimizer, losses = make(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model, *batch(step, 0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [], {name: whole(value) for name, value in model.state_dict().items()}


def fsdp2(mesh: DeviceMesh, row: int) -> Any:
    """FSDP2 over the data axis, with the same plan, and AdamW."""
    model = cut(build(), mesh["tp"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer, losses = adamw(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model, *batch(step, row))
        loss.backward()
        optimizer.step()
        losses.append(mean(loss.detach(), 2))
    return losses, [], {name: whole(value) for name, value in model.state_dict().items()}


def values() -> Any:
    """Beside PyTorch with the same plan, to the bit, and beside one process; AdamW and SGD, clipping, ZeRO-3 and 1."""
    four, square = one_by_four(), two_by_two()
    row = square["shard"].get_local_rank()
    found: dict[str, Any] = {}
    of_four = ours(made(four), 0)
    reference = build()
    found["plain"] = compare((of_four[0], [], of_four[2]), plain(four, adamw))
    found["eager"] = compare(of_four, unsharded(reference, adamw(reference), 1))
    mine = by_patterns()[1]
    found["fsdp2"] = compare((mine[0], [], mine[2]), fsdp2(square, row))
    sharded = made(square, sgd, clip=0.3, classes=True, shard="zero1")
    reference = build()
    found["clipped"] = compare(ours(sharded, row), unsharded(reference, sgd(reference), 2, clip=0.3))
    found["copies"] = copies_equal(sharded, square)
    found["plan"] = str(sharded.plan)
    reference = lost(build())
    found["control"] = compare(of_four, unsharded(reference, adamw(reference), 1))
    return found


def lost(model: Uneven) -> Uneven:
    """Without what the last of four ranks has: one of ten rows, and eight of 41."""
    with torch.no_grad():
        model.up.weight[9:], model.tokens.weight[33:] = 0, 0
    return model


def filled() -> Any:
    """A model on the meta device; one by patterns; the whole state both ways; a call without the loss."""
    square = two_by_two()
    with torch.device("meta"):
        model = cut(Uneven(), square["tp"])
    torch.manual_seed(7 + RANK)
    parts = compile_sharded(model, loss=loss_fn, mesh=square, policy=EAGER).full_state_dict()
    with torch.device("meta"):
        model = Uneven()
    torch.manual_seed(7 + RANK)
    all_ranks = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    wholes = compile_sharded(model, loss=loss_fn, mesh=all_ranks, policy=EAGER).full_state_dict()
    found: dict[str, Any] = {
        "meta": list(parts) == list(wholes) and all(map(torch.equal, parts.values(), wholes.values()))
    }
    row, mine = square["shard"].get_local_rank(), by_patterns()[1]
    reference = build()
    found["patterns"] = compare(mine, unsharded(reference, adamw(reference), 2))
    other = made(square, seed=1)
    other.load_full_state_dict(mine[2])
    again = other.full_state_dict()
    found["whole"] = all(torch.equal(again[name], value) for name, value in mine[2].items())
    logits = other(batch(0, row)[0])
    parameter = other.model.up.weight.full_tensor()
    if RANK == 0:
        found["logits"] = (logits - reference(batch(0, 0)[0])).abs().max().item()
        found["parameter"] = torch.equal(parameter, mine[2]["up.weight"]) and list(parameter.shape) == [10, WIDTH]
    return found


def checkpoints() -> Any:
    """2 x 2 saves, 1 x 4, 4 x 1 and 2 x 2 load, in our files and DCP's; weights exported."""
    folder = Path(sys.argv[1]).parent
    square, four = two_by_two(), one_by_four()
    alone = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    meshes = {"2 x 2": square, "1 x 4": four, "4 x 1": alone}
    sharded = by_patterns()[0]
    sharded.save(folder / "2 x 2", wait=True)
    dcp.save({"app": sharded}, checkpoint_id=folder / "dcp")
    sharded.export(folder / "export")
    expected = sharded.full_state_dict(), sharded.full_optimizer_state_dict()
    found: dict[str, Any] = {}

    def same(other: Sharded, state: bool = True) -> bool:
        weights, moments = other.full_state_dict(), other.full_optimizer_state_dict()
        if RANK != 0:
            return True
        pairs = [(weights[name], value) for name, value in expected[0].items()]
        for index, kept in expected[1]["state"].items() if state else ():
            pairs += [(torch.as_tensor(moments["state"][index][name]), torch.as_tensor(v)) for name, v in kept.items()]
        return len(pairs) > 5 and all(torch.equal(one, two) for one, two in pairs)

    for name, mesh in meshes.items():
        other = made(mesh, seed=1)
        found[f"{name} before"] = RANK == 0 and same(other) if RANK == 0 else same(other) and False
        other.load(folder / "2 x 2")
        found[f"to {name}"] = same(other)
        if name != "2 x 2":
            other.save(folder / name, wait=True)
            back = made(square, seed=2)
            back.load(folder / name)
            found[f"{name} and back"] = same(back)
        other = made(mesh, seed=1)
        dcp.load({"app": other}, checkpoint_id=folder / "dcp")
        found[f"dcp to {name}"] = same(other)
        other = made(mesh, seed=1)
        other.import_weights(folder / "export")
        found[f"export to {name}"] = same(other, state=False)
        if name == "2 x 2":
            ends = [t.isfinite().all().item() for t in other.state.parameters.values()]
            found["finite"] = all(ends)
    return found


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 8)
        self.down, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(F.gelu(self.up(self.tokens(tokens)))))


def refusals() -> Any:
    """What is not there: lengths that tp does not divide under sequence parallelism, plain parts of unknown sizes."""
    four = one_by_four()
    found: dict[str, str] = {}

    def sequence() -> None:
        torch.manual_seed(0)
        model = Lengths()
        plan = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }  # fmt: skip
        parallelize_module(model, four["tp"], plan)
        compile_sharded(model, sgd(model), loss=loss_fn, mesh=four, policy=EAGER).step(*batch(0, 0))

    def parts() -> None:
        model = build()
        parallelize_module(model, four["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        compile_sharded(model, sgd(model), loss=loss_fn, mesh=four, policy=EAGER).step(*batch(0, 0))

    assert TIME % 4
    found["sequence"], found["parts"] = told(sequence), told(parts)
    return found


def inductor() -> Any:
    four = one_by_four()
    return compare(ours(made(four, lower="inductor"), 0), ours(made(four), 0))


CASES = (values, filled, checkpoints, refusals)

if __name__ == "__main__":
    named = [case for case in (*CASES, inductor) if case.__name__ in sys.argv[2:]]
    answer_all(named or CASES, sys.argv[1])
    assert not dist.is_initialized()
