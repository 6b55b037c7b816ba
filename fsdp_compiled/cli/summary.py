"""What a run says at its end: a sample of text, its results, where the time went, and what it wrote.

Losses that the host has not read yet, and which rank's was no number.

A step returns its loss on the device; reading it makes the host wait. So losses are kept until the journal wants one,
and then all that are kept are read in one transfer: the mean over the ranks, this rank's own, the gradient's norm. The
mean and the norm are the same on every rank, so that all see in the same step that one is not finite, and only then ask
each other whose it was.

Text from the model, one byte at a time.

The model runs on a window of one fixed shape [rows, context], so it is compiled once; a prediction reads only
what stands before it, so what fills the window up does not matter. Rows continue the same prompt, each with
its own draws.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_compiled.cli import clock
from fsdp_compiled.cli.journal import Journal
from fsdp_compiled.cli.report import printable, table


def samples(texts: Sequence[bytes], prompt: bytes, out: Path) -> str:
    """Writes them to ``sample.txt``; the first, to print."""
    written = [text.decode("utf-8", errors="replace") for text in texts]
    rule = "\n\n" + "─" * 40 + "\n\n"
    (out / "sample.txt").write_text(rule.join(written) + "\n")
    lines = "\n".join("    " + line for line in printable(written[0]).split("\n"))
    return f"\na sample, which continues {prompt.decode('utf-8', errors='replace')!r}:\n\n{lines}"


def results(
    journal: Journal, speed: float, first: float, unigram: float, memory: int, skipped: int, seconds: float, out: Path
) -> str:
    """Writes them to ``result.json``; the table of them, to print. ``speed``: tokens a second. ``first``: seconds of
    the first step. ``memory``: a rank's peak. ``seconds``: of all."""
    result = {
        "validation_loss": journal.val_loss,
        "unigram_loss": unigram,
        "train_loss": journal.train_loss,
        "tokens_per_second": speed,
        "first_step_seconds": first,
        "peak_memory_bytes": memory,
        "skipped_steps": skipped,
        "wall_seconds": seconds,
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    rows = [
        ("validation loss", _nats(journal.val_loss)),
        ("byte-unigram model's validation loss", _nats(unigram)),
        ("training loss, last steps", _nats(journal.train_loss)),
        ("speed", f"{speed:,.0f} tokens/s"),
        ("first step, with compilation", f"{first:.1f} s"),
        ("peak memory of a rank", f"{memory / 2**30:.2f} GiB"),
        ("wall time", f"{seconds:.0f} s"),
    ]
    return f"\n{table(rows)}\n"


def written(out: Path) -> str:
    """Where the time went, as the journal of attempts has it, and the names of all files."""
    spent = clock.read(out)
    names = ", ".join(sorted(path.name + "/" * path.is_dir() for path in out.iterdir()))
    took = f"where the time went:\n{table(clock.rows(spent))}\n\n" if spent is not None else ""
    return f"{took}wrote {names} in\n{out}"


def _nats(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f} nats/byte"


@dataclass(frozen=True)
class Read:
    """One step's numbers, on the host."""

    step: int
    loss: float
    grad_norm: float
    own: tuple[float, ...]  # this rank's losses, one a microbatch

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Unread:
    """The numbers of steps whose losses were not read yet."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, list[Tensor]]] = []

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, own: Sequence[Tensor]) -> None:
        # A copy: under CUDA graphs the next step may write into what this one returned.
        self._steps.append((step, [tensor.detach().clone() for tensor in (loss, grad_norm, *own)]))

    def read(self) -> list[Read]:
        """Oldest first; the host waits for the device once."""
        if not self._steps:
            return []
        tensors = [tensor.double() for _, numbers in self._steps for tensor in numbers]
        values = iter(torch.stack(tensors).tolist())
        found = []
        for step, numbers in self._steps:
            loss, norm, *own = (next(values) for _ in numbers)
            found.append(Read(step, loss, norm, tuple(own)))
        self._steps.clear()
        return found


def blame(read: Read, exchange: Callable[[Any], list[Any]]) -> str:
    """What was not finite in this step, and on which ranks; every rank asks."""
    odd = exchange(next((own for own in read.own if not math.isfinite(own)), None))
    ranks = [f"rank {rank} ({value})" for rank, value in enumerate(odd) if value is not None]
    if ranks:
        return f"the loss is {read.loss} at step {read.step}: it is not finite on {_list(ranks)}"
    what = f"the gradient's norm is {read.grad_norm}" if math.isfinite(read.loss) else f"the loss is {read.loss}"
    return f"{what} at step {read.step}, though each rank's own loss is finite"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


TEMPERATURE = 0.8
LETTERS = re.compile(rb"[A-Za-z\x80-\xff]")  # beyond ASCII, any byte of a UTF-8 letter


def generate(
    forward: Callable[[Tensor], Tensor], prompt: bytes, shape: tuple[int, int], length: int, seed: int
) -> list[bytes]:
    """`shape[0]` continuations of the prompt, `length` bytes each. Collective, as `forward` is.

    forward: tokens [rows, context] int64 -> logits [rows, context, 256].
    """
    rows, context = shape
    if not prompt:
        raise ValueError("the prompt is empty; give at least one byte")
    draws = torch.Generator().manual_seed(seed)
    text = torch.tensor(list(prompt)).repeat(rows, 1)  # [rows, bytes so far]
    for _ in range(length):
        window = torch.zeros(shape, dtype=torch.long)
        seen = text[:, -context:]
        window[:, : seen.shape[1]] = seen
        logits = forward(window)[:, seen.shape[1] - 1].float().cpu()
        following = torch.multinomial(torch.softmax(logits / TEMPERATURE, -1), 1, generator=draws)
        text = torch.cat((text, following), dim=1)
    return [bytes(row) for row in text.tolist()]


def first_line(held_out: Tensor) -> bytes:
    """The first line of the held-out text with at least ten letters in it, cut to 40 bytes: a prompt in the
    text's own manner. held_out [bytes] uint8."""
    start = bytes(held_out[:10_000].tolist())
    lines = (line.rstrip()[:40] for line in start.splitlines())
    return next((line for line in lines if len(LETTERS.findall(line)) >= 10), start[:40])
