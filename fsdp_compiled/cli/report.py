"""What a run leaves to look at: the loss curve, the summary, and how it was made."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fsdp_compiled.analysis.best_effort import attempt
from fsdp_compiled.cli.journal import EXTRA, Record
from fsdp_compiled.cli.machine import versions
from fsdp_compiled.cli.options import TrainOptions


def curve(records: Sequence[Record], unigram: float, path: Path) -> bool:
    """Draws train and validation loss over steps, with the byte-unigram model as the line to beat; whether it could."""
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
