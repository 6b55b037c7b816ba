"""`fsdp-compiled check`: tests of this machine, each compared with what it must equal. A test says in words what it
found, or raises: a line for each as it is done, and one file to send with a report.

On one process: the kernels, the two lowerings, CUDA graphs. Between ranks: the collectives, and a step of FSDP2.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
from fsdp_compiled.cli.launch import launch
from fsdp_compiled.cli.machine import hardware, versions
from fsdp_compiled.cli.options import whole
from fsdp_compiled.cli.rank import place, under_launcher
from fsdp_compiled.distributed.device_mesh import connect
from fsdp_compiled.kernels.trial import Like, failure

CONFIG = GPTConfig(layers=2, width=64, heads=2, context=16)
STEPS = 3
EAGER = 1e-6  # relative; a CPU gives 0, but a GPU's atomics are not in the same order twice
COMPILED = 1e-4  # for a compiled step, or one with fused kernels, after `STEPS` steps of AdamW
MIB = 2**20
RESULT = "check.json"
ROW = "{:<28}{:<9}{}"

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
    """A test of one of the three collectives of a step, on 1 MiB, compared with what it must give."""

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
            # A mean is of inputs that were divided, each rounded by itself.
            bound = world * torch.finfo(F32).eps if name == "all_reduce" else 0.0
            if not torch.allclose(result, expected, rtol=bound, atol=0.0):
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
    """``(name, verdict, what was found)`` for each test, as it is done; the verdict is ok, FAILED or skipped."""
    for test in tests:
        try:
            yield test.name, "ok", test.run(device)
        except Skipped as error:
            yield test.name, "skipped", str(error)
        except Exception as error:
            kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
            yield test.name, "FAILED", f"{kind}{error}".splitlines()[0]


def add_check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=whole, metavar="N", help="ranks of the tests between ranks (all GPUs, else 2)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write {RESULT}, to send with a report, there")


def run_check(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Runs the tests, those between ranks as ranks; returns 1 if one fails."""
    if under_launcher():
        return _rank(options)
    if options.nproc is not None and options.nproc < 2:
        raise ValueError(f"--nproc is {options.nproc}; expected 2 or more, since collectives are between ranks.")
    gpus = torch.cuda.device_count()
    if gpus > 1 and options.nproc is not None and options.nproc > gpus:
        raise ValueError(f"--nproc {options.nproc}: this machine has {gpus} GPUs, and each process needs its own.")
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out: {options.out} cannot be made ({error}); give another folder.") from None
    found = {"torch": torch.__version__, "hardware": hardware(), "versions": versions("triton")}
    print(f"torch {torch.__version__}, {hardware()}\n", flush=True)
    print(ROW.format("test", "", "found"), flush=True)
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    logging.getLogger("fsdp_compiled").addHandler(logging.NullHandler())  # warnings are told by the tests
    rows = _shown(ALONE, device)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        (out / "logs").mkdir(parents=True, exist_ok=True)
        # With one GPU, ranks share the CPU: what happens between them is the same, except for NCCL.
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if gpus == 1 else {}
        command = [sys.executable, "-m", "fsdp_compiled", "check", "--out", str(out)]
        code = launch(command, options.nproc or max(gpus, 2), out / "logs", hidden, "check")
        part = out / "ranks.json"
        rows += [tuple(row) for row in json.loads(part.read_text())] if part.exists() else []
        part.unlink(missing_ok=True)
    if code and len(rows) < len(ALONE) + len(TOGETHER):
        rows.append(("ranks", "FAILED", f"a rank ended with exit code {code}"))
        print(ROW.format(*rows[-1]), flush=True)
    failed = [name for name, verdict, _ in rows if verdict == "FAILED"]
    if options.out is not None:
        (options.out / RESULT).write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")
    print(f"\n{_sentence(rows, failed, options.out)}", flush=True)
    return 1 if failed else 0


def _shown(tests: tuple[Test, ...], device: torch.device, first: bool = True) -> list[tuple[str, str, str]]:
    rows = []
    for row in results(tests, device):
        rows.append(row)
        if first:
            print(ROW.format(*row), flush=True)
    return rows


def _sentence(rows: Sequence[tuple[str, str, str]], failed: Sequence[str], out: Path | None) -> str:
    if failed:
        where = f"{out / RESULT}" if out is not None else "what --out FOLDER writes"
        return f"{len(failed)} of {len(rows)} failed: {', '.join(failed)}. Please report it, with {where}."
    skipped = sum(verdict == "skipped" for _, verdict, _ in rows)
    return f"all is well: {len(rows) - skipped} passed" + (f", {skipped} skipped" if skipped else "")


def _rank(options: argparse.Namespace) -> int:
    here = place()
    connect(None, here.device)
    rows = _shown(TOGETHER, here.device, here.first)
    every: list[list[tuple[str, str, str]]] = [[] for _ in range(here.world)]
    dist.all_gather_object(every, rows)
    if here.first and options.out is not None:
        # For each test, the first rank that reports a fault.
        worst = [next((row for row in row_of if row[1] == "FAILED"), row_of[0]) for row_of in zip(*every, strict=True)]
        (options.out / "ranks.json").write_text(json.dumps(worst))
    return 0
