"""What ranks that agree have in common and what each has alone; a case each; see ``ranks.py``.

torchrun --nproc-per-node 2 what_ranks_share.py RESULT CASE [CASE ...]
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.lower import trials
from fsdp_compiled.lower.cuda_graph import Replays
from tests.graphs import compiled_with
from tests.launch import of_all
from tests.standin import Plain, StandIn
from tests.workers.ranks import EAGER, RANK, Experts, batch, entropy, main, mse, net, shard


def seeds() -> Any:
    """Different weights on each rank at the start: rank 0's win."""
    sharded = shard(seed=RANK)
    expected = {name: value.clone() for name, value in net(seed=0).state_dict().items()}
    found = sharded.full_state_dict()
    equal = RANK > 0 or all(torch.equal(found[name], expected[name]) for name in expected)
    return {"rank 0's weights": equal, "on this rank": sorted(found)}


def dropout() -> Any:
    """Masks differ by rank and by step, and are the same again under the same seed."""

    def outputs() -> list[list[float]]:
        torch.manual_seed(11)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1))
        nn.init.ones_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        sharded = compile_sharded(model, policy=EAGER)
        return [sharded(torch.eye(64)).flatten().tolist() for _ in range(2)]

    first, second = outputs(), outputs()
    everyone = of_all(first)
    return {
        "differs by step": first[0] != first[1],
        "differs by rank": everyone[0] != everyone[1],
        "repeats": first == second,
    }


def counts() -> Any:
    model = net()
    sharded = compile_sharded(model, torch.optim.AdamW(model.parameters()), loss=mse, policy=EAGER, units=["0", "2"])
    sharded.step(*batch(2))
    held = sum(tensor.nbytes for tensor in sharded.state.parameters.values())
    everything = sum(buffer.nbytes for buffer in sharded.plan.buffers)
    return {
        "held": held,
        "planned": sharded.plan.persistent_bytes,
        "everything": everything,
        "gathers": len(sharded.program.marked("gather")),
        "captures": sharded.captures,
    }


def sizes() -> Any:
    """Each rank with rows of its own, other ones in each step: one program, and the mean of the ranks' means."""
    sharded = shard(Policy(lower="eager", dynamic=True))
    plain, wrong = net(), net()
    for step in range(4):
        both = [
            (torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator))
            for rows, generator in ((2 + 3 * step, torch.Generator().manual_seed(step)),
                                    (9 - 2 * step, torch.Generator().manual_seed(50 + step)))
        ]  # fmt: skip
        loss = sharded.step(*both[RANK])
        x, y = (torch.cat(parts) for parts in zip(*both, strict=True))
        expected = torch.stack([mse(plain, *batch) for batch in both]).mean()
        for model, value in ((plain, expected), (wrong, mse(wrong, x, y))):
            gradients = torch.autograd.grad(value, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
        assert abs(loss.item() - expected.item()) <= 1e-6 * expected.item()
    found = sharded.full_state_dict()
    return {
        "captures": sharded.captures,
        "off": [max(((found[n] - v).norm() / v.norm()).item() for n, v in model.state_dict().items()) if found else None
                for model in (plain, wrong)],
    }  # fmt: skip


def trained(device: StandIn | None) -> tuple[Sharded, list[float]]:
    """Twelve calls, of two shapes and with microbatches, as graphs on this stand-in or as they are."""
    model = net(dropout=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replays = Plain() if device is None else Replays(device, "auto")
    sharded = compiled_with(replays, model, optimizer, loss=mse, policy=Policy(lower="eager", clip=0.5, dynamic=False))
    losses = []
    for step in range(12):
        generator = torch.Generator().manual_seed(10 * step + RANK)
        rows = 2 + step % 2
        x, y = torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)
        losses.append(float((sharded.step if step % 3 else sharded.accumulate)(x, y)))
    return sharded, losses


def graphs() -> Any:
    """Collectives inside of graphs; one rank's broken capture; a process group that cannot be captured."""
    _, expected = trained(None)
    device = StandIn()
    sharded, losses = trained(device)
    names = [name for graph in device.graphs for name in graph.operators if "c10d" in name]
    broken, others = trained(StandIn(fail="broken off" if RANK else ""))
    strict = StandIn()
    strict.capturable = frozenset({"nccl"})
    refused, same = trained(strict)
    full = torch.OutOfMemoryError("CUDA out of memory")
    with mock.patch.object(trials, "checksum", side_effect=full) if RANK else nullcontext():
        untried, equal = trained(StandIn())
    return {
        "same": losses == expected,
        "untried": [untried.replays, equal == expected],
        "others": all(abs(a - b) < 1e-5 and abs(c - b) < 1e-5 for a, b, c in zip(others, expected, same, strict=True)),
        "moved": len(set(expected)) == 12,
        "replays": [sharded.replays, broken.replays, refused.replays],
        "log": device.log,
        "broken": strict.log,
        "gathers": sum("all_gather" in name for name in names),
        "reductions": sum("reduce" in name for name in names),
        "waits": sum("wait" in name for name in names),
        "captured": len(device.graphs),
    }


def idle() -> Any:
    """Parameters that no rank's batch reaches, or one rank's alone, beside FSDP2 and DDP; weights decay."""
    batches = [4 * RANK + torch.randint(4, (5,), generator=torch.Generator().manual_seed(step)) for step in range(4)]

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.5, foreach=False)

    def train(model: nn.Module) -> None:
        optimizer = adamw(model)
        for words in batches:
            optimizer.zero_grad()
            entropy(model, words).backward()
            optimizer.step()

    model = Experts()
    sharded = compile_sharded(model, adamw(model), loss=entropy, policy=EAGER)
    for words in batches:
        sharded.step(words)
    _, gradients = sharded.value_and_grad(batches[0])
    fsdp, alone, start = fully_shard(Experts()), Experts(), Experts().state_dict()
    ddp = DistributedDataParallel(Experts(), find_unused_parameters=True)
    for other in (fsdp, ddp, alone):
        train(other)
    rivals = {
        "fsdp2": {name: value.full_tensor() for name, value in fsdp.state_dict().items()},
        "ddp": ddp.module.state_dict(),
        "alone": alone.state_dict(),
        "start": start,
    }
    found = sharded.full_state_dict()
    return {
        "idle gradients": sum(gradients[f"idle.{name}"].abs().sum().item() for name in ("weight", "bias")),
        "different": {
            rival: sorted(name for name in found if not torch.equal(found[name], weights[name]))
            for rival, weights in rivals.items()
        },
    }


if __name__ == "__main__":
    main(globals())
