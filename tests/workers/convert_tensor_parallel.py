"""`convert` with tensor parallelism: checkpoints of FSDP2 on 2 x 2 ranks to ours and back, and ours to weights.

torchrun --nproc-per-node 4 convert_tensor_parallel.py RESULT FOLDER
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.runtime.checkpoint.convert import convert
from tests.launch import answer, of_all
from tests.toys import squares

RANK = int(os.environ.get("RANK", 0))
STEPS, AFTER, WIDTH, ROWS = 2, 3, 8, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.inner(x))))  # type: ignore[no-any-return]


def build(seed: int, mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    if mesh is not None:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, optimizer_of(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    vectors = [p for p in model.parameters() if p.dim() < 2]
    others = [p for p in model.parameters() if p.dim() >= 2]
    return torch.optim.AdamW([{"params": others}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)


def ours(seed: int, mesh: DeviceMesh | None) -> Sharded:
    model, optimizer = build(seed, mesh)
    return compile_sharded(model, optimizer, loss=squares, mesh=mesh, policy=Policy(lower="eager"))


def theirs(seed: int, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = build(seed, mesh)
    fully_shard(model.up, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, optimizer_of(model)


def batch(step: int, mesh: DeviceMesh) -> torch.Tensor:
    whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole.chunk(mesh["shard"].size())[mesh["shard"].get_local_rank()]


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, mesh: DeviceMesh) -> float:
    optimizer.zero_grad()
    loss = squares(model, x)
    loss.backward()
    optimizer.step()
    loss = loss.detach().clone()
    dist.all_reduce(loss, dist.ReduceOp.AVG, group=mesh["shard"].get_group())
    return loss.item()


def on_first(source: Path, target: Path, to: Any) -> None:
    if RANK == 0:
        convert(source, target, to)
    dist.barrier()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    found = {name: value.detach() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}
    return {name: value.clone() for name, value in whole.items()}


def equal(sharded: Sharded, expected: dict[str, torch.Tensor]) -> bool:
    """On rank 0, bit for bit."""
    weights, state = sharded.full_state_dict(), sharded.full_optimizer_state_dict()
    if RANK != 0:
        return True
    assert sharded.optimizer is not None
    names = [parameter._sharded_name for group in sharded.optimizer.param_groups for parameter in group["params"]]
    moments = {f"{names[index]}.{key}": v for index, kept in state["state"].items() for key, v in kept.items()}
    found = {**weights, **moments}
    return found.keys() == expected.keys() and all(
        torch.equal(torch.as_tensor(found[name]), value) for name, value in expected.items()
    )


def main(place: str) -> list[Any]:
    warnings.filterwarnings("ignore")
    folder, found = Path(place), {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model, optimizer = theirs(0, mesh)
    for step in range(STEPS):
        eager_step(model, optimizer, batch(step, mesh), mesh)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "fsdp2")
    expected = state_of(model, optimizer)
    losses = [eager_step(model, optimizer, batch(STEPS + step, mesh), mesh) for step in range(AFTER)]

    on_first(folder / "fsdp2", folder / "ours", "ours")
    sharded = ours(1, mesh)
    found["control"] = equal(sharded, expected)
    found["step"] = sharded.load(folder / "ours") == STEPS
    found["theirs to ours"] = equal(sharded, expected)
    sharded.save(folder / "tp", wait=True, step=STEPS)
    mine = [sharded.step(batch(STEPS + step, mesh)).item() for step in range(AFTER)]
    found["goes on"] = max(abs(a - b) for a, b in zip(mine, losses)) < 1e-6

    on_first(folder / "tp", folder / "dcp", "dcp")
    other, again = theirs(2, mesh)
    weights, state = get_state_dict(other, again)
    given = {"model": weights, "optim": state}
    dcp.load(given, checkpoint_id=folder / "dcp")
    set_state_dict(other, again, model_state_dict=given["model"], optim_state_dict=given["optim"])
    back = state_of(other, again)
    found["ours to theirs"] = all(torch.equal(back[name], value) for name, value in expected.items())
    found["they go on"] = [eager_step(other, again, batch(STEPS + step, mesh), mesh) for step in range(AFTER)] == losses

    on_first(folder / "tp", folder / "hf", "hf")
    on_first(folder / "dcp", folder / "again", "ours")
    square = ours(3, init_device_mesh("cpu", (1, 4), mesh_dim_names=("shard", "tp")))
    square.load(folder / "again")
    found["there and back, 1 x 4"] = equal(square, expected)
    if RANK == 0:
        torch.save({name: expected[name] for name, _ in Net().named_parameters()}, folder / "expected.pt")
    return of_all(found)


if __name__ == "__main__":
    answer(main)
