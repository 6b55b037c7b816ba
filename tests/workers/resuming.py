"""`train` stopped, killed, and gone on with on other numbers of ranks; ranks are forks of this process.

resuming.py RESULT [WORLD ...], in a process of its own; the last are other numbers of ranks
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled import Sharded, cli
from fsdp_compiled.cli import show, train
from tests.killable_ranks import Forked
from tests.kills import JOB, Trial, before, run, warm

# At moments in them that are drawn from a seed; all that there are in `make test-all`, and by tests/kills.py.
KILLS = ["loading", "step", "writer", "renamed"] if os.environ.get("ALL_TESTS") else ["renamed"]
ROOT = Path(tempfile.mkdtemp(prefix="resuming-"))
TEXT = ROOT / "text.txt"


def attempt(world: int, name: str, *more: str, prepare: Any = lambda rank: None) -> dict[str, Any]:
    """One start of the job in its own folder: exit codes, and what the ranks said."""

    def work(rank: int) -> int:
        prepare(rank)
        return cli.main([*JOB, "--data", str(TEXT), "--out", str(ROOT / name / "run"), *more])

    ranks = Forked(world, work, ROOT / name / "logs")
    ranks.wait(200)
    ranks.kill()
    return {"codes": ranks.codes, "said": [ranks.said(rank) for rank in range(world)]}


def preempted(trial: Trial) -> dict[str, Any]:
    """SIGTERM reaches rank 1 alone, in its fifth step."""

    def prepare(rank: int) -> None:
        if rank == 1:
            before(Sharded, "step", lambda *_: os.kill(os.getpid(), signal.SIGTERM), 5)

    name = trial.root.name
    return attempt(2, name, "--checkpoint", str(trial.root / "saved"), prepare=prepare)


def elsewhere(world: int) -> dict[str, Any]:
    """From step 3 of the undisturbed run, on another number of ranks: the losses after it."""
    name = f"on-{world}"
    shutil.copytree(ROOT / "undisturbed" / "saved", ROOT / name / "saved", ignore=lambda folder, names: [
        entry for entry in names if entry.startswith("step-") and entry != "step-3"
    ])  # fmt: skip
    answer = attempt(world, name, "--checkpoint", str(ROOT / name / "saved"))
    return answer | {"journal": journal(name)}


def journal(name: str) -> list[list[float]]:
    lines = (ROOT / name / "run" / "metrics.jsonl").read_text().splitlines()
    return [[json.loads(line)[key] for key in ("step", "loss", "grad_norm", "lr")] for line in lines]


def nonfinite(world: int, name: str, choice: str) -> dict[str, Any]:
    """The last rank's loss is no number in its fifth step."""

    def prepare(rank: int) -> None:
        factor, loss = torch.ones(()), train.next_byte_loss
        train.next_byte_loss = lambda *given: loss(*given) * factor  # type: ignore[assignment]
        if rank == world - 1:
            before(Sharded, "step", lambda *_: factor.fill_(torch.nan), 5)
            before(Sharded, "step", lambda *_: factor.fill_(1.0), 6)

    saved = ["--checkpoint", str(ROOT / name / "saved")]
    answer = attempt(world, name, "--steps=8", "--on-nonfinite", choice, *saved, prepare=prepare)
    result = ROOT / name / "run" / "result.json"
    return answer | {"result": json.loads(result.read_text()) if result.exists() else None}


def main(result: Path, worlds: list[int]) -> None:
    TEXT.write_text("".join(f"line {number} of the text, which says little\n" for number in range(60)))
    warm()
    answer: dict[str, Any] = {}
    draw = random.Random(0)
    undisturbed = Trial(ROOT / "undisturbed", TEXT, 2, ["--keep=100"])
    run(undisturbed, [], draw)
    disturbed = Trial(ROOT / "disturbed", TEXT, 2)
    answer["preempted"] = preempted(disturbed)
    answer["after"] = sorted(int(path.name[5:]) for path in (disturbed.root / "saved").glob("step-*"))
    answer["killed"] = run(disturbed, KILLS, draw)
    both = [trial.result() for trial in (undisturbed, disturbed)]
    for one in both:
        del one["checkpoints"]
    answer["equal"] = {name: both[0][name] == both[1][name] for name in both[0]}
    answer["shown"] = show.show(disturbed.root / "run")
    answer["journal"] = journal("undisturbed")
    answer["elsewhere"] = {str(world): elsewhere(world) for world in worlds}
    answer["skip"] = nonfinite(2, "skip", "skip")
    answer["stop"] = nonfinite(1, "stop", "stop")
    result.write_text(json.dumps(answer))
    shutil.rmtree(ROOT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(world) for world in sys.argv[2:]])
