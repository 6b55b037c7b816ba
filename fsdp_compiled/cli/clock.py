"""Where the time of a run goes, over all of its attempts.

An *attempt* is one start of the job; a run that was killed and resumed has several. At every moment an attempt is doing
one thing, so that the parts add up to its wall time:

    starting     until the first step: imports, the process group, the model; what no other part has
    training     steps, the losses' reading and the journal
    compiling    steps that captured and compiled
    validating   held-out windows, the sample, what is written at the end
    saving       what training waited for a checkpoint; its writing goes on beside the steps
    restoring    loading a checkpoint
    waiting      for the next batch, and for other ranks between steps

attempts.jsonl in the run folder has a line for each attempt that began and one for each record of the journal. It is
never rewritten, so it also has what a killed attempt did after its last checkpoint. *Goodput* is the share of all the
time since the run began that went into steps that count: neither repeated after a failure nor spent on anything else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

FILE = "attempts.jsonl"
PARTS = ("starting", "training", "compiling", "validating", "saving", "restoring", "waiting")


class Clock:
    """The parts of one attempt, in seconds."""

    def __init__(self, began: float) -> None:
        """``began``: seconds since the epoch."""
        self._seconds = dict.fromkeys(PARTS, 0.0) | {"starting": max(0.0, time.time() - began)}
        self._part, self._since = "starting", time.perf_counter()

    def enter(self, part: str) -> str:
        """Counts time for this part from now on; returns the part before."""
        now = time.perf_counter()
        self._seconds[self._part] += now - self._since
        before, self._part, self._since = self._part, part, now
        return before

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, source: str, part: str, seconds: float) -> None:
        """Moves time that was counted for one part to another, to which it turned out to belong."""
        self._seconds[source] -= seconds
        self._seconds[part] += seconds

    @property
    def seconds(self) -> dict[str, float]:
        self.enter(self._part)
        return dict(self._seconds)


class Attempts:
    """Writes attempts.jsonl; owned by rank 0."""

    def __init__(self, out: Path, clock: Clock, world: int, step: int) -> None:
        """``step``: the step after which this attempt goes on."""
        self._clock = clock
        self._file = (out / FILE).open("a")
        print(file=self._file)  # ends a line that the attempt before did not end, being killed or out of room
        self._write({"began": time.time() - sum(clock.seconds.values()), "world": world, "step": step})
        self.add(step)

    def add(self, step: int, ended: str | None = None) -> None:
        """``ended``: how it ended, if this is the attempt's last word."""
        seconds = {part: round(value, 4) for part, value in self._clock.seconds.items()}
        self._write({"now": time.time(), "step": step, "seconds": seconds} | ({"ended": ended} if ended else {}))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._file, flush=True)


@dataclass(frozen=True)
class Spent:
    """A run's time, in seconds."""

    parts: dict[str, float]  # with "repeated", steps that were trained again, and "down", between attempts
    attempts: int
    ends: tuple[str, ...]  # how each attempt ended; "" where it did not say

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def goodput(self) -> float:
        return self.parts["training"] / self.total if self.total else 0.0


def read(out: Path) -> Spent | None:
    """What attempts.jsonl says; None if there is none. A line that a kill cut off is passed over."""
    try:
        text = (out / FILE).read_text()
    except OSError:
        return None
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    starts = [index for index, line in enumerate(lines) if "began" in line]
    attempts = [lines[first:last] for first, last in pairwise([*starts, len(lines)])]
    return _sum(attempts) if attempts else None


def _sum(attempts: Sequence[Sequence[dict[str, Any]]]) -> Spent:
    parts = dict.fromkeys((*PARTS, "repeated", "down"), 0.0)
    for attempt in attempts:
        for part, seconds in attempt[-1].get("seconds", {}).items():
            parts[part] = parts.get(part, 0.0) + seconds
    for before, after in pairwise(attempts):
        parts["down"] += max(0.0, after[0]["began"] - before[-1].get("now", before[0]["began"]))
        lost = _training(before[-1]) - _training_until(before, after[0]["step"])
        parts["training"] -= lost
        parts["repeated"] += lost
    return Spent(parts, len(attempts), tuple(attempt[-1].get("ended", "") for attempt in attempts))


def _training(line: dict[str, Any]) -> float:
    return float(line.get("seconds", {}).get("training", 0.0))


def _training_until(attempt: Sequence[dict[str, Any]], step: int) -> float:
    """How long the attempt had trained when it had made this step."""
    return max((_training(line) for line in attempt if line["step"] <= step), default=0.0)


def rows(spent: Spent) -> list[tuple[str, str]]:
    """For a table: the parts that took any time, longest first, and the goodput."""
    names = {"training": "training: steps that count", "repeated": "steps that a failure made repeat"}
    names |= {"down": "between attempts", "starting": "starting, with imports"}
    parts = sorted(spent.parts.items(), key=lambda part: -part[1])
    found = [
        (names.get(part, part), f"{seconds:,.1f} s  {seconds / spent.total:6.1%}")
        for part, seconds in parts
        if seconds >= 0.05
    ]
    attempts = f"{spent.attempts} attempt{'s' * (spent.attempts != 1)}"
    if spent.ends and not spent.ends[-1]:
        found.append(("the last attempt runs, or was killed", "up to its last line in the journal"))
    return [*found, (f"goodput, of {attempts}", f"{spent.total:,.1f} s  {spent.goodput:6.1%}")]
