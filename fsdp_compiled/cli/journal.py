"""What a run records of each logged step, and what rank 0 prints of it.

A step is a line of metrics.jsonl and, where it is installed, TensorBoard's events.

metrics.jsonl is flushed line by line, so a run that ends badly has told all it knew. A run that goes on from a
checkpoint goes on in the same file, without the lines of steps that it makes again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fsdp_compiled.capture.disk_cache import whole_file

EXTRA = "pip install 'fsdp-compiled[train]'"
FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Record:
    step: int
    loss: float  # nats a byte, averaged over ranks
    val_loss: float | None  # the same on the held-out windows, at the steps that validate
    grad_norm: float  # before clipping
    lr: float
    tokens_per_second: float  # all ranks together, without compilation and validation; 0 at the first step
    peak_memory: int  # bytes, of rank 0
    seconds: float  # since the run, or this attempt at it, began


class Journal:
    """Owned by rank 0."""

    def __init__(self, out: Path, step: int = 0) -> None:
        """``step``: the step after which the run goes on; what the folder has of later steps is dropped."""
        self.records = [record for record in read(out) if record.step <= step]
        with whole_file(out / FILE) as file:
            for record in self.records:
                print(_line(record), file=file)
        self._file = (out / FILE).open("a")
        self._events = _event_writer(out / "tensorboard", step)

    def add(self, record: Record) -> None:
        self.records.append(record)
        print(_line(record), file=self._file, flush=True)
        if self._events is not None:
            for name, value in _fields(record).items():
                if name != "step":
                    self._events.add_scalar(name, value, record.step)

    def sync(self) -> None:
        """Syncs before a checkpoint, so that the lines up to its step outlive the machine, as the checkpoint does."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    @property
    def val_loss(self) -> float | None:
        """The latest validation loss."""
        return next((record.val_loss for record in reversed(self.records) if record.val_loss is not None), None)

    @property
    def train_loss(self) -> float | None:
        """The mean over the last twenty records, since one step's loss says more of its batch than of the model. Steps
        that were skipped do not count."""
        last = [record.loss for record in self.records[-20:] if math.isfinite(record.loss)]
        return sum(last) / len(last) if last else None


def read(out: Path) -> list[Record]:
    """The records in a run folder, if there are any; a last line that a kill cut off is passed over."""
    try:
        lines = (out / FILE).read_text().splitlines()
    except OSError:
        return []
    found = []
    names = [field.name for field in fields(Record)]
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and set(names) - {"val_loss"} <= values.keys():
            known: dict[str, Any] = {name: values.get(name) for name in names}
            found.append(Record(**known))
    return found


def _line(record: Record) -> str:
    return json.dumps(_fields(record))


def _fields(record: Record) -> dict[str, float]:
    return {name: value for name, value in asdict(record).items() if value is not None}


def _event_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print(f"no tensorboard/ in this run: the package is not installed ({EXTRA})", flush=True)
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


EVERY = 5.0  # seconds between two lines of steps
COMPILING = "compiling %d of %d pieces"  # how the package's log says how far a step is compiled


class Progress:
    def __init__(self, steps: int, tokens: int, shown: bool = True) -> None:
        """``tokens``: of all ranks, in one step. ``shown``: False on the other ranks."""
        self._steps, self._tokens, self._shown = steps, tokens, shown
        self._said = 0.0  # when the last line of a step was printed

    def say(self, text: str) -> None:
        if self._shown:
            print(text, flush=True)

    def update(self, record: Record) -> None:
        now = time.monotonic()
        edge = record.step in (1, self._steps) or record.val_loss is not None
        if edge or now - self._said >= EVERY:
            self._said = now
            left = seconds_left(record, self._steps, self._tokens)
            numbers = [*_numbers(record), *[f"{_clock(left)} left"] * bool(left)]
            self.say(f"step {record.step:>{len(str(self._steps))}}/{self._steps}  {'  '.join(numbers)}")


class Compiling(logging.Handler):
    """Inside, the compiler's progress is printed too, at most every second."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress
        self._said = 0.0  # when the last line was printed

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if str(record.msg).startswith(COMPILING) and now - self._said >= 1:
            self._said = now
            self._progress.say(record.getMessage())
        elif record.levelno >= logging.WARNING and self._alone and logging.lastResort is not None:
            logging.lastResort.handle(record)  # as without this handler

    def __enter__(self) -> None:
        log = logging.getLogger("fsdp_compiled")
        self._alone = not log.hasHandlers()
        self._level = log.level
        log.addHandler(self)
        if log.getEffectiveLevel() > logging.INFO:
            log.setLevel(logging.INFO)

    def __exit__(self, *error: object) -> None:
        log = logging.getLogger("fsdp_compiled")
        log.removeHandler(self)
        log.setLevel(self._level)


def seconds_left(record: Record, steps: int, tokens: int) -> float:
    """What the remaining steps take at the speed so far, validations left out; 0 when it is not known."""
    return (steps - record.step) * tokens / record.tokens_per_second if record.tokens_per_second else 0.0


def _numbers(record: Record) -> list[str]:
    numbers = [f"loss {record.loss:.4f}"]
    numbers += [f"val {record.val_loss:.4f}"] if record.val_loss is not None else []
    numbers += [f"grad norm {record.grad_norm:.2f}", f"lr {record.lr:.1e}"]
    numbers += [f"{record.tokens_per_second:,.0f} tokens/s"] if record.tokens_per_second else []
    return [*numbers, f"{record.peak_memory / 2**30:.2f} GiB"]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
