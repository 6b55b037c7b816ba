"""`train` with a checkpoint folder, killed again and again: each run ends with what an undisturbed one ends with.

python -m tests.kills --count 30 --seed 0          as many kills, in phases and moments drawn from the seed
python -m tests.kills --phases renamed,writer      one kill in each of these, in one run

A run is started, one of its ranks is killed (SIGKILL), the others must end by themselves, and the same command is given
again, until the kills are used up. Then weights, losses, rates, the journal and the sample are compared, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled import Sharded, cli
from fsdp_compiled.cli import train
from fsdp_compiled.distributed import device_mesh
from fsdp_compiled.runtime.checkpoint import data_file, folder, loading, saving, writing
from tests.forked_ranks import forks_after_autograd
from tests.killable_ranks import Forked

STEPS, SAVE_EVERY, KILLS_OF_A_RUN = 24, 3, 6
JOB = (
    f"train --lower=eager --layers=1 --width=8 --heads=2 --context=8 --batch=2 --steps={STEPS} --validate-every=8 "
    f"--save-every={SAVE_EVERY} --keep=2"
).split()
LIMIT = 90.0  # seconds in which the ranks that are left must end
START = 20.0  # seconds in which all ranks must have started: what a launcher that ends the others stands in for


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, act: Callable[..., Any], nth: int) -> None:
    """The nth call of this function begins with ``act``, given the call's arguments."""
    function, calls = getattr(owner, name), [0]

    def call(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            act(*args, **named)
        return function(*args, **named)

    setattr(owner, name, call)


def soon(seconds: float) -> Callable[..., None]:
    """Dies a little later, in the middle of what runs then."""
    return lambda *_, **__: threading.Timer(seconds, die).start()


def half_written(path: Path, parts: list[memoryview], *_: Any) -> None:
    Path(path).write_bytes(bytes(parts[0][: len(parts[0]) // 2]))
    die()


def pruned(path: Path) -> None:
    """Between the removed checkpoint's renaming and its removal."""
    os.rename(path, path.with_name(f".{path.name}.00000000"))
    die()


# Where a rank can be killed; each is installed in the rank that is to die. True: only rank 0 comes there.
PHASES: dict[str, tuple[bool, Callable[[random.Random], None]]] = {
    "step": (False, lambda draw: before(Sharded, "step", soon(draw.uniform(0, 0.02)), draw.randint(1, 8))),
    "starting": (False, lambda draw: soon(draw.uniform(0, 3))()),
    "any time": (False, lambda draw: soon(draw.uniform(0, 8))()),
    "save": (False, lambda draw: before(saving, "_writers", lambda *_: die(), draw.randint(1, 2))),
    "writer": (False, lambda draw: before(data_file, "write", half_written, draw.randint(1, 3))),
    "written": (False, lambda draw: before(writing, "part_of", lambda *_: die(), draw.randint(1, 2))),
    "renaming": (True, lambda draw: before(folder, "commit", lambda *_: die(), draw.randint(1, 2))),
    "renamed": (True, lambda draw: before(folder, "remove", lambda *_: die(), draw.randint(1, 2))),
    "pruning": (True, lambda draw: before(folder, "remove", pruned, draw.randint(1, 2))),
    "saved": (True, lambda draw: before(writing, "_linger", lambda *_: die(), draw.randint(1, 2))),
    "loading": (False, lambda draw: before(loading, "write", lambda *_: die(), 1)),
    "validating": (False, lambda draw: before(train.Training, "validate", soon(draw.uniform(0, 0.05)), 1)),
    "finishing": (False, lambda draw: before(train.Training, "finish", soon(draw.uniform(0, 0.1)), 1)),
}


@dataclass
class Trial:
    """One run, with its kills so far."""

    root: Path
    text: Path
    world: int
    more: list[str] = field(default_factory=list)  # arguments
    killed: list[str] = field(default_factory=list)
    logs: int = 0

    def attempt(self, phase: str | None, draw: random.Random) -> bool:
        """Starts the job; True if it came to its end. Raises where it should have."""
        victim, install = None, None
        if phase is not None:
            alone, install = PHASES[phase]
            victim = 0 if alone else draw.randrange(self.world)
        self.logs += 1
        logs = self.root / f"logs-{self.logs}"
        job = [*JOB, "--data", str(self.text), "--out", str(self.root / "run")]
        job += ["--checkpoint", str(self.root / "saved"), *self.more]

        def work(rank: int) -> int:
            device_mesh.own_store = partial(device_mesh.own_store, limit=START)
            if rank == victim and install is not None:
                install(draw)
            return cli.main(job)

        ranks = Forked(self.world, work, logs)
        since = time.monotonic()
        if not ranks.wait(300, lambda codes: any(codes) or None not in codes):
            raise AssertionError(f"no end: {self._said(ranks)}")
        ended = ranks.wait(LIMIT)
        codes = list(ranks.codes)
        ranks.kill()
        what = f"attempt {self.logs}: rank {victim}, {phase}: {codes} after {time.monotonic() - since:.1f} s"
        print(what, flush=True)
        if not any(codes):
            return True
        if victim is None or codes[victim] != -signal.SIGKILL or not ended:
            raise AssertionError(f"{what}\n{self._said(ranks)}")
        self.killed.append(phase or "")
        return False

    def _said(self, ranks: Forked) -> str:
        return "\n".join(f"rank {rank}: ...{ranks.said(rank)[-3000:]}" for rank in range(self.world))

    def result(self) -> dict[str, Any]:
        """All of a run that must not depend on kills."""
        run = self.root / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        names = ("step", "loss", "val_loss", "grad_norm", "lr")
        summary = json.loads((run / "result.json").read_text())
        return {
            "journal": [[line.get(name) for name in names] for line in lines],
            "weights": {name: tensor.tolist() for name, tensor in torch.load(run / "model.pt").items()},
            "sample": (run / "sample.txt").read_text(),
            "summary": [summary["validation_loss"], summary["train_loss"]],
            "checkpoints": folder.steps(self.root / "saved"),
        }


def warm() -> None:
    """Imports all that a job imports, once for all forks."""
    import matplotlib.pyplot  # noqa: F401
    import torch.utils.tensorboard

    from fsdp_compiled import Policy, compile_sharded
    from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss

    train.SAMPLE_BYTES = 20
    if not forks_after_autograd():
        return
    model = GPT(GPTConfig(1, 8, 2, 8))
    sharded = compile_sharded(
        model, torch.optim.AdamW(model.parameters()), loss=next_byte_loss, policy=Policy(lower="eager")
    )
    sharded.step(*torch.zeros(2, 2, 8, dtype=torch.int64))


def run(trial: Trial, phases: list[str], draw: random.Random) -> list[str]:
    """Kills in these phases, then lets the run end; the phases in which a rank was killed."""
    for phase in phases:
        if trial.attempt(phase, draw):
            return trial.killed
    if not trial.attempt(None, draw):
        raise AssertionError("a run that nobody killed did not end")
    return trial.killed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--phases", help="one kill in each of these, in this order")
    chosen = parser.parse_args(argv)
    draw = random.Random(chosen.seed)
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    text = root / "text.txt"
    text.write_text("".join(f"line {number} of the text, which says little\n" for number in range(60)))
    warm()
    undisturbed = Trial(root / "undisturbed", text, chosen.world)
    run(undisturbed, [], draw)
    expected = undisturbed.result()
    assert [line[0] for line in expected["journal"]] == list(range(1, STEPS + 1))
    done, number = 0, 0
    wanted = chosen.phases.split(",") if chosen.phases else None
    while done < (len(wanted) if wanted else chosen.count):
        if wanted:
            phases = wanted
        else:
            several = min(KILLS_OF_A_RUN, chosen.count - done)
            phases = [
                draw.choice([phase for phase in PHASES if index or phase != "loading"]) for index in range(several)
            ]
        number += 1
        trial = Trial(root / f"run-{number}", text, chosen.world)
        killed = run(trial, phases, draw)
        result = trial.result()
        odd = [name for name in expected if result[name] != expected[name]]
        print(f"run {number}: killed in {', '.join(killed) or 'nothing'}: {odd or 'equal'}", flush=True)
        if odd:
            shown = (f"{name}:\n{expected[name]}\n{result[name]}" for name in odd if name != "weights")
            print(f"--seed {chosen.seed}; see {root}", *shown, sep="\n")
            return 1
        done += len(killed)
        if wanted:
            if killed != wanted:
                print(f"expected kills in {wanted}")
                return 1
            break
    print(f"{done} kills in {number} runs: each ended as the undisturbed run", flush=True)
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
