"""Checkpoints of a model that is cut along tp: some ranks save, others load; what is equal, written by rank 0 as JSON.

torchrun --nproc-per-node N tensor_parallel_checkpoints.py RESULT FOLDER save|load
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.checkpoint import loading
from fsdp_compiled.runtime.checkpoint.chunks import Place
from tests.cut_models import VOCABULARY, Net, loss_fn
from tests.launch import answer, of_all, told
from tests.parts import Seen, parts
from tests.workers.checkpoints import Count

warnings.filterwarnings("ignore")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ROWS, TIME, BEFORE, AFTER = 4, 6, 2, 3


class Counting(Net):
    """With a tie, and a buffer that each rank has for its own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.sum()
        return super().forward(tokens)


PARTS = Seen()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    vectors = [p for p in model.parameters() if p.dim() < 2]
    others = [p for p in model.parameters() if p.dim() >= 2]
    return torch.optim.AdamW([{"params": others}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)


def build(seed: int, mesh: DeviceMesh | None, **policy: Any) -> Sharded:
    torch.manual_seed(seed)
    model = Counting()
    if mesh is not None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        plan |= {"tokens": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], plan | {"head": ColwiseParallel(output_layouts=Replicate())})
        model.head.weight = model.tokens.weight
    options = Policy(lower="eager", **policy)
    with parts(PARTS):
        return compile_sharded(model, adamw(model), loss=loss_fn, mesh=mesh, units=["up", "down"], policy=options)


def batch(step: int) -> torch.Tensor:
    """Tokens and targets of all ranks, ``[2, ROWS, TIME]``."""
    return torch.randint(0, VOCABULARY, (2, ROWS, TIME), generator=torch.Generator().manual_seed(step))


def train(sharded: Sharded, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        mine = batch(step).chunk(sharded.plan.world, 1)[PARTS(sharded).programs.mesh.row]
        losses.append(sharded.step(*mine).item())
    return losses


Trained = tuple[dict[str, Any], dict[str, Any]]


def trained(sharded: Sharded) -> Trained:
    """Weights and the optimizer's state, whole, by name; on rank 0."""
    weights = sharded.full_state_dict()
    weights.pop("seen", None)  # other ranks have others
    return weights, sharded.full_optimizer_state_dict()


def equal(found: Trained, expected: Trained) -> bool:
    """Bit for bit; on ranks other than 0, which have nothing, true."""
    if RANK != 0:
        return True
    if list(found[0]) != list(expected[0]) or found[1]["param_groups"] != expected[1]["param_groups"]:
        return False
    if not all(torch.equal(found[0][name], value) for name, value in expected[0].items()):
        return False
    ours, theirs = found[1]["state"], expected[1]["state"]
    return ours.keys() == theirs.keys() and all(
        torch.equal(torch.as_tensor(ours[index][name]), torch.as_tensor(value))
        for index, kept in theirs.items()
        for name, value in kept.items()
    )


def eager() -> tuple[Trained, list[float]]:
    """Eager PyTorch on the batches of all ranks: what is saved, and the losses before and after."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = adamw(model)
    losses, found = [], None
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            weights = {name: value.clone() for name, value in model.state_dict().items() if name != "seen"}
            state = {
                index: {k: v.clone() for k, v in s.items()} for index, s in optimizer.state_dict()["state"].items()
            }
            found = weights, {"state": state}
        optimizer.zero_grad()
        loss = loss_fn(model, *batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found is not None
    return found, losses


def apart(one: Trained, other: Trained) -> float:
    """How far weights and moments are apart, of each tensor's largest number."""

    def far(a: torch.Tensor, b: torch.Tensor) -> float:
        return ((a - b).abs().max() / b.abs().max().clamp(min=1e-8)).item()

    rows = [far(one[0][name], value) for name, value in other[0].items()]
    for index, kept in other[1]["state"].items():
        rows += [far(torch.as_tensor(one[1]["state"][index][name]).float(), value) for name, value in kept.items()]
    return max(rows)


def swapped(mesh: Mesh) -> Place:
    """As if ranks along tp had each other's parts."""
    return Place(mesh.shard_rank, mesh.tp - 1 - mesh.tp_rank)


def along_tp(value: Any, mesh: DeviceMesh) -> bool:
    """Whether ranks along tp have the same."""
    found = of_all(value, group=mesh["tp"].get_group())
    return all(one == found[0] for one in found)


def save(folder: Path) -> dict[str, Any]:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    all_tp = init_device_mesh("cpu", (1, 4), mesh_dim_names=("shard", "tp"))
    no_tp = init_device_mesh("cpu", (4, 1), mesh_dim_names=("shard", "tp"))
    row = square["shard"].get_local_rank()
    sharded = build(0, square)
    before = train(sharded, 0, BEFORE)
    torch.manual_seed(100 + row)
    future = sharded.save(folder, extra={"all": Count(7), "row": Count(row), "rank": Count(RANK)})
    expected, drawn, seen = trained(sharded), torch.get_rng_state(), sharded.model.seen.item()
    dcp.save({"app": sharded}, checkpoint_id=folder / "dcp")
    sharded.export(folder / "export")
    losses = train(sharded, BEFORE, BEFORE + AFTER)
    future.result()
    found: dict[str, Any] = {}
    if RANK == 0:
        torch.save(expected, folder / "expected.pt")
        (folder / "losses.json").write_text(json.dumps(losses))
        plain, theirs = eager()
        found["eager"] = apart(expected, plain), max(abs(a - b) for a, b in zip([*before, *losses], theirs))
    dist.barrier()

    found["control"] = equal(trained(sharded), expected)  # it has gone on
    own, rank = Count(-1), Count(-1)
    sharded.load(folder, extra={"row": own, "rank": rank})
    found["random"] = torch.equal(torch.get_rng_state(), drawn)
    found["own"] = (own.value, rank.value, sharded.model.seen.item()) == (row, RANK, seen)
    found["same mesh"] = equal(trained(sharded), expected)
    found["bit for bit"] = train(sharded, BEFORE, BEFORE + AFTER) == losses
    again = build(1, square)
    with mock.patch.object(loading, "place_of", swapped):
        again.load(folder)
    found["other parts"] = equal(trained(again), expected)

    for name, mesh in (("1 x 4", all_tp), ("4 x 1", no_tp)):
        other = build(2, mesh)
        torch.manual_seed(RANK)
        other.load(folder)
        drawn = torch.get_rng_state()
        found[name] = equal(trained(other), expected) and along_tp((drawn.tolist(), other.model.seen.item()), mesh)
        found[f"{name} refused"] = told(lambda other=other: other.load(folder, extra={"row": Count(0)}))  # type: ignore[misc]
        other.save(folder / name, wait=True)
        if name == "1 x 4":
            found["far"] = far(train(other, BEFORE, BEFORE + AFTER), losses)
            four = build(3, no_tp)
            four.load(folder / "1 x 4")
            found["1 x 4 -> 4 x 1"] = equal(trained(four), expected)
            other = build(3, mesh)
            dcp.load({"app": other}, checkpoint_id=folder / "dcp")
            found["dcp"] = equal(trained(other), expected)
            other = build(3, mesh)
            other.import_weights(folder / "export")
            weights = other.full_state_dict()
            found["export"] = RANK != 0 or all(torch.equal(weights[key], value) for key, value in expected[0].items())
    again.load(folder / "4 x 1")
    found["4 x 1 -> 2 x 2"] = equal(trained(again), expected)
    whole = build(3, square)
    whole.load_full_state_dict(again.full_state_dict())
    whole.load_full_optimizer_state_dict(expected[1])
    found["whole"] = equal(trained(whole), expected)

    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
    other = build(3, replicas, shard="zero1", bucket_mb=0)
    other.load(folder)
    found["replicas"] = equal(trained(other), expected)
    other.save(folder / "replicas", wait=True)
    dcp.save({"app": other}, checkpoint_id=folder / "dcp of replicas")
    return found


def far(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, expected))


def load(folder: Path) -> dict[str, Any]:
    """On ranks without tp, or one process."""
    expected: Trained = torch.load(folder / "expected.pt", weights_only=True)
    losses = json.loads((folder / "losses.json").read_text())
    sharded = build(1, None)
    found: dict[str, Any] = {"control": equal(trained(sharded), expected)}
    own = Count(-1)
    found["step"] = sharded.load(folder, extra={"row": own} if WORLD == 2 else {})
    found["own"] = own.value
    found["equal"] = equal(trained(sharded), expected)
    sharded.load(folder / "replicas")
    found["replicas"] = equal(trained(sharded), expected)
    for name in ("dcp", "dcp of replicas"):
        other = build(2, None)
        dcp.load({"app": other}, checkpoint_id=folder / name)
        found[name] = equal(trained(other), expected)
    other.import_weights(folder / "export")
    weights = other.full_state_dict()
    found["export"] = RANK != 0 or all(torch.equal(weights[key], value) for key, value in expected[0].items())
    found["far"] = far(train(sharded, BEFORE, BEFORE + AFTER), losses)
    return found


def main(folder: str, what: str) -> list[Any]:
    return of_all({"save": save, "load": load}[what](Path(folder)))


if __name__ == "__main__":
    answer(main)
