"""What two ranks are told of a model that was taken over, or is not to be: written by rank 0 as JSON.

torchrun --nproc-per-node 2 taken_over.py RESULT [zero3] [zero1] [ddp] [replicas]
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import Policy, compile_sharded
from tests import live_parameters as live
from tests.launch import answer, of_all, told
from tests.toys import squares

RANK = int(os.environ["RANK"])
XS = [torch.arange(12.0).reshape(3, 4) / 7 + rank for rank in range(2)]
X = XS[RANK]


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def refused_on_one(change: Callable[[nn.Sequential, torch.optim.Optimizer], Any]) -> dict[str, Any]:
    """Rank 1 does something to its model for which compile_sharded refuses it; both ranks then go on without it."""
    model, optimizer = build()
    squares(model, X).backward()
    optimizer.step()
    undo = change(model, optimizer) if RANK else None
    before = [parameter.tolist() for parameter in model.parameters()]
    error = told(lambda: compile_sharded(model, optimizer, loss=squares, policy=Policy(lower="eager")))
    same = before == [parameter.tolist() for parameter in model.parameters()]
    same &= all(type(parameter) is nn.Parameter for parameter in model.parameters())
    if undo is not None:
        undo()
    sharded = compile_sharded(model, optimizer, loss=squares, policy=Policy(lower="eager"))
    return {"error": error, "same": same, "finite": bool(sharded.step(X).isfinite())}


def hook(model: nn.Sequential, _: torch.optim.Optimizer) -> Callable[[], Any]:
    return model[2].weight.register_hook(lambda gradient: gradient * 3).remove


def age(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """State that differs inside a group."""
    step = optimizer.state[model[0].weight]["step"]
    step += 1
    return lambda: step.sub_(1)


def compared(**options: Any) -> list[str]:
    """All that `live_parameters` does, to a model in shards and to an eager one."""
    mesh = options.pop("mesh", None)
    model, optimizer = live.build()
    policy = Policy(lower="eager", **options)
    sharded = compile_sharded(model, optimizer, loss=live.loss, mesh=mesh, policy=policy)
    return live.compare(sharded, model, *live.build())


def of_each_rank() -> dict[str, Any]:
    """Batches that differ: gradients are means over ranks; draws that differ are rank 0's."""
    model, optimizer = build()
    plain, _ = build()
    compile_sharded(model, optimizer, loss=squares, policy=Policy(lower="eager"))
    squares(model, X).backward()
    sum(squares(plain, x) / 2 for x in XS).backward()  # type: ignore[union-attr]
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    same = [torch.allclose(one.grad.full_tensor(), other.grad, atol=1e-6) for one, other in pairs]  # type: ignore[union-attr, arg-type]
    torch.manual_seed(RANK)
    nn.init.normal_(model[0].weight)
    torch.manual_seed(0)
    nn.init.normal_(plain[0].weight)
    drawn = torch.equal(model[0].weight.full_tensor(), plain[0].weight)
    return {"same": all(same), "drawn": drawn, "elsewhere": not torch.allclose(plain[0].weight, plain[2].weight)}


def saved() -> dict[str, Any]:
    """The model's own state_dict, through `torch.distributed.checkpoint` and its state_dict functions."""
    model, optimizer = build()
    sharded = compile_sharded(model, optimizer, loss=squares, policy=Policy(lower="eager"))
    sharded.step(X)
    before = sharded.full_state_dict()
    folder = sys.argv[1] + ".dcp"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    full = not before or all(torch.equal(whole[name], value) for name, value in before.items())
    sharded.step(X)
    moved = sharded.full_state_dict()
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    after = sharded.full_state_dict()
    same = all(torch.equal(value, before[name]) for name, value in after.items())
    apart = not before or any(not torch.equal(value, before[name]) for name, value in moved.items())
    return {"full": full, "same": same, "apart": apart}


def written_alone(sharded: Any, model: nn.Sequential) -> dict[str, Any]:
    """Rank 1 writes to a parameter by itself; then rank 0 does so too."""
    sharded.step(X)
    weight = model[0].weight

    def halve() -> None:
        with torch.no_grad():
            weight.mul_(0.5)

    if RANK:
        halve()
    before = weight.to_local().clone()
    errors = [told(lambda: sharded.step(X)), told(lambda: sharded.save(sys.argv[1] + ".alone", wait=True))]
    same = torch.equal(weight.to_local(), before)
    if not RANK:
        halve()
    return {"errors": errors, "same": same, "finite": bool(sharded.step(X).isfinite())}


def loaded(sharded: Any, model: nn.Sequential, shard: str) -> bool:
    """What is loaded past the calls is no write of one rank alone."""
    first = sharded.step(X)
    folder = f"{sys.argv[1]}.{shard}"
    dcp.save({"model": model.state_dict(), "all": sharded.state_dict()}, checkpoint_id=folder)
    second = sharded.step(X)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    again = sharded.step(X)
    dcp.load({"all": (found := sharded.state_dict())}, checkpoint_id=folder)
    sharded.load_state_dict(found)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return bool(first != second) and torch.equal(second, again) and torch.equal(sharded.step(X), second)


def with_an_optimizer_of_ones_own() -> bool:
    """``value_and_grad``, clipping and an optimizer over the live parameters, beside the same in eager PyTorch."""
    model, plain = build()[0], build()[0]
    sharded = compile_sharded(model, loss=squares, policy=Policy(lower="eager"))
    pairs = [(one, torch.optim.AdamW(one.parameters(), lr=0.01)) for one in (model, plain)]
    for _ in range(3):
        sharded.value_and_grad(X)
        pairs[1][1].zero_grad()
        sum(squares(plain, x) / 2 for x in XS).backward()  # type: ignore[union-attr]
        for one, optimizer in pairs:
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
    return alike(model, plain)


def under_tp() -> bool:
    """Two ranks that hold parts of the same parameters, which are written and read, beside an eager model."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, (plain, other) = build()[0], build()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sharded = compile_sharded(model, optimizer, loss=squares, mesh=mesh, policy=Policy(lower="eager"))
    writes: list[Callable[[nn.Sequential], Any]] = [
        lambda m: m[0].weight.mul_(0.5),
        lambda m: m[2].weight.clamp_(-0.2, 0.2),
        lambda m: m[2].weight[1].fill_(0.25),
        lambda m: m[0].weight.copy_(torch.arange(16.0).view(4, 4) / 16),
        lambda m: m[0].bias.div_(m[2].weight.norm()),
        lambda m: m.load_state_dict(build()[0].state_dict()),
    ]
    good = True
    for write in writes:
        with torch.no_grad():
            write(model), write(plain)
            good &= torch.allclose(model(XS[0]), plain(XS[0]), atol=1e-6)
        other.zero_grad()
        expected = squares(plain, XS[0])
        expected.backward()
        other.step()
        good &= torch.allclose(sharded.step(XS[0]), expected, atol=1e-6) and alike(model, plain)
    return good


def alike(model: nn.Module, plain: nn.Module) -> bool:
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return all(torch.allclose(one.full_tensor(), other, atol=1e-6) for one, other in pairs)  # type: ignore[operator]


def gathered(sharded: Any, model: nn.Sequential, shard: str) -> dict[str, Any]:
    """Evaluation that gathers once: ranks make other numbers of calls, and what is left is trained on."""
    sharded.step(X)
    expected = sharded(X)
    held = model[0].weight
    with sharded.gathered() as whole:
        found = [one(X) for one in (whole, sharded, model) for _ in range(RANK + 1)]
        weights = {name: value.clone() for name, value in whole.state_dict().items()}
        errors = [told(lambda: sharded.step(X)), told(lambda: sharded.save(sys.argv[1] + ".inside"))]

    def writing() -> None:
        with sharded.gathered() as inside:
            if RANK or shard == "zero3":
                inside[0].weight.zero_()

    good = all(torch.equal(one, expected) and not one.requires_grad for one in found) and model[0].weight is held
    good &= all(torch.equal(weights[name], one.full_tensor()) for name, one in model.named_parameters())
    if shard == "zero3":
        errors.append(told(writing))
        good &= all(torch.equal(weights[name], one.full_tensor()) for name, one in model.named_parameters())
    plain, other = build()
    for _ in range(2):
        other.zero_grad()
        sum(squares(plain, x) / 2 for x in XS).backward()  # type: ignore[union-attr]
        other.step()
    sharded.step(X)
    return {"good": good and alike(model, plain), "errors": errors}


def refused() -> dict[str, str]:
    """What would be wrong in shards, in words."""
    model, optimizer = build()
    other, _ = build()
    sharded = compile_sharded(model, optimizer, loss=squares, policy=Policy(lower="eager"))
    weight = model[0].weight
    weight.square().sum().backward()
    left = told(lambda: sharded.step(X))
    model.zero_grad()

    def past(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (m(x) * weight.mean()).mean()

    def through(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(m(x)).mean()

    read = compile_sharded(other, loss=past, policy=Policy(lower="eager"))
    called = compile_sharded(build()[0], loss=through, policy=Policy(lower="eager"))
    return {
        "left": left,
        "a layer with gradients": told(lambda: model[0](X)),
        "pickle": told(lambda: pickle.dumps(model)),
        "numpy": told(lambda: weight.detach().numpy()),
        "half": told(model.half),
        "rows": told(lambda: weight.redistribute(placements=[Shard(0)])),
        "past the model": told(lambda: read.value_and_grad(X)),
        "through the model": told(lambda: called.value_and_grad(X)),
        "a copy": told(lambda: compile_sharded(copy.deepcopy(model), loss=squares)),
        "a collective": told(lambda: dist.all_reduce(weight.detach())),
        "transposed": told(lambda: weight.detach().t_()),
        "swapped": told(lambda: torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(4, 4)))),
        "one rank alone": told(lambda: weight.norm() if RANK else weight.sum()),
    }


LIVE: dict[str, dict[str, Any]] = {"zero3": {}, "zero1": {"shard": "zero1"}, "ddp": {"shard": "ddp"}}


def main(*ways: str) -> dict[str, list[Any]]:
    result = {"hook": refused_on_one(hook), "state": refused_on_one(age), "saved": saved(), "refused": refused()}
    for way in ways:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if way == "replicas" else None
        result[way] = compared(mesh=mesh, **LIVE.get(way, {}))
    result["ranks"] = of_each_rank()
    for shard in ("zero3", "ddp"):
        model, optimizer = build()
        sharded = compile_sharded(model, optimizer, loss=squares, policy=Policy(lower="eager", shard=shard))
        result[f"{shard} gathered"] = gathered(sharded, model, shard)
        result[f"{shard} loaded"] = loaded(sharded, model, shard)
        result[f"{shard} alone"] = written_alone(sharded, model)
    result["own optimizer"], result["tp"] = with_an_optimizer_of_ones_own(), under_tp()
    every = of_all(result)
    return {case: [one[case] for one in every] for case in result}


if __name__ == "__main__":
    answer(main)
