"""What a run records of each logged step: a line of metrics.jsonl and, where it is installed, TensorBoard's
events.

metrics.jsonl is flushed line by line, so a run that ends badly has told all it knew. A run that goes on from a
checkpoint goes on in the same file, without the lines of steps that it makes again.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

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


@contextmanager
def whole_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file that is at ``path`` once all of it is written and on disk; else what was there is."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


class Journal:
    """Owned by rank 0."""

    def __init__(self, out: Path, step: int = 0) -> None:
        """``step``: after which the run goes on; what the folder tells of later ones is forgotten."""
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
        """Before a checkpoint: the lines up to its step outlive the machine, as it does."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    @property
    def val_loss(self) -> float | None:
        """The latest."""
        return next((record.val_loss for record in reversed(self.records) if record.val_loss is not None), None)

    @property
    def train_loss(self) -> float | None:
        """The mean over the last twenty records: one step's loss says more of its batch than of the model. Without
        those of steps that were skipped."""
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
