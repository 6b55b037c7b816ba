"""Steps of a small model where names of PyTorch's are gone, or not what they were.

A line of JSON from stdin is names and how they are; the answer is a line: what the steps tell, or where no name is
given, those of eager PyTorch. Each in a fork of this process, which has imported nothing of the package but the table,
and has done all of PyTorch's that a first step does.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import logging
import os
import signal
import sys
import tempfile
import warnings
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import tqdm
from torch import nn

from fsdp_compiled.torch_private import names
from tests import forked_ranks
from tests.chosen import examples

SECONDS = 600  # for the steps of one line
HOW = ("gone", "other signature", "other result")


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.BatchNorm1d(8), nn.Linear(8, 1))


def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def batch() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def losses() -> list[float]:
    """Of three steps under either face."""
    from fsdp_compiled import Policy, compile_sharded, fully_shard

    x, net = batch(), model()
    updates = torch.optim.AdamW(net.parameters(), lr=0.01)
    sharded = compile_sharded(net, updates, loss=loss, policy=Policy(lower="eager", clip=1.0))
    found = [float(sharded.step(x)) for _ in range(3)]
    net = model()
    for block in net:
        fully_shard(block)
    return found + stepped(fully_shard(net))


def eager() -> list[float]:
    return stepped(model()) * 2


def stepped(net: nn.Module) -> list[float]:
    x, updates, found = batch(), torch.optim.AdamW(net.parameters(), lr=0.01), []
    for _ in range(3):
        value = loss(net, x)
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        updates.step()
        updates.zero_grad()
        found.append(value.item())
    return found


def _other_signature(*, _asked_for: Any) -> None:
    raise AssertionError("nobody can have called this")


def take(name: str, how: str) -> None:
    """Makes a name something else to the package; PyTorch itself goes on with what it has."""
    if how == "gone":
        names.ABSENT.update((name, *name.rstrip("?").split("|")))
    else:
        names._found[name] = _other_signature if how == "other signature" else lambda *_, **__: None


def called(name: str) -> bool:
    return inspect.isroutine(found := names.find(name)) and not inspect.isclass(found)


def told(taken: list[str], how: str) -> dict[str, Any]:
    for name in taken:
        take(name, how)
    logged: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logging.getLogger("fsdp_compiled").addHandler(Lines())
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    try:
        return {"losses": losses() if taken else eager(), "logged": logged}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "logged": logged}


def cases(uses: tuple[str, ...], how: str) -> list[tuple[str, ...]]:
    """Names that are taken at once: all of one use, one by one, or the first of each of several. Of one use that is not
    core it is the first, too, if not all tests are run."""
    every = [names.TABLE[use].names for use in uses]
    if len(every) > 1:
        return [tuple(one[0] for one in every)]
    most = None if names.TABLE[uses[0]].kind == "core" else examples(1, len(every[0]))
    return [(name,) for name in every[0][:most] if how == "gone" or called(name)]


def forked(taken: list[str], how: str) -> str:
    """What a fork of this process tells, or nothing, if it dies or is not done in time."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(SECONDS)
        with os.fdopen(write, "w") as out:
            out.write(json.dumps(told(taken, how)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as found:
        said = found.read()
    os.waitpid(child, 0)
    return said


def warm_up() -> None:
    """All that a fork can find done already: imports of PyTorch's, what it does at its first capture, and, from the
    second fork on, bytecode of the package's, wherever Python was told to write none."""
    forked_ranks.seldom_collect()
    for row in names.TABLE.values():
        list(map(names.has, row.names))
    names._found.clear()
    for name in (*forked_ranks.IMPORTED, "resource", "safetensors", "xxhash"):
        if not name.startswith("fsdp_compiled"):
            with suppress(ModuleNotFoundError):  # that this PyTorch does not have
                importlib.import_module(name)
    forked_ranks.no_latency()
    if forked_ranks.forks_after_autograd():
        tqdm.tqdm.monitor_interval = 0  # which is a thread, of Dynamo's bar
        torch.compile(loss, backend="aot_eager", fullgraph=True)(model(), batch()).backward()
        torch._dynamo.reset()
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["TORCHINDUCTOR_CACHE_DIR"]
    gc.collect()
    gc.freeze()


def main() -> None:
    warnings.simplefilter("ignore")
    warm_up()
    for line in sys.stdin:
        print(forked(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
