"""What a person may do around an optimizer of whole matrices, on several ranks: as eager PyTorch, or refused on all.

torchrun --nproc-per-node N whole_matrices_edges.py RESULT FOLDER
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.distributed.device_mesh import connect
from fsdp_compiled.distributed.mesh import exchange
from tests.launch import answer, told
from tests.matrices import Matrices, batches, loss
from tests.workers.whole_matrices import RANK, WORLD, gradients, muon, part, worst

EAGER = Policy(lower="eager")
OFF = 1e-6 if WORLD == 2 else 2e-3  # sums of three in another order; Newton-Schulz in bfloat16 makes more of it


class One(nn.Module):
    """A single matrix: all ranks but one own nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.mix


class Tied(Matrices):
    """Two layers that share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].up.weight = self.layers[0].up.weight  # type: ignore[union-attr]


def pair(model: nn.Module) -> list[optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [optim.Muon(matrices, lr=0.02), optim.AdamW(rest, lr=0.01)]


def single(model: nn.Module) -> list[optim.Optimizer]:
    return [muon(model)]


def beside(
    make: Callable[[], nn.Module],
    optimizers: Callable[[nn.Module], list[optim.Optimizer]] = single,
    policy: Policy = EAGER,
) -> str:
    """Four steps, as eager PyTorch makes them of the mean gradient."""
    eager, model = make(), make()
    theirs = optimizers(eager)
    sharded = compile_sharded(model, optimizers(model), loss=loss, policy=policy)
    for batch in batches(4):
        sharded.step(part(batch))
        gradients(eager, batch)
        if policy.clip is not None:
            nn.utils.clip_grad_norm_(eager.parameters(), policy.clip)
        for one in theirs:
            one.step()
    off, moved = worst(sharded, eager), worst(sharded, make())
    if RANK == 0 and moved < 0.01:
        return "nothing moved"  # control
    return f"off by {off}" if off > OFF else ""


def everywhere(mine: str) -> str:
    """What any rank has to say."""
    return " ".join(f"rank {rank}: {one}" for rank, one in enumerate(exchange(mine, connect(None))) if one)


def overflow_on_one_rank() -> str:
    """No rank updates, what is kept stays, and the next step is that of a model that never saw this batch."""
    eager, model = Matrices(), Matrices()
    theirs = muon(eager)
    sharded = compile_sharded(
        model, muon(model), loss=loss, policy=Policy(lower="eager", loss_scale="dynamic")
    )  # fmt: skip
    for index, batch in enumerate(batches(4)):
        if index == 2:
            before = {key: value.clone() for key, value in sharded.state.optimizer.items()}
            sharded.step(part(batch) * (float("inf") if RANK == WORLD - 1 else 1.0))
            same = all(torch.equal(value, sharded.state.optimizer[key]) for key, value in before.items())
            if not same or sharded.overflows != 1:
                return f"{sharded.overflows} overflows, state is the same: {same}"
            continue
        sharded.step(part(batch))
        gradients(eager, batch)
        theirs.step()
    off = worst(sharded, eager)
    return f"off by {off}" if off > OFF else ""


def changed_on_one_rank() -> str:
    """An option that one rank's script alone changes is an error on all; no rank writes weights, and all go on."""
    model = Matrices()
    optimizer = muon(model)
    sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER)
    data = part(next(batches(1)))
    sharded.step(data)
    (group,), found = optimizer.param_groups, []
    for name, value in (("lr", 0.05), ("nesterov", False), ("adjust_lr_fn", "match_rms_adamw")):
        before = {key: shard.clone() for key, shard in sharded.state.parameters.items()}
        usual = group[name]
        group[name] = value if RANK == 1 else usual
        said = told(lambda: sharded.step(data))
        group[name] = usual
        same = all(torch.equal(shard, before[key]) for key, shard in sharded.state.parameters.items())
        if "Error" not in said or not same:
            found.append(f"{name}: {said}, {same}")
        sharded.step(data)
    return " ".join(found)


def low_precision() -> str:
    """The next forward pass computes with what the owners sent back."""
    model = Matrices()
    policy = Policy(lower="eager", precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    sharded = compile_sharded(model, muon(model), loss=loss, policy=policy)
    data = next(batches(1))
    for _ in range(2):
        sharded.step(part(data))
        plain = Matrices()
        weights = exchange(sharded.full_state_dict(), connect(None))[0]
        plain.load_state_dict(weights)
        mine, theirs = sharded(part(data)), plain.to(torch.bfloat16)(part(data).bfloat16())
        if not torch.allclose(mine.float(), theirs.float(), atol=0.05):
            return f"off by {(mine.float() - theirs.float()).abs().max()}"
    return ""


def tensor_parallel() -> str:
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("shard", "tp"))
    model = Matrices()
    parallelize_module(model.layers[0], mesh["tp"], {"up": ColwiseParallel()})
    said = told(lambda: compile_sharded(model, muon(model), loss=loss, mesh=mesh, policy=EAGER))
    return "" if "ValueError" in said and "Muon" in said and "tensor parallelism" in said else said


def save(folder: Path) -> None:
    """Two steps, saved; and what two more come to."""
    model = Matrices(bias=True)
    sharded = compile_sharded(model, pair(model), loss=loss, policy=EAGER)
    for batch in list(batches(4))[:2]:
        sharded.step(part(batch))
    sharded.save(folder, wait=True)
    dcp.save({"app": sharded}, checkpoint_id=folder / "dcp")
    whole = sharded.full_state_dict(), sharded.full_optimizer_state_dict()
    if RANK == 0:
        torch.save(whole, folder / "whole.pt")
    for batch in list(batches(4))[2:]:
        sharded.step(part(batch))
    if weights := sharded.full_state_dict():
        torch.save(weights, folder / "weights.pt")


@functools.cache
def again() -> Any:
    """What checkpoints are loaded into, one after another."""
    model = Matrices(bias=True)
    return compile_sharded(model, pair(model), loss=loss, policy=EAGER)


def loaded(folder: Path, way: str = "load", least: float = 0.0, most: float = 2e-3) -> str:
    """Of what other ranks owned, these go on: how far off they come.

    ``way``: ``"whole"``: from rank 0's dictionaries, in PyTorch's own form; ``"weights"``: from its weights alone.
    """
    sharded = again()
    if way == "dcp":
        dcp.load({"app": sharded}, checkpoint_id=folder / "dcp")
    elif way in ("whole", "weights"):
        weights, kept = torch.load(folder / "whole.pt") if RANK == 0 else ({}, {})
        sharded.load_full_state_dict(weights)
    if way == "whole":
        sharded.load_full_optimizer_state_dict(kept)
        found = sharded.full_optimizer_state_dict()
        if str(found) != str(kept):
            return f"{found}, not {kept}"
    if way == "load" and sharded.load(folder) != 2:
        return "nothing was loaded"
    for batch in list(batches(4))[2:]:
        sharded.step(part(batch))
    found = sharded.full_state_dict()
    wanted = torch.load(folder / "weights.pt") if found else {}
    off = max((float((found[name] - value).abs().max()) for name, value in wanted.items()), default=least)
    return f"off by {off}" if not least <= off <= most else ""


def main(folder: str) -> dict[str, Any]:
    places = {world: Path(folder, str(world)) for world in (2, 3)}
    save(places[WORLD])
    cases: dict[str, Callable[[], str]] = {
        "one matrix": lambda: beside(One),
        "two optimizers": lambda: beside(lambda: Matrices(bias=True), pair),
    }
    if WORLD == 2:
        cases = {
            "overflow": overflow_on_one_rank,
            "clipped": lambda: beside(Matrices, policy=Policy(lower="eager", clip=0.05)),
            "options of one rank": changed_on_one_rank,
            "tied": lambda: beside(Tied),
            "two optimizers, zero1": lambda: beside(lambda: Matrices(bias=True), pair, Policy("zero1", lower="eager")),
            "low precision": low_precision,
            "tensor parallelism": tensor_parallel,
        }
    if places[5 - WORLD].exists():
        # First, into what has made no step.
        cases["control: without momentum"] = lambda: loaded(places[WORLD], "weights", least=0.01, most=1.0)
        cases["from another world"] = lambda: loaded(places[5 - WORLD])
        cases["from another world's dictionaries"] = lambda: loaded(places[5 - WORLD], "whole")
        cases["from its own dictionaries"] = lambda: loaded(places[WORLD], "whole")
        cases["from another world, by DCP"] = lambda: loaded(places[5 - WORLD], "dcp")
        cases["from its own, by DCP"] = lambda: loaded(places[WORLD], "dcp", most=0.0)
    return {name: everywhere(case()) for name, case in cases.items()}


if __name__ == "__main__":
    answer(main)
