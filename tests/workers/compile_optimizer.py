"""Loops whose update is one program (`compile_optimizer`), beside FSDP2 with the optimizer itself, on two ranks.

torchrun --nproc-per-node 2 compile_optimizer.py RESULT
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_compiled as ours
from fsdp_compiled.runtime.loop import loop_optimizer
from tests.launch import told, write_for_all
from tests.loops import GPT, different, full, gpt, loss_of
from tests.standin import StandIn

ran: list[bool | str | int] = []  # of each step, whether the program made it, and why not


def compiled(api: Any, model: nn.Module, optimizer: Any, max_norm: float | None = None) -> Any:
    return optimizer if api is theirs else ours.compile_optimizer(model, optimizer, max_norm=max_norm)


def by_dims(model: nn.Module) -> list[dict[str, Any]]:
    wide = [one for one in model.parameters() if one.ndim >= 2]
    return [{"params": wide, "weight_decay": 0.1},
            {"params": [one for one in model.parameters() if one.ndim < 2], "lr": 0.02}]  # fmt: skip


def left(model: nn.Module, optimizer: Any) -> list[Any]:
    """Weights, and state by parameter, by name."""
    found: list[Any] = [full(one) for one in model.parameters()]
    for one in model.parameters():
        state = optimizer.state[one]
        found += [full(state[name]) for name in sorted(state) if state[name] is not None]
    return found


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def groups(api: Any) -> Any:
    """Rates that a schedule moves, of two groups; a decay that is changed; a tied weight."""
    model = gpt(api, tie=True)
    optimizer = compiled(api, model, torch.optim.AdamW(by_dims(model), lr=1e-2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for step in range(4):
        steps(model, optimizer, step, step + 1)
        schedule.step()
        if step == 2:
            optimizer.param_groups[0]["weight_decay"] = 0.3
    return left(model, optimizer)


def cycle(api: Any) -> Any:
    """Rate and betas that a schedule moves."""
    model = gpt(api)
    optimizer = compiled(api, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 8)
    for step in range(6):
        steps(model, optimizer, step, step + 1)
        schedule.step()
    return left(model, optimizer)


def momentum(api: Any) -> Any:
    """Gradients that add up in place, others that the loop puts there, and a closure."""
    model = gpt(api)
    optimizer = compiled(api, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    loss_of(model, 7).backward()
    for one in model.parameters():
        one.grad = one.grad * 2
    optimizer.step()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 8)
        loss.backward()
        return loss

    return [optimizer.step(closure).detach(), *left(model, optimizer)]


def saved(api: Any) -> Any:
    """State that is saved, loaded into another, and continued with; both ways between compiled and not."""
    model = gpt(api)
    first = compiled(api, model, torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True))
    steps(model, first, 0, 2)
    state = copy.deepcopy(first.state_dict())
    second = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    second.load_state_dict(state)
    steps(model, second, 2, 3)
    third = compiled(api, model, second)
    steps(model, third, 3, 4)
    third.load_state_dict(copy.deepcopy(third.state_dict()))
    steps(model, third, 4, 5)
    named = dcp_state.get_optimizer_state_dict(model, third)
    dcp_state.set_optimizer_state_dict(model, third, named)
    steps(model, third, 5, 6)
    return left(model, third)


def missing(api: Any) -> Any:
    """A parameter without a gradient at one step, after which its count is another."""
    model = gpt(api)
    optimizer = compiled(api, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(4):
        loss_of(model, step).backward()
        if step == 1:
            model.head.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return left(model, optimizer)


def scaler(api: Any) -> Any:
    """GradScaler, with an overflow."""
    model = gpt(api)
    optimizer = compiled(api, model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=api is ours))
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        loss = loss_of(model, step) * (float("inf") if step == 1 else 1.0)
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
    return [scale.get_scale(), *left(model, optimizer)]


def clipped(api: Any) -> Any:
    """Also at a step that the program is not for."""
    model = gpt(api)
    optimizer = compiled(api, model, torch.optim.SGD(model.parameters(), lr=0.1), 0.05)
    norms = []
    for step in range(4):
        loss_of(model, step).backward()
        if step == 2:
            model.head.weight.grad = None
        if api is theirs:
            norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        if api is not theirs:
            norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return [*norms, *left(model, optimizer)]


def written(api: Any) -> Any:
    """State that the loop writes: a momentum that is halved, and counts that begin anew."""
    model = gpt(api)
    optimizer = compiled(api, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    steps(model, optimizer, 0, 2)
    for one in model.parameters():
        optimizer.state[one]["exp_avg"].mul_(0.5)
        optimizer.state[one]["step"].fill_(1)
    steps(model, optimizer, 2, 3)
    optimizer.state[model.head.weight].clear()
    steps(model, optimizer, 3, 4)
    optimizer.state.clear()
    steps(model, optimizer, 4, 5)
    return left(model, optimizer)


def hybrid(api: Any) -> Any:
    """Whole shards on both ranks, whose gradients are all-reduced."""
    model = gpt(api, {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))})
    optimizer = compiled(api, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    steps(model, optimizer, 0, 3)
    return left(model, optimizer)


def inductor(api: Any) -> Any:
    """Compiled, clipped."""
    model = gpt(api, {} if api is theirs else {"policy": ours.Policy(lower="inductor", cuda_graph=False)})
    optimizer = compiled(api, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0.05)
    for step in range(2):
        loss_of(model, step).backward()
        if api is theirs:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return left(model, optimizer)


def graphed(api: Any) -> Any:
    """Launched as a graph on a stand-in for a GPU, clipped, with another rate in each step."""
    model = gpt(api)
    if api is theirs:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        device = StandIn()
        with mock.patch.object(loop_optimizer, "make_device", lambda *_: device):
            optimizer = compiled(api, model, torch.optim.AdamW(model.parameters(), lr=1e-2), 0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, 10)
    for step in range(6):
        loss_of(model, step).backward()
        if api is theirs:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if api is not theirs:
        ran[:] = [device.log.count(what) for what in ("capture", "launch")]
    return left(model, optimizer)


def broken(api: Any) -> Any:
    """Another rate under this package: what must be told apart."""
    model = gpt(api)
    rate = 1e-2 if api is theirs else 1.00001e-2
    optimizer = compiled(api, model, torch.optim.AdamW(model.parameters(), lr=rate))
    steps(model, optimizer, 0, 3)
    return left(model, optimizer)


def refused() -> list[str]:
    model, other = gpt(ours), gpt(ours)
    adamw = torch.optim.AdamW(model.parameters())
    done = ours.compile_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    done.step()
    return [
        told(lambda: ours.compile_optimizer(GPT(), adamw)),
        told(lambda: ours.compile_optimizer(other, adamw)),
        told(lambda: ours.compile_optimizer(model, torch.optim.LBFGS(model.parameters()))),
        told(lambda: ours.compile_optimizer(model, adamw, max_norm=0.0)),
        told(lambda: done.add_param_group({"params": list(other.parameters())})),
        told(lambda: copy.deepcopy(done)),
        told(loss.backward),  # which reads the weights from before the update
    ]


def close(one: Any, two: Any) -> float:
    """The largest difference, relative to the largest value of each."""
    pairs = [(a.double(), b.double()) for a, b in zip(one, two, strict=True)]
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item() for a, b in pairs)


CASES: tuple[Callable[[Any], Any], ...] = (groups, cycle, momentum, saved, missing, scaler, written, hybrid, broken)


def main(result: str) -> None:
    run = ours.CompiledOptimizer._run
    refuse = ours.CompiledOptimizer._not
    noted: Any = ours.CompiledOptimizer
    noted._run = lambda self, gradients: (ran.append(True), run(self, gradients))[1]
    noted._not = lambda self, reason: (ran.append(reason), refuse(self, reason))[1]
    found: dict[str, Any] = {}
    for case in CASES:
        ran.clear()
        try:
            found[case.__name__] = [different(case(theirs), case(ours)), list(ran)]
        except Exception:
            found[case.__name__] = [traceback.format_exc()[-3000:], []]
    for case in (clipped, inductor, graphed):
        ran.clear()
        found[case.__name__] = [close(case(theirs), case(ours)), list(ran)]
    found["refused"] = refused()
    model = gpt(ours)
    optimizer = ours.compile_optimizer(model, torch.optim.AdamW(model.parameters()), max_norm=1.0)
    steps(model, optimizer, 0, 1)
    views = [optimizer.state[one]["exp_avg"] for one in model.parameters()]
    found["views"] = [all(isinstance(one, DTensor) for one in views),
                      len({one._local_tensor.untyped_storage().data_ptr() for one in views}), len(views)]  # fmt: skip
    write_for_all(found, result)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
