"""Runs a worker script on several ranks, each a process, and reads what rank 0 of them wrote."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from tests.forked_ranks import Answer, Request

ROOT = Path(__file__).parent.parent
SHOWN = 6000  # characters of a failed run's output


def launch(
    script: Path,
    world: int,
    *arguments: str,
    timeout: float = 900,
    torchrun: bool = False,
    warm: bool = True,
    ends: bool = False,
    imports: tuple[str, ...] = (),
    alone: bool = False,
) -> Any:
    """The JSON that rank 0 of ``script RESULT arguments...`` wrote to the file RESULT.

    Ranks are forked, which saves each of them five seconds of imports, and a second of the first step (``warm``), and
    leave without giving back their memory (unless ``ends``); or started by torchrun. ``imports`` are imported once, for
    all ranks. ``alone``: not a rank of a world of one, but a process that starts ranks by itself, or has none.
    Raises ``RuntimeError`` with the end of the output if a rank fails, nothing is written, or time runs out.
    """
    with TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        log.touch()
        run = _run_torchrun if torchrun else functools.partial(_run_forked, warm, ends, imports, alone)
        answer = run(script, world, [str(result), *arguments], log, timeout)
        if answer.code != 0 or not result.exists():
            reason = f"no end after {timeout:.0f} s" if answer.late else f"exit code {answer.code}"
            reason = reason if answer.code else "nothing was written"
            end = log.read_text(errors="replace")[-SHOWN:]
            raise RuntimeError(f"{script.name} on {world} ranks: {reason}. Its output ended with:\n{end}")
        return json.loads(result.read_text())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def results_of(script: Path, world: int, *arguments: str, **options: Any) -> Any:
    """A fixture of a test file: what `launch` gives, once for all of its tests."""
    import pytest  # not in the ranks

    @pytest.fixture(scope="module", name="results")
    def results() -> Any:
        return launch(script, world, *arguments, **options)

    return results


def told(call: Callable[[], Any]) -> str:
    """The error of a call, for a worker to write down."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def of_all(found: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank found, by rank; collective."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, found, group)
    return every


def answer(work: Callable[..., Any]) -> None:
    """The end of a worker: rank 0 writes what ``work`` returns there; its arguments are the script's behind RESULT."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, found = dist.get_rank(), work(*sys.argv[2:])
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    if dist.is_initialized():  # a case may have ended it
        dist.destroy_process_group()


def answer_all(cases: Sequence[Callable[[], Any]], path: str) -> None:
    """What a worker does: writes what each case says on each rank, by its name; after one that fails, none is begun."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for case in cases:
        try:
            found = case()
        except Exception:
            found = {"failed": traceback.format_exc()}
        results[case.__name__] = of_all(found)
        if any("failed" in one for one in results[case.__name__]):
            break
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def answers(results: dict[str, list[Any]], case: str) -> list[Any]:
    """What each rank found in a case of `answer_all`, which begins none after one that fails."""
    failed = [one["failed"] for found in results.values() for one in found if "failed" in one]
    assert case in results and not any("failed" in one for one in results[case]), failed[0]
    return results[case]


def environment() -> dict[str, str]:
    """That of ranks: a thread each, and the package of this checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def _run_forked(
    warm: bool,
    ends: bool,
    imports: tuple[str, ...],
    alone: bool,
    script: Path,
    world: int,
    arguments: list[str],
    log: Path,
    timeout: float,
) -> Answer:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    request = Request(str(script), arguments, world, store.port, str(log), timeout, environment(), ends, imports, alone)
    server = _server(warm)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(asdict(request)) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    if not line:
        raise RuntimeError(f"the process that forks ranks ended with {server.wait()}")
    return Answer(**json.loads(line))


@functools.cache
def _server(warm: bool) -> subprocess.Popen[str]:
    """The process that forks this one's ranks, until this one ends."""
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.forked_ranks", *(() if warm else ("--cold",))],
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def close() -> None:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.close()
        server.wait()
        server.stdout.close()

    atexit.register(close)
    return server


def _run_torchrun(script: Path, world: int, arguments: list[str], log: Path, timeout: float) -> Answer:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(script), *arguments],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            return Answer(process.wait(timeout))
        except subprocess.TimeoutExpired:
            return Answer(1, late=True)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # torchrun then ends its ranks; killed, it would leave them behind
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
