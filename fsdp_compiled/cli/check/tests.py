"""What is tried on this machine, each beside what it must equal. A test says in words what it found, or raises.

On one process: the kernels, the two lowerings, CUDA graphs. Between ranks: the collectives, and a step of FSDP2.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
from fsdp_compiled.kernels.trial import Like, failure

CONFIG = GPTConfig(layers=2, width=64, heads=2, context=16)
STEPS = 3
EAGER = 1e-6  # relative; 0 is what a CPU gives, and a GPU's atomics are not in the same order twice
COMPILED = 1e-4  # of a compiled step, or one with fused kernels, after `STEPS` steps of AdamW
MIB = 2**20

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
_SHARDS = (("parameters", (F32,)), ("gradients", (F32,)))
KERNELS = (
    Like("flatten", (("gradients", (F32, BF16)),), (("scale", F32),), (("dtype", F32),)),
    Like("flatten_", (("gradients", (F32,)),), (("flat", F32),), ()),
    Like("measure", (("parts", (F32,)),), (("nonfinite", torch.int64),), ()),
    Like("accumulate_", (("totals", (F32,)), ("parts", (BF16,))), (), ()),
    Like(
        "adam_",
        (*_SHARDS, ("exp_avgs", (F32,)), ("exp_avg_sqs", (F32,)), ("copies", (BF16,))),
        (("lr", F64), ("step", F32), ("factor", F64)),
        (("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8), ("weight_decay", 0.1), ("decoupled", True),
         ("maximize", False)),
    ),
    Like(
        "sgd_",
        (*_SHARDS, ("buffers", (F32,))),
        (("lr", F64),),
        (("momentum", 0.9), ("dampening", 0.0), ("weight_decay", 0.1), ("nesterov", False), ("maximize", False)),
    ),
    Like("pack", (), (("values", F32), ("seed", torch.int64)), (("form", "int8"),)),
    Like("unpack", (), (("packed", torch.uint8),), (("dtype", F32), ("form", "int8"))),
    Like("combine", (), (("packed", torch.uint8),), (("dtype", F32), ("form", "int8"), ("mean", True))),
)  # fmt: skip


class Wrong(Exception):
    """A test found other numbers than it must."""


class Skipped(Exception):
    """A test has nothing to test on this machine."""


@dataclass(frozen=True)
class Test:
    name: str
    run: Callable[[torch.device], str]


def kernel(like: Like) -> Test:
    def run(device: torch.device) -> str:
        if device.type != "cuda":
            raise Skipped("no GPU: plain PyTorch does its work on a CPU")
        if said := failure(like, device):
            raise Wrong(said)
        return "as its reference"

    return Test(f"kernel {like.name}", run)


def batches(device: torch.device, count: int = STEPS, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1 + rank)
    found = torch.randint(0, 256, (count, 2, 4, CONFIG.context), generator=generator).to(device)
    return [(tokens, targets) for tokens, targets in found]


def model_on(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return GPT(CONFIG).to(device)


def sharded(model: nn.Module, **policy: Any) -> Sharded:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return compile_sharded(model, optimizer, loss=next_byte_loss, policy=Policy(**policy))


def by_hand(model: nn.Module, device: torch.device, rank: int = 0) -> list[float]:
    """The losses of the loop that everybody writes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens, targets in batches(device, rank=rank):
        loss = next_byte_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def agree(mine: list[float], theirs: list[float], within: float) -> str:
    """How far the losses are from each other; raises `Wrong` where that is too far."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))
    if not worst <= within:
        raise Wrong(f"losses {mine}, expected {theirs}")
    return "losses equal, bit for bit" if mine == theirs else f"losses within {worst:.1e}"


def lowering(how: str) -> Test:
    def run(device: torch.device) -> str:
        model = model_on(device)
        theirs = by_hand(copy.deepcopy(model), device)
        begun = time.perf_counter()
        step = sharded(model, lower=how).step
        mine = [float(step(*batch)) for batch in batches(device)]
        taken = time.perf_counter() - begun
        return f"{agree(mine, theirs, EAGER if how == 'eager' else COMPILED)} as plain PyTorch; {taken:.1f} s"

    return Test(f"lowering {how}", run)


def graph(device: torch.device) -> str:
    if device.type != "cuda":
        raise Skipped("no GPU")
    count = 8
    plain, graphed = (sharded(model_on(device), lower="eager", cuda_graph=graphs) for graphs in (False, True))
    pairs = [[float(one.step(*batch)) for one in (graphed, plain)] for batch in batches(device, count)]
    said = agree([mine for mine, _ in pairs], [theirs for _, theirs in pairs], COMPILED)
    if graphed.replays != count - 2:
        raise Wrong(f"{graphed.replays} launches in {count} steps, expected {count - 2}")
    graphed.close()
    return f"{graphed.replays} launches, {said} as without"


def private_names(_device: torch.device) -> str:
    """Which of PyTorch's private names are there, and which way models are captured here."""
    from fsdp_compiled.capture.plain_way import trial
    from fsdp_compiled.torch_private.names import NAMES, TABLE, missing, plain

    gone = [f"{use} is left out (no {missing(use)[0]})" for use in TABLE if missing(use)]
    way = "the plain way" if plain() else f"the plain way, since {why}" if (why := trial()) else "the fast way"
    return "; ".join([f"models are captured {way}, with {len(NAMES)} names of PyTorch", *gone])


ALONE = (
    Test("private names of PyTorch", private_names),
    *map(kernel, KERNELS),
    lowering("eager"),
    lowering("inductor"),
    Test("CUDA graph", graph),
)


def collective(name: str) -> Test:
    """One of the three that a step is made of, on 1 MiB, compared with what it must give."""

    def run(device: torch.device) -> str:
        world, rank = dist.get_world_size(), dist.get_rank()
        assert dist.group.WORLD is not None
        group, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional
        numel = MIB // 4 // world * world
        mine = torch.arange(numel, dtype=F32, device=device) % 1000 + rank
        total = sum(torch.arange(numel, dtype=F32, device=device) % 1000 + other for other in range(world))
        assert isinstance(total, Tensor)
        part = slice(rank * numel // world, (rank + 1) * numel // world)
        call, expected = {
            "all_gather": (lambda: ops.all_gather_into_tensor(total[part], world, group), total),
            "reduce_scatter": (lambda: ops.reduce_scatter_tensor(mine, "sum", world, group), total[part]),
            "all_reduce": (lambda: ops.all_reduce(mine, "avg", group), total / world),
        }[name]
        seconds = []
        for _ in range(5):
            begun = time.perf_counter()
            result = ops.wait_tensor(call())
            if not torch.equal(result, expected):
                raise Wrong(f"rank {rank} got {result[:3].tolist()}..., expected {expected[:3].tolist()}...")
            seconds.append(time.perf_counter() - begun)
        return f"right on {world} ranks over {dist.get_backend()}; 1 MiB in {min(seconds) * 1e3:.2f} ms"

    return Test(f"collective {name}", run)


def against_fsdp2(device: torch.device) -> str:
    world, rank = dist.get_world_size(), dist.get_rank()
    model = model_on(device)
    other = copy.deepcopy(model)
    mesh = init_device_mesh(device.type, (world,))
    for block in other.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(other, mesh=mesh)
    theirs = torch.tensor(by_hand(other, device, rank), device=device)
    dist.all_reduce(theirs)
    step = sharded(model, lower="eager").step
    mine = [float(step(*batch)) for batch in batches(device, rank=rank)]
    return f"{agree(mine, (theirs / world).tolist(), EAGER)} as FSDP2 on {world} ranks"


TOGETHER = (
    *map(collective, ("all_gather", "reduce_scatter", "all_reduce")),
    Test("a step against FSDP2", against_fsdp2),
)


def results(tests: tuple[Test, ...], device: torch.device) -> Iterator[tuple[str, str, str]]:
    """``(name, verdict, what was found)`` of each, as they are done; the verdict is ok, FAILED or skipped."""
    for test in tests:
        try:
            yield test.name, "ok", test.run(device)
        except Skipped as error:
            yield test.name, "skipped", str(error)
        except Exception as error:
            kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
            yield test.name, "FAILED", f"{kind}{error}".splitlines()[0]
