"""What a run records of each logged step: a line of metrics.jsonl and, where it is installed, TensorBoard's
events.

metrics.jsonl is flushed line by line, so a run that ends badly has told all it knew.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EXTRA = "pip install 'fsdp-compiled[train]'"


@dataclass(frozen=True)
class Record:
    step: int
    loss: float  # nats a byte, averaged over ranks
    val_loss: float | None  # the same on the held-out windows, at the steps that validate
    grad_norm: float  # before clipping
    lr: float
    tokens_per_second: float  # all ranks together, without compilation and validation; 0 at the first step
    peak_memory: int  # bytes, of rank 0
    seconds: float  # since the run began


class Journal:
    """Owned by rank 0."""

    def __init__(self, out: Path) -> None:
        self.records: list[Record] = []
        self._file = (out / "metrics.jsonl").open("w")
        self._events = _event_writer(out / "tensorboard")

    def add(self, record: Record) -> None:
        self.records.append(record)
        fields = {name: value for name, value in asdict(record).items() if value is not None}
        print(json.dumps(fields), file=self._file, flush=True)
        if self._events is not None:
            del fields["step"]
            for name, value in fields.items():
                self._events.add_scalar(name, value, record.step)

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
        """The mean over the last twenty records: one step's loss says more of its batch than of the model."""
        last = [record.loss for record in self.records[-20:]]
        return sum(last) / len(last) if last else None


def _event_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print(f"no tensorboard/ in this run: the package is not installed ({EXTRA})", flush=True)
        return None
    return SummaryWriter(str(folder))
