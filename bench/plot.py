"""Figures as pictures: of a contest, a row a result, CPU time and peak memory side by side; of losses, over tokens and
over bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.summary import BASELINE, Result, Row, rows

OURS, SHARDS, WHOLE = "#d94801", "#2171b5", "#9e9e9e"


def plot(results: Sequence[tuple[str, Result]], path: Path) -> bool:
    """One picture of several results, each with its title."""
    if not _can_draw(path):
        return False
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    most = max(len(result["rivals"]) for _, result in results)
    figure, grid = plt.subplots(
        len(results), 2, figsize=(11, len(results) * (0.9 + 0.32 * most) + 0.4), layout="constrained", squeeze=False
    )
    for (title, result), (left, right) in zip(results, grid):
        shown = [row for row in rows(result) if row.cpu is not None]
        _times(left, shown)
        _memory(right, shown)
        left.set_title(title, loc="left", fontsize=10)
    legend = [
        Patch(color=OURS, label="this package"),
        Patch(color=SHARDS, label="shards"),
        Patch(color=WHOLE, label="shards nothing"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def plot_losses(policies: Mapping[str, Mapping[str, Any]], tokens: int, path: Path) -> bool:
    """Of `bench.fewer_bytes`: each policy's losses over what it was trained on, ``tokens`` a step and rank, and over
    what a rank sent till then."""
    if not _can_draw(path):
        return False
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
    for name, one in policies.items():
        steps, losses = [int(step) for step in one["losses"]], list(one["losses"].values())
        style = {"label": name, "linewidth": 1.2, "marker": "o" if len(steps) < 20 else "", "markersize": 3}
        left.plot([step * tokens / 1e6 for step in steps], losses, **style)
        right.plot([step * one["bytes a step"] / 1e6 for step in steps], losses, **style)
    right.set_xscale("log")
    left.set_ylabel("loss of held-out text", fontsize=8)
    for axes, label in ((left, "million tokens of a rank"), (right, "million bytes that a rank has sent")):
        axes.set_xlabel(label, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def _can_draw(path: Path) -> bool:
    try:
        import matplotlib
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed (pip install 'fsdp-compiled[bench]')", flush=True)
        return False
    matplotlib.use("Agg")
    return True


def _color(row: Row) -> str:
    if row.name.startswith("ours"):
        return OURS
    return SHARDS if row.name.startswith("fsdp2") else WHOLE


def _times(axes: Any, shown: Sequence[Row]) -> None:
    spreads = [row.cpu for row in shown if row.cpu is not None]
    middles = [1e3 * spread.middle for spread in spreads]
    below = [1e3 * (spread.middle - spread.low) for spread in spreads]
    above = [1e3 * (spread.high - spread.middle) for spread in spreads]
    axes.barh(range(len(shown)), middles, color=[_color(row) for row in shown], height=0.7)
    axes.errorbar(
        middles, range(len(shown)), xerr=(below, above), fmt="none", ecolor="black", elinewidth=1, capsize=2.5
    )
    most = max(value + up for value, up in zip(middles, above))
    for index, (row, value, up) in enumerate(zip(shown, middles, above)):
        times = "" if row.cpu_ratio is None else f"  ({row.cpu_ratio:.2f} ×)"
        _say(axes, index, value + up, most, f"{value:.{1 if value < 100 else 0}f}{times}")
    _finish(axes, shown, most, f"CPU time of a step, ms a rank (× {BASELINE})")
    axes.set_yticks(range(len(shown)), [row.title for row in shown], fontsize=8)


def _memory(axes: Any, shown: Sequence[Row]) -> None:
    values = [(row.peak_bytes or 0) / 2**20 for row in shown]
    axes.barh(range(len(shown)), values, color=[_color(row) for row in shown], height=0.7)
    for index, (row, value) in enumerate(zip(shown, values)):
        times = "" if row.peak_ratio is None else f"  ({row.peak_ratio:.2f} ×)"
        _say(axes, index, value, max(values), f"{value:.{1 if value < 100 else 0}f}{times}")
    _finish(axes, shown, max(values), f"peak memory of a rank, MiB (× {BASELINE})")
    axes.set_yticks(range(len(shown)), [""] * len(shown))


def _say(axes: Any, index: int, at: float, most: float, text: str) -> None:
    axes.text(at + 0.015 * most, index, text, va="center", fontsize=7.5)


def _finish(axes: Any, shown: Sequence[Row], most: float, label: str) -> None:
    axes.set_xlim(0, most * 1.22)  # room for the numbers
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
