"""A process that has imported what ranks import, and forks them: a launch then costs what its ranks do.

``python -m tests.forked_ranks`` makes a step, which Python and PyTorch take a second longer for the first time, and
reads a request a line, JSON, and answers each with a line when all its ranks have
ended. What torchrun does for ranks is done here: their environment, and an end to all of them once one has failed.
The store that they meet in belongs to the caller, as it belongs to torchrun's agent. What a fork does not show, such as
another order of a set's elements on each rank, takes `launch` with ``torchrun=True``; what a first step does to the
process, ``warm=False``. A rank leaves its memory to the operating system, to which Python and PyTorch would return it
piece by piece, in half a second of processor time; where the end of a process is what is tried, ``ends=True``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

GRACE = 10.0  # seconds from SIGTERM to SIGKILL
LOOK = 0.02  # seconds between two looks at the ranks
IMPORTED = (  # most of it lazily, by the first program that is captured or compiled
    "fsdp_compiled.api", "multiprocessing.synchronize", "pytest", "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed", "torch._dynamo.backends.inductor", "torch._dynamo.repro.after_dynamo",
    "torch._higher_order_ops.passes", "torch._inductor.compile_fx", "torch._inductor.standalone_compile",
    "torch._subclasses.schema_check_mode", "torch.distributed.fsdp", "torch.distributed.tensor.experimental",
    "torch.export._trace", "torch.fx.experimental.validator", "torch.nn.parallel",
    "torch.testing._internal.distributed",
)  # fmt: skip


def leave(work: Callable[[], Any]) -> NoReturn:
    """Ends this process after ``work``, whose number is the exit status, as Python would, but that it frees nothing."""
    code = 1
    try:
        code = work() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # ends executors and waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True)
class Request:
    """A script to run on ranks; ``environment`` is theirs, but for what tells a rank its place."""

    script: str
    arguments: list[str]
    world: int
    port: int  # of the store, on this machine
    log: str  # the file that all ranks write stdout and stderr to
    timeout: float  # seconds
    environment: dict[str, str]
    ends: bool = False  # as Python ends a process; see above
    imports: tuple[str, ...] = ()  # modules that ranks need and others do not, imported once, before the fork
    alone: bool = False  # no rank: a process that nobody told a place


@dataclass(frozen=True)
class Answer:
    """How it ended: the exit status of each rank, as `os.waitstatus_to_exitcode` has it, of the first that failed."""

    code: int
    late: bool = False  # time ran out


def place(request: Request, rank: int) -> dict[str, str]:
    """The environment that torchrun gives to a rank."""
    here, world = str(rank), str(request.world)
    return request.environment | {
        "RANK": here, "LOCAL_RANK": here, "ROLE_RANK": here, "GROUP_RANK": "0",
        "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "ROLE_WORLD_SIZE": world, "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "forked",
    }  # fmt: skip


def wait(pids: list[int], timeout: float) -> Answer:
    """Until all have ended. Once one has failed, or time has run out, the others are ended as torchrun ends them."""
    running, code, late = set(pids), 0, False
    deadline = time.monotonic() + timeout
    while running:
        for pid in sorted(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                code = code or os.waitstatus_to_exitcode(status)
        if running and (code or time.monotonic() > deadline):
            late = late or not code
            end(running)
            return Answer(code or 1, late)
        time.sleep(LOOK)
    return Answer(code)


def end(running: set[int]) -> None:
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while running and time.monotonic() < deadline:
        running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(LOOK)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def become(request: Request, rank: int) -> None:
    """Turns this process into the rank: its environment, its output, its arguments."""
    os.environ.clear()
    os.environ.update(request.environment if request.alone else place(request, rank))
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr] # a rank may end without a flush
    sys.argv = [request.script, *request.arguments]
    sys.path.insert(0, str(Path(request.script).parent))


def forks_after_autograd() -> bool:
    """Whether this process, which has made no fake tensor yet, can fork after it has run autograd.

    Autograd begins a thread for each GPU the first time it runs, and refuses to run in a fork from then on. A CUDA
    build on a machine without GPUs counts one, too, once there was a fake tensor; before, it counts none for good.
    """
    import torch

    if torch.cuda.device_count():
        return False
    torch.ones((), requires_grad=True).backward()
    return True


def warm_up() -> None:
    """A step on one process, after which no more than caches are left: no thread, no counts, no numbers drawn."""
    import torch
    import tqdm
    from torch import nn

    from fsdp_compiled import Policy, compile_sharded

    tqdm.tqdm.monitor_interval = 0  # which is a thread, of Dynamo's bar
    with torch.random.fork_rng(devices=()):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        sharded = compile_sharded(
            model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=Policy(lower="eager")
        )
        sharded.step(torch.ones(2, 4))
        sharded.close()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def serve(warm: bool) -> Request | None:
    """In the parent None, once there are no more requests; in a rank its request, and the process is that rank."""
    for name in IMPORTED:
        with suppress(ModuleNotFoundError):  # that this PyTorch does not have
            importlib.import_module(name)
    no_latency()
    if warm and forks_after_autograd():
        warm_up()
    assert threading.active_count() == 1, "a fork copies one thread only"
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = Request(**json.loads(line))
        for name in request.imports:
            importlib.import_module(name)
        assert threading.active_count() == 1, "a fork copies one thread only"
        pids = []
        for rank in range(request.world):
            if pid := os.fork():
                pids.append(pid)
            else:
                become(request, rank)
                return request
        print(json.dumps(asdict(wait(pids, request.timeout))), flush=True)
    return None


def seldom_collect() -> None:
    """Garbage is looked for less often: capturing makes a million objects that stay, and a test is soon over."""
    gc.set_threshold(200_000, 20, 100)


def no_latency() -> None:
    """For its log Dynamo measures how long a capture's guards take, and first flushes the processor's caches: a tenth
    of what a small capture takes."""
    from torch._dynamo import guards

    guards.profile_guard_manager = lambda *_: 0.0


def main() -> None:
    seldom_collect()
    if (request := serve(warm="--cold" not in sys.argv)) is None:
        return
    script = types.ModuleType("__main__")
    script.__file__ = request.script
    sys.modules["__main__"] = script
    code = compile(Path(request.script).read_text(), request.script, "exec", dont_inherit=True)
    if request.ends:
        exec(code, script.__dict__)
    else:
        leave(lambda: exec(code, script.__dict__))


if __name__ == "__main__":
    main()
