"""Loops written for FSDP2, each run with its `fully_shard` and with this package's; what both leave, bit for bit.

torchrun --nproc-per-node 2 fully_shard.py RESULT [CASE ...]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fsdp_compiled as ours
from tests.launch import answer
from tests.loops import GPT, batch, beside, full, gpt, gradients, loss_of, same_gpt, train, weights
from tests.workers import fully_shard_classes, fully_shard_midway, fully_shard_models

# All blocks of a model, and its root, gathered together, as far as they are alike: these models are small.
MERGED = ours.Policy(lower="eager", cuda_graph=False, bucket_mb=1)
together = SimpleNamespace(
    fully_shard=partial(ours.fully_shard, policy=MERGED), register_fsdp_forward_method=ours.register_fsdp_forward_method
)
# Loops that see single units, their gradients or their state; the others run so in `make test-all`.
MERGED_TOO = ("accumulate", "structured", "saved", "unsharded")


def adamw(api: Any) -> Any:
    model = same_gpt(api)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def sgd_groups(api: Any) -> Any:
    """Groups by the number of dims; momentum; a scheduler; the norm clipped."""
    model = same_gpt(api)
    flat = [one for one in model.parameters() if one.ndim < 2]
    wide = [one for one in model.parameters() if one.ndim >= 2]
    optimizer = torch.optim.SGD([{"params": flat}, {"params": wide, "weight_decay": 0.1}], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    found: list[Any] = [len(flat), len(wide)]
    for step in range(3):
        loss_of(model, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        found.append(full(norm))
    return [*found, *weights(model)]


def fused(api: Any) -> Any:
    model = gpt(api, tie=True)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


def accumulate(api: Any) -> Any:
    """With communication in each backward, then without."""
    model = same_gpt(api)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for row in range(2):
        for micro in range(3):
            model.set_requires_gradient_sync(row % 2 == 0 or micro == 2)
            model.set_is_last_backward(micro == 2)
            (loss_of(model, 3 * row + micro) / 3).backward()
            found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *weights(model)]


def divided(api: Any) -> Any:
    """Gradients that are summed on the wire, and divided by another factor, from the second step on; and held back."""
    model = gpt(api)
    units = [one for one in model.modules() if isinstance(one, theirs.FSDPModule)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = train(model, optimizer, 1)
    for one in units:
        one.set_force_sum_reduction_for_comms(True)
    found += train(model, optimizer, 1)
    for one in units:
        one.set_gradient_divide_factor(1.0 if one is model else 3.0)
    found += train(model, optimizer, 1)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        loss_of(model, micro).backward()
    found += gradients(model)
    for one in units:
        one.set_force_sum_reduction_for_comms(False)
        one.set_gradient_divide_factor(2.0)
    return [*found, *train(model, optimizer, 1)]


def evaluation(api: Any) -> Any:
    """Forward without gradients between steps, and dropout from the user's generator."""
    model = gpt(api, dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5 + dist.get_rank())
    found: list[Any] = []
    for step in range(3):
        found += train(model, optimizer, 1)
        model.eval()
        with torch.no_grad():
            found.append(model(batch(step)[0]))
        with torch.inference_mode():
            found.append(model(batch(step)[0]).clone())
        model.train()
        found.append(torch.rand(2))
    return found


def checkpointed(api: Any) -> Any:
    model = gpt(api, checkpointed=True, dropout=0.2)
    torch.manual_seed(5 + dist.get_rank())
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def several_forwards(api: Any) -> Any:
    """Preference loss: two forwards, one backward; then one forward, two backwards."""
    model = same_gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(2):
        chosen, rejected = loss_of(model, step), loss_of(model, step + 50)
        F.softplus(chosen - rejected).backward()
        found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    loss = loss_of(model, 9)
    loss.backward(retain_graph=True)
    loss.backward()
    return [*found, *gradients(model)]


def autocast(api: Any) -> Any:
    model = same_gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, step)

    return train(model, optimizer, 2, loss)


def mixed_precision(api: Any) -> Any:
    torch.manual_seed(0)
    model = GPT()
    for layer in model.layers:
        api.fully_shard(layer, mp_policy=theirs.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    precision = theirs.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    api.fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = train(model, optimizer, 2)
    model.set_requires_gradient_sync(False)
    loss_of(model, 5).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, 6).backward()
    return [*found, *gradients(model)]


def scaler(api: Any) -> Any:
    """`torch.amp.GradScaler`, with an infinity on one rank in the second step."""
    model = same_gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    found: list[Any] = []
    for step in range(3):
        loss = loss_of(model, step)
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [scaler.get_scale(), *weights(model)]
    return found


def fused_scaler(api: Any) -> Any:
    """The same with a fused optimizer, which unscales by itself and skips where it is told of an infinity."""
    model = same_gpt(api)
    groups = [{"params": [one for one in model.parameters() if one.dim() == dim], "lr": 0.01 * dim} for dim in (1, 2)]
    optimizer = torch.optim.AdamW(groups, fused=True, amsgrad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    found: list[Any] = []
    for step in range(3):
        loss = loss_of(model, step)
        scaler.scale(loss * float("inf") if step == 1 and dist.get_rank() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [scaler.get_scale(), *weights(model)]
    return found


def saved(api: Any) -> Any:
    """Checkpoints: a state_dict, DCP, and a full one from rank 0; EMA beside it."""
    model = same_gpt(api)
    average = gpt(api)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = train(model, optimizer, 2)
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.25)
    found += weights(average)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    state = {"model": model.state_dict(), "optimizer": dcp_state.get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder[0])
    again = gpt(api)
    with torch.no_grad():
        for one in again.parameters():
            one.zero_()
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    state = {"model": again.state_dict(), "optimizer": dcp_state.get_optimizer_state_dict(again, optimizer)}
    dcp.load(state, checkpoint_id=folder[0])
    dcp_state.set_optimizer_state_dict(again, optimizer, state["optimizer"])
    found += train(again, optimizer, 1)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = dcp_state.get_model_state_dict(model, options=dcp_state.StateDictOptions(full_state_dict=True))
    dcp_state.set_model_state_dict(average, full, options=options)
    return [*found, *weights(average), *(value.detach().clone() for value in full.values())]


def assigned(api: Any) -> Any:
    """The way of PyTorch's tutorial: full tensors are distributed and take the parameters' places."""
    torch.manual_seed(7)
    full = {name: value.clone() for name, value in GPT().state_dict().items()}
    model = gpt(api)
    loss = loss_of(model, 0).detach()
    sharded = {
        name: nn.Parameter(distribute_tensor(full[name], one.device_mesh, one.placements))
        for name, one in model.state_dict().items()
    }
    model.load_state_dict(sharded, assign=True)
    return [loss, *train(model, torch.optim.SGD(model.parameters(), lr=0.1))]


def written(api: Any) -> Any:
    """Weights are clamped, initialised and copied between steps."""
    model = same_gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = train(model, optimizer, 1)
    with torch.no_grad():
        for one in model.parameters():
            one.clamp_(-0.1, 0.1)
        model.head.weight.mul_(2.0)
    torch.manual_seed(1)
    nn.init.normal_(model.embed.weight, std=0.1)
    nn.init.zeros_(model.layers[0].up.bias)
    return [*found, *train(model, optimizer, 2)]


def hooks(api: Any) -> Any:
    """Hooks of the root and of a block, and on outputs."""
    model = gpt(api)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].sum()))
    model.register_forward_hook(lambda _, args, result: result * 0.5)
    model.layers[0].register_forward_hook(lambda _, args, result: result + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        tokens, targets = batch(step)
        logits = model(tokens)
        logits.register_hook(lambda gradient: gradient * 2)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return [*train(model, optimizer, 2, loss), *seen]


def unsharded(api: Any) -> Any:
    model = same_gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = train(model, optimizer, 1)
    model.unshard()
    handle = model.layers[0].unshard(async_op=True)  # type: ignore[operator]
    handle.wait()
    found += [model.head.weight.detach().clone(), model.layers[0].up.weight.detach().clone()]
    found.append(isinstance(model.head.weight, DTensor))
    model.reshard()
    model.layers[0].reshard()  # type: ignore[operator]
    found.append(isinstance(model.head.weight, DTensor))
    return [*found, *train(model, optimizer, 1)]


def hybrid(api: Any) -> Any:
    """Two replicas of one rank each, and one of two."""
    found: list[Any] = []
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        model = gpt(api, {"mesh": mesh})
        found += train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 2)
        found.append(str(model.head.weight.placements))
    return found


def around(api: Any) -> Any:
    """`torch.utils.checkpoint` around the model, and activations that are kept elsewhere."""
    model = same_gpt(api)
    tokens, targets = batch(0)
    logits = checkpoint(model, tokens, use_reentrant=False)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    found = gradients(model)
    model.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, 1)
    loss.backward()
    return [*found, *gradients(model)]


def broken(api: Any) -> Any:
    """Trains with another rate under this package: what must be told apart."""
    model = same_gpt(api)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1 if api is theirs else 0.1000001))


CASES: dict[str, Callable[[Any], Any]] = {
    case.__name__: case
    for case in (
        adamw, sgd_groups, fused, accumulate, divided, evaluation, checkpointed, several_forwards, autocast,
        mixed_precision, scaler, fused_scaler, saved, assigned, written, hooks, unsharded, hybrid, around, broken,
        *fully_shard_models.CASES, *fully_shard_midway.CASES, *fully_shard_classes.CASES,
    )
}  # fmt: skip


def main(*names: str) -> dict[str, str]:
    every = bool(os.environ.get("ALL_TESTS"))
    return {
        name: beside(CASES[name], theirs, ours, *[together] * (name in MERGED_TOO or every)) for name in names or CASES
    }


if __name__ == "__main__":
    answer(main)
