"""From one command to N ranks on this machine, and back to one exit code.

The launcher is the only process that Ctrl-C reaches: ranks run in sessions of their own. The first one closes
the stop pipe, and ranks agree among themselves after which step they stop; the second kills them. SIGTERM
does the same, and kills after `TERM_LIMIT` by itself. The store at which ranks meet lives here, on a port the
system chose, as it does in torchrun. torchrun itself is not used, because it answers Ctrl-C by killing the
ranks and a failed rank by a report longer than the failure.

`fsdp-compiled rendezvous` serves another store, at which sites meet that come and go (`distributed.sites`).
"""

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import FrameType
from typing import IO

import torch
import torch.distributed as dist

from fsdp_compiled import cli
from fsdp_compiled.cli import resume
from fsdp_compiled.cli.machine import choose_lower
from fsdp_compiled.cli.options import TrainOptions
from fsdp_compiled.cli.rank import (
    BEGAN,
    FAILURE,
    STOP,
    STOPPED,
    RankInfo,
    own_launcher,
    place,
    tell_failure,
    under_launcher,
)
from fsdp_compiled.distributed.device_mesh import connect
from fsdp_compiled.distributed.mesh import RankError, agree, from_first

CLAIMS = ("config.json", "metrics.jsonl", "model.pt")  # any of them makes a folder a run
POLL = 0.1  # seconds between two looks at the ranks
GRACE = 2.0  # seconds the other ranks get to write their logs once one has failed
TERM_LIMIT = 30.0  # seconds from SIGTERM until ranks are killed, as elsewhere
USAGE = 2  # the exit code for the user's mistakes, which no restart mends


def start(options: TrainOptions, arguments: Sequence[str]) -> int:
    """Trains here if this process is a rank; else starts the ranks and waits for them."""
    if under_launcher():
        return _train(options)
    options = resolve(options)
    assert options.out is not None and options.nproc is not None and options.lower is not None
    # What was resolved here is repeated at the end, where argparse lets it win.
    resolved = ["--out", str(options.out), "--lower", options.lower, "--global-batch", str(options.global_batch)]
    return restarting([sys.executable, "-m", "fsdp_compiled", *arguments, *resolved], options)


def restarting(command: Sequence[str], options: TrainOptions) -> int:
    """Runs `launch` again, as often as --max-restarts allows, unless the run ended as it should or was stopped, even if
    it failed while stopping."""
    assert options.out is not None and options.nproc is not None
    logs = options.out / "logs"
    with _signals() as received:
        for restarts in count():
            logs.mkdir(parents=True, exist_ok=True)
            environment = {"TORCHELASTIC_RESTART_COUNT": str(restarts)}
            if restarts == 0:
                environment[BEGAN] = str(cli.BEGUN)
            code = launch(command, options.nproc, logs, environment, received=received)
            if code in (0, USAGE) or code > 128 or received or restarts == options.max_restarts:
                return code
            logs.rename(_unused(logs))
            print(
                f"starting again from the newest checkpoint (restart {restarts + 1} of {options.max_restarts})",
                flush=True,
            )
    raise AssertionError("count() has no end")


def _unused(logs: Path) -> Path:
    """The next free name for the logs of ranks that failed: logs-1, logs-2, ..."""
    return next(path for number in count(1) if not (path := logs.with_name(f"{logs.name}-{number}")).exists())


def resolve(options: TrainOptions, world: int | None = None) -> TrainOptions:
    """Checks what can be checked before anything is started, and chooses what was left open. ``world``: the number of
    ranks, if they were started already."""
    found = resume.find(options.checkpoint) if options.checkpoint is not None else None
    if found is not None:
        options = resume.adopt(options, found)
    out = options.out or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    if options.data is not None and not options.data.exists():
        raise ValueError(f"--data: {options.data} does not exist; give a file or folder of text")
    gpus = torch.cuda.device_count()
    if gpus and options.nproc is not None and options.nproc > gpus:
        raise ValueError(f"--nproc {options.nproc}: this machine has {gpus} GPUs, and each process needs its own")
    lower, reason = (options.lower, None) if options.lower else choose_lower(cuda=gpus > 0)
    if reason:
        print(reason, flush=True)
    nproc = options.nproc or gpus or 2
    options = replace(
        options,
        out=out,
        nproc=nproc,
        lower=lower,
        global_batch=options.global_batch or options.batch * (world or nproc),
    )
    # Last, since these make folders.
    refuse_used(out, found is not None and Path(found["out"]).absolute() == out.absolute())
    if options.checkpoint is not None:
        resume.write(options)
    if found is not None:
        resume.bring_along(Path(found["out"]), out)
        if (steps := found["options"].get("steps")) != options.steps:
            print(
                f"--steps {options.steps} instead of {steps}: the rate follows the new number from here on", flush=True
            )
    return options


def refuse_used(out: Path, ours: bool = False) -> None:
    """Makes the folder. Raises ``ValueError`` if it holds a run, unless that is the one that goes on (``ours``), or if
    it cannot be made or written."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: {out} is a file; give a folder")
    if not ours and any((out / name).exists() for name in CLAIMS):
        raise ValueError(f"--out: {out} already holds a run; give another folder or remove that one")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"--out: {out} cannot be written ({why}); give a folder that can") from error


def _train(options: TrainOptions) -> int:
    here = place()
    if not own_launcher():
        options = _resolve_together(options, here)
    try:
        from fsdp_compiled.cli.train import train

        return train(options, here)
    except BaseException as error:
        tell_failure(here.rank, error)
        raise


def _resolve_together(options: TrainOptions, here: RankInfo) -> TrainOptions:
    """`resolve` on rank 0 of the ranks that torchrun started. Every rank says what it refuses, so none waits."""
    failure: Exception | None = None
    try:
        if here.first:
            if options.nproc is not None:
                print(f"--nproc is ignored: torchrun has started {here.world} processes", flush=True)
            options = resolve(replace(options, nproc=None), here.world)
        elif options.lower is None:
            options = replace(options, lower=choose_lower(cuda=here.device.type == "cuda")[0])
    except Exception as error:
        failure = error
    mesh = connect(None)
    try:
        agree(mesh, "What train was called with", "", failure)
    except RankError as error:
        raise ValueError(str(error)) from None  # in one line, as on rank 0
    return replace(options, global_batch=from_first(options.global_batch, mesh))


def launch(
    command: Sequence[str],
    world: int,
    logs: Path,
    environment: Mapping[str, str] | None = None,
    name: str = "train",
    received: list[int] | None = None,
) -> int:
    """Runs a command as `world` ranks. Rank 0 speaks on our standard output; the rest goes to `logs`.

    `environment` is added to this process's own; `name` is the command that a failure report names; `received` is the
    list in which the caller collects signals, if it does. Returns 0, the code of a rank that failed (its reason is
    printed once, on standard error), or 128 plus the signal's number if a signal stopped the run.
    """
    failure = logs / "failure.txt"
    failure.unlink(missing_ok=True)
    listening = socket.create_server(("127.0.0.1", 0))  # PyTorch's own would be open to other machines
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    reading, end = os.pipe()
    writing = os.fdopen(end, "wb", buffering=0)
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store above, so no rank has to open a port of its own
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        STOP: str(reading),
        FAILURE: str(failure),
        BEGAN: str(time.time()),
    }
    shared |= environment or {}
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    ranks: list[subprocess.Popen[bytes]] = []
    with nullcontext(received) if received is not None else _signals() as received:
        try:
            for rank in range(world):
                own = shared | {"RANK": str(rank)} | _gpu(rank, world, shared)
                with (logs / f"rank{rank}.txt").open("wb") as log:
                    output = log if rank else None
                    ranks.append(
                        subprocess.Popen(
                            command, env=own, stdin=subprocess.DEVNULL, stdout=output, stderr=log, pass_fds=(reading,),
                            start_new_session=True,
                        )
                    )  # fmt: skip
            return _wait(ranks, received, writing, logs, name)
        finally:
            _kill(ranks)
            del store
            writing.close()
            os.close(reading)


def _gpu(rank: int, world: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that shows the rank one GPU only, its own: code that one rank compiled then runs on all."""
    names = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if "CUDA_VISIBLE_DEVICES" not in environment:
        names = [str(index) for index in range(torch.cuda.device_count())]
    if len(names) < world:
        return {"LOCAL_RANK": str(rank)}
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": names[rank]}


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: list[int], stop: IO[bytes], logs: Path, name: str) -> int:
    fine = (None, 0, *STOPPED.values())  # None: still running
    deadline = limit = math.inf  # of the ranks that are left once one has failed; of all once SIGTERM came
    while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
        if len(received) > 1 or time.monotonic() > limit:
            print("killed; what the run had written is in", logs.parent, file=sys.stderr)
            return 128 + received[0]
        if received and not stop.closed:
            again = "Ctrl-C again kills"
            if received[0] == signal.SIGTERM:
                stop.write(b"t")
                limit, again = time.monotonic() + TERM_LIMIT, f"again, or after {TERM_LIMIT:.0f} s, kills"
            stop.close()
            print(f"\nstopping after the current step ({again})", file=sys.stderr, flush=True)
        if deadline == math.inf and any(code not in fine for code in codes):
            deadline = time.monotonic() + GRACE
        time.sleep(POLL)
    if all(code in fine for code in codes):
        stopped = [code for code in codes if code]
        return 0 if not stopped else 128 + received[0] if received else max(stopped)
    print(f"fsdp-compiled {name}: {_reason(codes, logs)}", file=sys.stderr)
    return next((code for code in codes if code is not None and code > 0), 1)


def _reason(codes: list[int | None], logs: Path) -> str:
    """Why the run failed. A rank that a signal ended told nothing itself, and its peers tell only that they
    lost it."""
    failure = logs / "failure.txt"
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
            reason = f"rank {rank} was ended by {name}{hint}\n{_tail(logs / f'rank{rank}.txt')}"
            break
    else:
        reason = failure.read_text() if failure.exists() else ""
        if not reason:
            rank = next(rank for rank, code in enumerate(codes) if code)
            why = f", and why could not be written: is the disk of {logs} full?" if failure.exists() else ""
            reason = f"rank {rank} failed with exit code {codes[rank]}{why}\n{_tail(logs / f'rank{rank}.txt')}"
    return f"{reason.rstrip()}\nevery rank's own log is in {logs}"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM while the ranks run, instead of acting on them."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        os.killpg(rank.pid, signal.SIGKILL)  # the whole session: a compiling rank has workers
    for rank in running:
        rank.wait()
    if running and sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a killed progress display leaves the cursor hidden


def add_rendezvous_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=29400, help="where it listens, on all interfaces; 0: any free port")


def run_rendezvous(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    if not 0 <= chosen.port < 2**16:
        raise ValueError(f"--port is {chosen.port}; expected 0 to 65535.")
    for one in (signal.SIGINT, signal.SIGTERM):  # before it says that it serves
        signal.signal(one, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, [one])
    try:
        store = dist.TCPStore("0.0.0.0", chosen.port, is_master=True, wait_for_workers=False, timeout=timedelta(days=1))
    except dist.DistNetworkError as error:
        raise ValueError(f"port {chosen.port} cannot be served: {error}. Give another one.") from error
    print(f"sites meet at port {store.port} of this machine, until Ctrl-C", flush=True)
    signal.sigwait([signal.SIGINT, signal.SIGTERM])
    return 0
