"""What `fsdp-compiled train` takes until step 2 on a machine just set up, by part, and when compiling has paid.

    python -m bench.start_up bench/results/start-up.json --beside ../before

Each lowering is started, in turns, with caches that hold no more than what `.ci/setup train` leaves (bytecode, answers
of the compiler, a compiled header: `lower/inductor.py`), and ended after forty steps. Parts are in wall time, so on a
machine with nothing else to do; the processor time of all processes until the end of step 2, compilers included, stands
beside them, and that of a later step on all ranks, which a busy machine moves less. Of several rounds the one with the
least of it stands. Compiling has paid after so many tokens as make
up, in processor time, for the longer start: `cli/machine.py` tells a run that is shorter. ``--beside``: another
checkout, measured in turns with this one. Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_compiled.cli.machine import hardware, versions
from fsdp_compiled.cli.options import TrainOptions

MARKS = {"text: ": "imports and the text", "step 1: ": "the model, taken over", "step 1 took": "step 1"}
PARTS = (*MARKS.values(), "step 2")
LATER = 40  # steps
RANKS = 2
TOKENS = RANKS * TrainOptions().batch * TrainOptions().context  # of a step
COMPILER = """#!/bin/sh
echo "$*" >> {calls}
exec {compiler} "$@"
"""
SET_UP = """
import fsdp_compiled.cli.train
from fsdp_compiled.lower.inductor import prepare
prepare()
"""  # as `.ci/setup` has it; a checkout that knows no `prepare` leaves bytecode alone
SUBREAPER = 36  # prctl: who left its parent is waited for here, and its processor time counted


def started(checkout: Path, lower: str, folder: Path) -> dict[str, float]:
    """The parts of one run, in seconds."""
    calls, compiler = folder / "calls", folder / "g++"
    calls.write_text("")
    compiler.write_text(COMPILER.format(calls=calls, compiler=shutil.which(os.environ.get("CXX", "g++"))))
    compiler.chmod(0o755)
    environment = own(checkout, folder) | {"CXX": str(compiler)}
    if lower == "inductor":
        command = [sys.executable, "-P", "-c", SET_UP]
        subprocess.run(command, cwd=checkout, env=environment, stderr=subprocess.DEVNULL, check=False)
        calls.write_text("")
    before, began = spent(), time.monotonic()
    run = subprocess.Popen(
        [sys.executable, "-P", "-m", "fsdp_compiled", "train", *f"--lower {lower} --nproc {RANKS}".split(),
         "--steps", "1000", "--validate-every", "1000", "--out", str(folder / "run")],
        cwd=checkout, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    found: dict[str, float] = {}
    last = began
    for line in run.stdout:
        for mark, part in MARKS.items():
            if line.startswith(mark):
                found[part], last = time.monotonic() - last, time.monotonic()
        if "step 1" in found:
            break
    reach(folder / "run", 2)
    found["step 2"], last = time.monotonic() - last, time.monotonic()
    first = spent()
    reach(folder / "run", 2 + LATER)
    later = spent()
    for _ in range(2):  # the second kills
        run.send_signal(signal.SIGINT)
        time.sleep(0.3)
    run.communicate()
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    compiled = [line for line in calls.read_text().splitlines() if re.search(r"\.cpp\b", line)]
    found |= {"all": last - began, "processor time": first - before, "of a step": (later - first) / LATER}
    return found | {"compiler calls": len(compiled)}


def reach(run: Path, step: int) -> None:
    journal = run / "metrics.jsonl"
    while journal.read_text().count("\n") < step:
        time.sleep(0.02)


def spent() -> float:
    """Processor time of all that this process started, in seconds, whether it has ended or not."""
    children, ticks = defaultdict[int, list[int]](list), dict[int, list[int]]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(") ")[2].split()
            children[int(fields[1])].append(int(path.parent.name))
            ticks[int(path.parent.name)] = [int(field) for field in fields[11:15]]  # its own, and of those that ended
    found, waiting = sum(ticks[os.getpid()][2:]), children[os.getpid()]
    while waiting:
        one = waiting.pop()
        found += sum(ticks.get(one, ()))
        waiting += children[one]
    return found / os.sysconf("SC_CLK_TCK")


def own(checkout: Path, folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    temporary = folder / "temporary"  # where Inductor has a header that it compiled, whatever its cache folder is
    temporary.mkdir()
    places = {
        "TORCHINDUCTOR_CACHE_DIR": folder / "cache", "TMPDIR": temporary, "PYTHONPYCACHEPREFIX": folder.parent,
        "PYTHONPATH": checkout,
    }  # fmt: skip
    return environment | {name: str(place) for name, place in places.items()}


def paid(parts: Mapping[str, Mapping[str, float]]) -> int:
    """Tokens after which the compiled run has taken less."""
    later = parts["inductor"]["processor time"] - parts["eager"]["processor time"]
    return round(TOKENS * later / (parts["eager"]["of a step"] - parts["inductor"]["of a step"]))


def describe(record: Mapping[str, Any]) -> str:
    """The result as a table."""
    heads = [*PARTS, "all", "processor time", "of a step", "compiler calls"]
    lines = [f"| | lowering | {' | '.join(heads)} |", "|---|---|" + "---:|" * len(heads)]
    for name, lowerings in record["seconds"].items():
        for lower, parts in lowerings.items():
            cells = [f"{parts[part]:.1f} s" for part in heads[:-2]]
            lines.append(
                f"| {name} | {lower} | {' | '.join(cells)} | {parts['of a step']:.2f} s | {parts['compiler calls']} |"
            )
    tokens = record["tokens until compiling has paid"]
    before, after = record["load average"]
    made_by = f"`{record['command']}`, {record['hardware']}, torch {record['versions']['torch']}"
    load = f"load average {before} before and {after} after"
    return "\n".join([*lines, "", f"Compiling has paid after {tokens:,} tokens. {made_by}, {load}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout, whose figures stand beside this one's")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    load = os.getloadavg()[1]
    places = {"now": Path.cwd()} | ({"beside": arguments.beside.absolute()} if arguments.beside else {})
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in places}
    turns = itertools.product(range(arguments.rounds), ("inductor", "eager"), places.items())
    with tempfile.TemporaryDirectory() as around:
        for _, lower, (name, checkout) in turns:
            parts = started(checkout, lower, Path(tempfile.mkdtemp(dir=around)))
            parts = {part: round(value, 3) for part, value in parts.items()}
            print(name, lower, parts, flush=True)
            found[name][lower] = min(parts, found[name].get(lower, parts), key=lambda one: one["processor time"])
    record = {
        "command": f"python -m bench.start_up {arguments.out}"
        + f" --beside {arguments.beside}" * bool(arguments.beside),
        "hardware": hardware(),
        "versions": versions(),
        "load average": [round(load, 1), round(os.getloadavg()[1], 1)],  # of five minutes, before and after
        "seconds": found,
        "tokens until compiling has paid": paid(found["now"]),
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
