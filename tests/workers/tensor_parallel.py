"""Tensor parallelism on four ranks, as 2 x 2 and others: losses, norms and weights beside FSDP2 with the same plan.

torchrun --nproc-per-node 4 tensor_parallel.py RESULT [CASE ...]
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel

from fsdp_compiled import Sharded, compile_sharded
from fsdp_compiled.analysis.timeline import estimate
from fsdp_compiled.ir.nodes import is_collective
from tests.cut_models import (
    GPT,
    RANK,
    STEPS,
    VOCABULARY,
    WIDTH,
    Net,
    ScaledNet,
    adamw,
    batch,
    build,
    compare,
    copies_equal,
    cut,
    fsdp2,
    loss_fn,
    net,
    ours,
    sgd,
    told_when_stale,
    two_by_two,
    unsharded,
)
from tests.launch import answer_all, of_all, told
from tests.toys import EAGER

warnings.filterwarnings("ignore")


def one_row() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))


def counts(sharded: Sharded) -> dict[str, int]:
    nodes = [node for node in sharded.program.graph.nodes if node.op == "call_function" and is_collective(node)]
    return dict(Counter(f"{str(node.target).split('.')[1].removesuffix('_')} {node.args[-1]}" for node in nodes))


def gpt() -> Any:
    """Sequence parallelism, a tied embedding, AdamW, ZeRO-3: bit for bit FSDP2 with the same plan."""
    mesh = two_by_two()
    row = mesh["shard"].get_local_rank()
    model = cut(build(), mesh["tp"], sequence=True)
    sharded = compile_sharded(model, adamw(model), loss=loss_fn, mesh=mesh, units="layers.*", policy=EAGER)
    before = {name: list(value.shape) for name, value in sharded.model.named_parameters()}
    mine = ours(sharded, row)
    reference = build()
    plain = unsharded(reference, adamw(reference), 2)
    rival = cut(build(), mesh["tp"], sequence=True)
    result = {
        "fsdp2": compare(mine, fsdp2(rival, mesh["shard"], adamw, row, 2)),
        "eager": compare(mine, plain),
        "counts": counts(sharded),
        "copies": copies_equal(sharded, mesh),
        "wide": wide(sharded),
        "plan": str(sharded.plan),
        "timeline": estimate(sharded.program, sharded.plan).busy("network") > 0,
        "program": str(sharded.program),
        "shapes": before == {name: list(value.shape) for name, value in reference.named_parameters()},
    }
    folder = sharded.dump(os.path.join(os.path.dirname(sys.argv[1]), f"dump{RANK}"))
    result["dump"] = [path.name for path in folder.iterdir() if "could not be told" in path.read_text()]
    return result


def classes() -> Any:
    """Loss parallel, clipping, SGD, ZeRO-1, torchtitan's names, two microbatches, each step held against eager
    PyTorch; and a norm that counts twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    row = mesh["dp_shard"].get_local_rank()

    def loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            return loss_fn(model, tokens, targets)

    model = net(mesh["tp"], classes=True)
    policy = replace(EAGER, shard="zero1", clip=0.3, verify=1)
    sharded = compile_sharded(model, sgd(model), loss=loss, mesh=mesh, policy=policy)
    losses, norms = [], []
    for step in range(STEPS):
        sharded.accumulate(*batch(step, row))
        losses.append(sharded.step(*batch(step, row + 2)).item())
        norms.append(sharded.grad_norm.item())
    mine = losses, norms, sharded.full_state_dict()
    reference = net(None)
    plain = unsharded(reference, sgd(reference), 4, clip=0.3)
    # What is whole on both ranks along tp, counted twice.
    fresh = net(None)
    sum(loss_fn(fresh, *batch(0, row)) / 4 for row in range(4)).backward()
    split = {slot.name for buffer in sharded.plan.buffers if buffer.split for slot in buffer.slots}
    squares = [(p.grad.square().sum().item(), name in split) for name, p in fresh.named_parameters()]
    twice = sum(square * (1 if part else 2) for square, part in squares) ** 0.5
    return {
        "eager": compare(mine, plain), "copies": copies_equal(sharded, mesh), "norm": norms[0], "twice": twice,
        "wide": wide(sharded),
    }  # fmt: skip


def stale() -> Any:
    """Steps held against eager PyTorch, with gradients and without, where the derivative of the second is another."""
    mesh = one_row()
    found = {}
    for gradients in (True, False):
        model = net(mesh["tp"], kind=ScaledNet)
        policy = replace(EAGER, verify=1, verify_gradients=gradients)
        sharded = compile_sharded(model, sgd(model), loss=loss_fn, mesh=mesh, policy=policy)
        found[str(gradients)] = told_when_stale(lambda step, sharded=sharded: sharded.step(*batch(step, 0)))
    return found


def wide(sharded: Sharded) -> int:
    """How many of a program's values are of all classes, and no weights."""
    values = [node.meta.get("val") for node in sharded.program.graph.nodes]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    return sum(VOCABULARY in shape and WIDTH not in shape for shape in shapes)


def distilled() -> Any:
    """A log-softmax over classes that are cut, which does not go into nll_loss: PyTorch's own handlers get it wrong."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))

    def loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logs = F.log_softmax(model(tokens).flatten(0, 1), -1)
        return F.nll_loss(logs, targets.flatten()) + logs.square().mean()

    model = net(mesh, classes=True)
    policy = replace(EAGER, shard="ddp")
    sharded = compile_sharded(model, sgd(model), loss=loss, mesh=mesh, policy=policy)
    mine = sharded.step(*batch(0, 0)).item()
    weights = sharded.full_state_dict()
    reference = net(None)
    optimizer = sgd(reference)
    value = loss(reference, *batch(0, 0))
    value.backward()
    optimizer.step()
    return {"eager": compare(([mine], [], weights), ([value.item()], [], reference.state_dict()))}


def half() -> Any:
    """HSDP with nothing to shard, bfloat16 beside FSDP2's own, checkpointed blocks, ZeRO-2."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    row = mesh["replicate"].get_local_rank()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = cut(build(recompute=True), mesh["tp"])
    policy = replace(EAGER, shard="zero2", precision=precision, loss_scale=1024.0)
    sharded = compile_sharded(model, adamw(model), loss=loss_fn, mesh=mesh, policy=policy)
    mine = ours(sharded, row)
    rival = cut(build(recompute=True), mesh["tp"])
    theirs = fsdp2(rival, mesh["replicate", "shard"], adamw, row, 2, mp_policy=precision)
    return {
        "fsdp2": compare(mine, theirs),
        "copies": copies_equal(sharded, mesh),
        "overflows": sharded.overflows.item(),
    }


def overflow() -> Any:
    """One part of one gradient on one rank is not finite: no rank updates."""
    mesh = two_by_two()
    model = net(mesh["tp"], classes=True)  # each rank along tp has half of the classes
    x = torch.ones(1, 1, WIDTH)

    def loss(model: Net, tokens: torch.Tensor, targets: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        return loss_fn(model, tokens, targets) + F.cross_entropy(model.head(x)[0], targets[0, :1]) * flag

    sharded = compile_sharded(model, sgd(model), loss=loss, mesh=mesh, policy=replace(EAGER, loss_scale=2.0))
    row = mesh["shard"].get_local_rank()
    before = [shard.clone() for shard in sharded.state.parameters.values()]
    sharded.step(*batch(0, row), torch.tensor(torch.inf if row else 0.0))
    same = all(map(torch.equal, before, sharded.state.parameters.values()))
    overflows = sharded.overflows.item()
    sharded.step(*batch(0, row), torch.tensor(0.0))
    moved = not all(map(torch.equal, before, sharded.state.parameters.values()))
    return {"same": same, "overflows": overflows, "moved": moved, "after": sharded.overflows.item()}


def dropout() -> Any:
    """Masks are the same along tp on what all have, others on parts and on other batches, and new in every call."""
    mesh = two_by_two()

    def loss(model: Net, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        both = torch.ones(4, 64)
        part = model.up(torch.ones(1, 1, WIDTH)).flatten()[:16].expand(4, 16)
        masks = F.dropout(both, 0.5) > 0, F.dropout(part, 0.5) != 0
        return loss_fn(model, tokens, targets), masks

    model = net(mesh["tp"], dropout=0.25)
    sharded = compile_sharded(model, adamw(model), loss=loss, mesh=mesh, policy=EAGER)
    torch.manual_seed(5)
    calls = []
    for step in range(2):
        _, masks = sharded.step(*batch(step, mesh["shard"].get_local_rank()))
        calls.append([mask.flatten().tolist() for mask in masks])
    found = of_all(calls)
    return {"masks": found, "copies": copies_equal(sharded, mesh)}


def other_batches() -> Any:
    """Ranks along tp with other batches, or other seeds where dropout draws: an error on every rank, before a write."""
    mesh, row = one_row(), 0
    found: dict[str, Any] = {}
    model = net(mesh["tp"], dropout=0.1)
    sharded = compile_sharded(model, adamw(model), loss=loss_fn, mesh=mesh, policy=EAGER)
    torch.manual_seed(row)

    def tried(call: Callable[[], Any]) -> Any:
        before = [shard.clone() for shard in sharded.state.parameters.values()]
        try:
            call()
            return "nothing was raised"
        except Exception as error:
            unchanged = all(map(torch.equal, before, sharded.state.parameters.values()))
            return f"{type(error).__name__}: {error}", unchanged

    def swapped(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """On the last rank the two rows stand in other places."""
        tokens, targets = batch(step, row)
        return (tokens.flip(0), targets.flip(0)) if RANK == 1 else (tokens, targets)

    sharded.step(*batch(0, row))
    found["step"] = tried(lambda: sharded.step(*swapped(1)))
    weights = sharded.full_state_dict()
    sharded.model.eval()
    logits = sharded(batch(7, row)[0])
    if RANK == 0:
        with torch.random.fork_rng():
            plain = Net()
        plain.load_state_dict(weights)
        found["apart"] = (logits - plain(batch(7, row)[0])).abs().max().item()
    found["forward"] = tried(lambda: sharded(swapped(1)[0]))
    sharded.model.train()
    sharded.accumulate(*swapped(1))
    found["microbatch"] = tried(lambda: sharded.step(*batch(2, row)))
    sharded.step(*batch(1, row))
    first, second = (2, 1) if RANK == 1 else (1, 2)
    sharded.accumulate(*batch(first, row))
    found["order"] = tried(lambda: sharded.step(*batch(second, row)))
    for number in (1, 2):
        sharded.accumulate(*batch(number, row))
    sharded.step(*batch(1, row))
    torch.manual_seed(RANK)
    found["seeds"] = tried(lambda: sharded.step(*batch(1, row)))
    torch.manual_seed(row)
    found["after"] = bool(sharded.step(*batch(1, row)).isfinite())
    return found


def meta() -> Any:
    """A model on the meta device, cut there: filled as the same model is that is not cut."""

    def filled(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = GPT()
        if "tp" in (mesh.mesh_dim_names or ()):
            cut(model, mesh["tp"])
        torch.manual_seed(7 + RANK)  # rank 0's numbers are everybody's
        return compile_sharded(model, loss=loss_fn, mesh=mesh, policy=EAGER).full_state_dict()

    def units(bucket_mb: float) -> tuple[list[str], dict[str, torch.Tensor]]:
        """Of a model whose head is its own: its units, and what it was filled with."""
        with torch.device("meta"):
            model = GPT()
            model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        torch.manual_seed(7)
        policy = replace(EAGER, bucket_mb=bucket_mb)
        sharded = compile_sharded(model, loss=loss_fn, mesh=flat, units="layers.*", policy=policy)
        return [unit.name for unit in sharded.plan.units], sharded.full_state_dict()

    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    whole = filled(flat)
    parts = filled(two_by_two())
    (one, drawn), (cut_up, again) = units(0.0), units(0.004)
    halves = [part.tolist() for part in parts["layers.0.up.weight"].chunk(2)] if RANK == 0 else [0, 1]
    return {
        "same": list(whole) == list(parts) and all(torch.equal(whole[name], parts[name]) for name in whole),
        "count": len(whole),
        "halves differ": halves[0] != halves[1],
        "root cut": [sum(name.startswith("root") for name in names) for names in (one, cut_up)],
        "same, cut": all(torch.equal(drawn[name], again[name]) for name in drawn),
    }


def other_names() -> Any:
    """A mesh whose axes are called something else; of one rank, any name will do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "tp"))
    return {"said": told(lambda: compile_sharded(net(mesh["tp"]), loss=loss_fn, mesh=mesh, policy=EAGER))}


CASES = (gpt, classes, overflow, dropout, other_names, meta)
OF_A_ROW = (stale, other_batches)
MORE = (distilled, half)

if __name__ == "__main__":
    named = [case for case in (*CASES, *OF_A_ROW, *MORE) if case.__name__ in sys.argv[2:]]
    answer_all(named or CASES, sys.argv[1])
