"""Where the time of a first step goes, by part and by depth, with the eager lowering and nothing on disk.

    python -m bench.first_step_parts bench/results/first-step-parts.json --beside ../before

``--lower inductor`` compiles, twice: with nothing on disk, and with what the first has left there.

In seconds of processor time, which a shared machine hardly moves: one process, a GPT of width 32, a process of its own
for each depth, after a first step of one layer that loads what is imported late. Parts are timed from outside, so what
lies inside of another part (AOTAutograd's trace is called from the capture) is taken off that one. To make model and
optimizer is the user's own. The rest is fake inputs, and what a first run does beside that of a later step.
Of several rounds the shortest stands, since what else runs only ever adds to it. Measured in turns with this:
``--beside``, another checkout of the package; ``--python``, another interpreter, with another release of PyTorch.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

LAYERS = (4, 24, 96)


def parts_of(layers: int, lower: Literal["eager", "inductor"]) -> dict[str, float]:
    import torch

    from bench.host_time import GPT, batch, loss
    from fsdp_compiled import Policy
    from fsdp_compiled import api as taken_over
    from fsdp_compiled.capture import aot, dynamo_run
    from fsdp_compiled.lower import lowering
    from fsdp_compiled.runtime.programs import program_maker

    spent: dict[str, float] = defaultdict(float)
    running: list[str] = []
    began = 0.0

    def timed(module: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal began
            now = time.process_time()
            spent[running[-1]] += now - began
            running.append(part)
            began = now
            try:
                return function(*args, **kwargs)
            finally:
                now = time.process_time()
                spent[running.pop()] += now - began
                began = now

        setattr(module, name, run)

    def step(count: int) -> tuple[float, float]:
        """The first; returns what the second takes, and what making the model took."""
        torch.manual_seed(0)
        begun = time.process_time()
        model = GPT(count)
        optimizer = torch.optim.AdamW(model.parameters())
        made = time.process_time() - begun
        sharded = taken_over.compile_sharded(model, optimizer, loss=loss, policy=Policy(lower=lower))
        sharded.step(*batch())
        first = time.process_time()
        sharded.step(*batch())
        return time.process_time() - first, made

    torch.set_num_threads(1)
    step(1)
    timed(program_maker, "capture", "Dynamo")
    timed(aot, "differentiate", "AOTAutograd")
    timed(dynamo_run, "differentiate", "equal blocks, found and copied")
    timed(program_maker, "transform", "passes and checks")
    timed(program_maker, "fuse", "fusions")
    timed(program_maker, "describe", "memory, predicted")
    timed(program_maker, "Lowering", "lowering")
    timed(lowering, "Code", "lowering")
    timed(program_maker, "compile_all", "compiling")
    timed(taken_over, "compile_sharded", "the model, taken over")
    compilers = os.times()
    gc.collect()  # what was made before is not looked through meanwhile, or it is, as it happens
    running.append("the rest")
    began = time.process_time()
    later, made = step(layers)
    spent["the rest"] += time.process_time() - began - later - made
    spent = {"model and optimizer, made": made} | spent
    ended = os.times()
    if lower == "inductor":
        spent["compilers, processes of their own"] = (
            ended.children_user + ended.children_system - compilers.children_user - compilers.children_system
        )
    found = {"layers": layers, "all": sum(spent.values())} | spent | {"a later step": later}
    return {name: round(value, 3) for name, value in found.items()}


def _one(layers: int, lower: str, python: str, checkout: Path, folder: Path) -> dict[str, Any]:
    """In a process of its own, which keeps what it compiles in the folder."""
    place = folder / "parts.json"
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "bench.first_step_parts", str(place), "--one", str(layers)]
    command += ["--lower", lower] * (lower != "eager")  # which an older checkout does not know
    subprocess.run(command, env=environment, check=True, cwd=checkout)
    return json.loads(place.read_text())  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--lower", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout, whose figures stand beside this one's")
    parser.add_argument("--python", type=Path, help="another interpreter, whose figures stand beside this one's")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        arguments.out.write_text(json.dumps(parts_of(arguments.one, arguments.lower)))
        return
    import torch

    from fsdp_compiled.cli.machine import hardware

    found: dict[str, list[dict[str, Any]]] = {}
    load = os.getloadavg()[1]
    places = {"now": (sys.executable, Path.cwd())}
    if arguments.beside:
        places["beside"] = sys.executable, arguments.beside
    if arguments.python:
        asked = [str(arguments.python), "-c", "import torch; print(torch.__version__)"]
        name = f"torch {subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()}"
        places[name] = str(arguments.python.absolute()), Path.cwd()
    disks = ("nothing on disk", "all on disk") if arguments.lower == "inductor" else ("nothing on disk",)
    for layers, turn, (name, place) in itertools.product(arguments.layers, range(arguments.rounds), places.items()):
        with tempfile.TemporaryDirectory() as folder:
            for disk in disks:
                parts = {"disk": disk} | _one(layers, arguments.lower, *place, Path(folder))
                print(name, parts, flush=True)
                rows = found.setdefault(name, [])
                if turn:
                    before = rows.pop(-len(disks))
                    parts = min(before, parts, key=lambda one: one["all"])
                rows.append(parts)
    record = {
        "command": f"python -m bench.first_step_parts {arguments.out}"
        + f" --lower {arguments.lower}" * (arguments.lower != "eager")
        + f" --layers {' '.join(map(str, arguments.layers))}" * (tuple(arguments.layers) != LAYERS)
        + f" --rounds {arguments.rounds}" * (arguments.rounds != 3)
        + f" --beside {arguments.beside}" * bool(arguments.beside)
        + f" --python {arguments.python}" * bool(arguments.python),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "load average": [round(load, 1), round(os.getloadavg()[1], 1)],  # of five minutes, before and after
        "seconds of processor time": found,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
