"""What a run says at its end: a sample of text, its results, where the time went, and the files that it wrote: the loss
curve, the summary, and how it was made.

Losses that the host has not read yet, and the ranks whose loss was no number.

A step returns its loss on the device; reading it makes the host wait. So losses are kept until the journal wants one.
Then all of them are read in one transfer: the mean over the ranks, this rank's own, the gradient's norm. The mean and
the norm are the same on every rank, so all see in the same step that one is not finite. Only then do ranks ask each
other whose it was.

Text from the model, one byte at a time.

The model runs on a window of one fixed shape [rows, context], so it is compiled once. A prediction reads only what
stands before it, so the rest of the window does not matter. Rows continue the same prompt, each with its own draws.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_compiled.analysis.best_effort import attempt
from fsdp_compiled.cli import clock
from fsdp_compiled.cli.journal import EXTRA, Journal, Record
from fsdp_compiled.cli.machine import versions
from fsdp_compiled.cli.options import TrainOptions


def curve(records: Sequence[Record], unigram: float, path: Path) -> bool:
    """Draws train and validation loss over steps, with the byte-unigram model as the line to beat; says if it could."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {path.name} in this run: matplotlib is not installed ({EXTRA})", flush=True)
        return False
    matplotlib.use("Agg")

    def say(why: str) -> bool:
        print(f"no {path.name} in this run: {why}", flush=True)
        return False

    return attempt(lambda: _draw(records, unigram, path), say)


def _draw(records: Sequence[Record], unigram: float, path: Path) -> bool:
    from matplotlib import pyplot as plt

    counted = [record for record in records if math.isfinite(record.loss)]
    steps = [record.step for record in counted]
    losses = [record.loss for record in counted]
    validated = [record for record in records if record.val_loss is not None]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8)
    axes.plot(steps, smooth(losses), color="#2171b5", linewidth=1.8, label="training, smoothed")
    axes.plot(
        [record.step for record in validated],
        [record.val_loss for record in validated],
        color="#d94801",
        marker="o",
        markersize=4,
        linewidth=1.4,
        label="validation",
    )
    axes.axhline(unigram, color="#555555", linestyle="--", linewidth=1.2, label="byte unigram, validation")
    ends = [(unigram, "#555555")]
    ends += [(record.val_loss, "#d94801") for record in validated[-1:] if record.val_loss is not None]
    for loss, color in ends:  # its value, right of where each line ends
        at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(f"{loss:.2f}", (1, loss), (4, 0), color=color, va="center", **at)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", xlim=(0, max(steps, default=1)))
    axes.set_ylim(bottom=max(0.0, min([*losses, unigram], default=0) - 0.3))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def smooth(losses: Sequence[float]) -> list[float]:
    """Exponential mean over about a fiftieth of the run, corrected for its start, where few values count."""
    new = 1 / max(1.0, len(losses) / 50)
    means, mean, weight = [], 0.0, 0.0
    for loss in losses:
        mean, weight = mean + new * (loss - mean), weight + new * (1 - weight)
        means.append(mean / weight)
    return means


def table(rows: Sequence[tuple[str, str]]) -> str:
    left = max(len(name) for name, _ in rows)
    right = max(len(value) for _, value in rows)
    rule = "─" * (left + right + 4)
    return "\n".join([rule, *(f" {name:<{left}}  {value:>{right}} " for name, value in rows), rule])


def printable(text: str) -> str:
    """What a model writes may hold any byte; a terminal must not obey it."""
    shown = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "".join(shown)


def configuration(options: TrainOptions, **facts: object) -> dict[str, object]:
    """For config.json: everything needed to know what was run, and to run it again."""
    chosen = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    return {
        "command": ["fsdp-compiled", *sys.argv[1:]],
        "options": chosen,
        **facts,
        "versions": versions(),
    }


def samples(texts: Sequence[bytes], prompt: bytes, out: Path) -> str:
    """Writes the texts to ``sample.txt``; returns the first, to print."""
    written = [text.decode("utf-8", errors="replace") for text in texts]
    rule = "\n\n" + "─" * 40 + "\n\n"
    (out / "sample.txt").write_text(rule.join(written) + "\n")
    lines = "\n".join("    " + line for line in printable(written[0]).split("\n"))
    return f"\na sample, which continues {prompt.decode('utf-8', errors='replace')!r}:\n\n{lines}"


def results(
    journal: Journal, speed: float, first: float, unigram: float, memory: int, skipped: int, seconds: float, out: Path
) -> str:
    """Writes the results to ``result.json``; returns their table, to print. ``speed``: tokens a second. ``first``:
    seconds of the first step. ``memory``: a rank's peak. ``seconds``: of all."""
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
    """Where the time went, from the journal of attempts, and the names of all files."""
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
    """What was not finite in this step, and on which ranks. Every rank has to ask."""
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
