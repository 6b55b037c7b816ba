"""Rewrites the tables of README.md, docs/ and bench/README.md from bench/results, and draws its two pictures there.

    python -m bench.tables

`run_all` does this after it has measured. A table stands between `<!-- bench: NAME -->` and `<!-- end -->`, where
NAME is `headline`, `summary`, `memory`, `goals`, `first-step`, `train`, `start-up`, `checkpoint`, `fewer-bytes`,
`many-ranks`, `starting`, `priced`, or a result's. What was not measured, they say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import RESULTS, checkpoint, fewer_bytes, many_ranks, muon, report, start_up, starting
from bench.plot import plot, plot_losses
from bench.rivals import RIVALS
from bench.summary import Row, ratio, rows

ROOT = RESULTS.parents[1]
_FILES = ("README.md", "docs/benchmarks.md", "docs/fully_shard.md", "docs/simulate.md", "bench/README.md")
DOCUMENTS = tuple(ROOT / name for name in _FILES)
PRESETS = ("thin", "small", "large", "llama")
FIRST_STEPS = ("thin-first-step", "thin-4-first-step")
CHECKPOINT = "checkpoint"
FEWER_BYTES = "fewer-bytes"
MANY_RANKS = "many-ranks"
STARTING = "starting"
NODES = ("far-nodes", "near-nodes")
PRICED = ("priced-thin", "priced-small", "priced-llama", "priced-large", *NODES)
HOSTS = ("hosts-llama", "hosts-large", "hosts-llama-slow")
MUON = ("muon-256", "muon-768", "muon-slow")
LOOPS = ("loop-thin", "loop-small")
LOOP_FIRST_STEP = "loop-first-step"
BLOCK = re.compile(r"(<!-- bench: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOTHING = "Not measured yet."
OURS = "ours"
HEADLINE = ("ddp-compile", "fsdp2", "fsdp2-compile", OURS)

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    figure: str
    most: float
    reached: Callable[[Results], float]  # raises LookupError where it was not measured


def _peak(result: Mapping[str, Any], name: str) -> float:
    return result["rivals"][name]["peak_bytes"]


def _first(result: Mapping[str, Any], cache: str) -> float:
    """Of processors, where that was measured: the two results that are compared are not of one run."""
    facts = result["rivals"][OURS]
    return facts.get("first_step_cpu", facts["first_step"])[cache]


def _fastest_that_shards(results: Results) -> float:
    """Against the best of them: the largest of our ratios."""
    measured = results["large"]["rivals"]
    others = [name for name, rival in RIVALS.items() if name in measured and rival.shards and not rival.ours]
    return max(ratio(results["large"], OURS, name) for name in others)


GOALS = (
    Goal("thin: CPU time of a step, against FSDP2", 0.2, lambda runs: ratio(runs["thin"], OURS, "fsdp2")),
    Goal(
        "thin: against DDP + torch.compile, which shards nothing",
        1.1,
        lambda runs: ratio(runs["thin"], OURS, "ddp-compile"),
    ),
    Goal("small: against FSDP2", 0.75, lambda runs: ratio(runs["small"], OURS, "fsdp2")),
    Goal("large: against the fastest rival that shards", 0.95, _fastest_that_shards),
    Goal(
        "large: peak memory of a rank, against FSDP2",
        0.9,
        lambda runs: _peak(runs["large"], OURS) / _peak(runs["large"], "fsdp2"),
    ),
    Goal(
        "first step, cold cache: 24 layers against 4 of the same width",
        1.5,
        lambda runs: _first(runs["thin-first-step"], "cold") / _first(runs["thin-4-first-step"], "cold"),
    ),
    Goal(
        "first step, thin: warm cache against cold",
        0.25,
        lambda runs: _first(runs["thin-first-step"], "warm") / _first(runs["thin-first-step"], "cold"),
    ),
)


def goals(results: Results) -> str:
    lines = ["| figure | at most | reached | |", "|---|---:|---:|---|"]
    for goal in GOALS:
        try:
            value = goal.reached(results)
        except LookupError:
            lines.append(f"| {goal.figure} | {goal.most:g} | not measured | |")
        else:
            lines.append(f"| {goal.figure} | {goal.most:g} | {value:.2f} | {_met(value, goal.most)} |")
    return "\n".join(lines)


def _met(value: float, most: float) -> str:
    return "met" if value <= most else "**missed**"


def _by_preset(results: Results, cell: Callable[[Row], str], names: Sequence[str] = ()) -> str:
    """A line a rival, a column a preset."""
    measured = {name: {row.name: row for row in rows(results[name])} for name in PRESETS if name in results}
    if not measured:
        return NOTHING
    lines = ["| | " + " | ".join(measured) + " |", "|---|" + "---:|" * len(measured)]
    for name in names or RIVALS:
        found = [by.get(name) for by in measured.values()]
        if any(found):
            lines.append(
                f"| {_title_of(name)} | "
                + " | ".join(cell(row) if row is not None else report.MISSING for row in found)
                + " |"
            )
    return "\n".join(lines)


def _title_of(name: str) -> str:
    title = RIVALS[name].title
    return f"**{title}**" if name == OURS else title


def _time(row: Row) -> str:
    if row.cpu is None:
        return report.MISSING
    times = "" if row.cpu_ratio is None else f" ({row.cpu_ratio:.2f} ×)"
    milliseconds = 1e3 * row.cpu.middle
    return f"{milliseconds:.{1 if milliseconds < 100 else 0}f} ms{times}"


def _memory(row: Row) -> str:
    if row.peak_bytes is None:
        return report.MISSING
    times = "" if row.peak_ratio is None else f" ({row.peak_ratio:.2f} ×)"
    return f"{row.peak_bytes / 2**20:.1f} MiB{times}"


def first_step(results: Results) -> str:
    lines = []
    for result in results.values():
        for facts in result["rivals"].values():
            if "first_step" in facts:
                first, layers = facts["first_step"], result["preset"]["layers"]
                warm = f"{first['warm']:.1f} s" if "warm" in first else "no cache"
                spent = facts.get("first_step_cpu", {})  # of processors, in results that have it
                both = [f"{spent[cache]:.1f} s" if cache in spent else report.MISSING for cache in ("cold", "warm")]
                lines.append(f"| {facts['title']} | {layers} | {first['cold']:.1f} s | {warm} | {' | '.join(both)} |")
    head = ["| | layers | cold | warm | processors, cold | warm |", "|---|---:|---:|---:|---:|---:|"]
    return "\n".join([*head, *lines]) if lines else NOTHING


def train(file: Path = RESULTS / "train.json") -> str:
    """What `make train` came to."""
    recorded = json.loads(file.read_text())
    result = recorded["result"]
    row = (
        f"| {result['validation_loss']:.2f} nats/byte | {result['unigram_loss']:.2f} nats/byte "
        f"| {result['first_step_seconds']:.0f} s | {result['tokens_per_second']:,.0f} tokens/s "
        f"| {result['wall_seconds']:.0f} s |"
    )
    head = "| validation loss | byte-unigram model's | first step, with compilation | after it | whole run |"
    described = f"{recorded['hardware']}, torch {recorded['versions']['torch']}."
    return "\n".join([head, "|---|---|---|---|---|", row, "", described])


def checkpoints(results: Results) -> str:
    """The tables of `--measure checkpoint`, and its goals by both clocks."""
    if CHECKPOINT not in results:
        return NOTHING
    measured = results[CHECKPOINT]["checkpoint"]
    lines = ["| figure | at most | wall time | | processor time | |", "|---|---:|---:|---|---:|---|"]
    for figure, most, what, to in checkpoint.GOALS:
        cells = []
        for clock in (0, 1):
            value = checkpoint.ratio(measured, "ours", what, to, clock)
            assert value is not None
            cells += [f"{value:.2f}", _met(value, most)]
        lines.append(f"| {figure} | {most:g} | {' | '.join(cells)} |")
    return "\n".join([checkpoint.describe(measured), "", *lines, "", _made_by(results[CHECKPOINT])])


def priced(results: Results) -> str:
    """What `simulate` says of steps on the host that measured them, and on a simulated network; a line a lowering."""
    head = [
        "| | measured | predicted | | peak measured | predicted | |", "|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    lines, made = [], dict[str, None]()
    for name in PRICED:
        for row in rows(results[name]) if name in results else ():
            said = results[name]["rivals"][row.name].get("simulated", {})
            if row.wall is None or row.peak_bytes is None or "peak_bytes" not in said:
                continue
            where = f"{name.removeprefix('priced-')}, {row.title.removeprefix('fsdp_compiled')}"
            time = _against(said["seconds"] * 1e3, row.wall.middle * 1e3, "ms")
            peak = _against(said["peak_bytes"] / 2**20, row.peak_bytes / 2**20, "MiB")
            lines.append(f"| {where} | {time} | {peak} |")
            made[_made_by(results[name])] = None
    return "\n".join([*head, *lines, "", *made]) if lines else NOTHING


def _against(said: float, found: float, unit: str) -> str:
    return f"{found:.1f} {unit} | {said:.1f} {unit} | {said / found - 1:+.0%}"


def _made_by(result: Mapping[str, Any]) -> str:
    return f"`{result['command']}`, {result['hardware']}, torch {result['versions']['torch']}."


def block(name: str, results: Results) -> str:
    """What stands between the markers."""
    if name == "headline":
        return _by_preset(results, _time, HEADLINE)
    if name == "summary":
        return _by_preset(results, _time)
    if name == "train":
        return train()
    if name == "start-up":
        file = RESULTS / "start-up.json"
        return start_up.describe(json.loads(file.read_text())) if file.exists() else NOTHING
    if name == "memory":
        return _by_preset(results, _memory)
    if name == "goals":
        return goals(results)
    if name == "priced":
        return priced(results)
    if name == "first-step":
        return first_step({one: results[one] for one in FIRST_STEPS if one in results})
    if name == LOOP_FIRST_STEP and name in results:
        return f"{first_step({name: results[name]})}\n\n{_made_by(results[name])}"
    if name == CHECKPOINT:
        return checkpoints(results)
    if name not in results:
        return NOTHING
    result = results[name]
    if name == MANY_RANKS:
        return f"{many_ranks.describe(result)}\n\n{_made_by(result)}"
    if name == STARTING:
        return f"{starting.describe(result)}\n\n{_made_by(result)}"
    if name == FEWER_BYTES:
        return f"{fewer_bytes.describe(result)}\n\n{_made_by(result)}"
    if name in MUON:
        return f"{muon.describe(result['muon'])}\n\n{_made_by(result)}"
    lines = [report.markdown(result), ""]
    if "conditions" in result:
        lines += [f"{report.describe(result)}.", ""]
    return "\n".join([*lines, f"`{result['command']}`"])


def fill(text: str, results: Results) -> str:
    """The document with every block made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{block(found[2], results)}\n{found[3]}", text)


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """The committed results of `fsdp-compiled bench`, by name."""
    names = [*PRESETS, *FIRST_STEPS, CHECKPOINT, FEWER_BYTES, MANY_RANKS, STARTING, *PRICED, *HOSTS, *MUON, *LOOPS]
    names.append(LOOP_FIRST_STEP)
    files = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def main() -> None:
    results = load()
    for document in DOCUMENTS:
        before = document.read_text()
        after = fill(before, results)
        document.write_text(after)
        print(f"{document}: {len(BLOCK.findall(after))} tables, {'changed' if after != before else 'as before'}")
    timed = [(_title(name, results[name]), results[name]) for name in PRESETS if name in results]
    if timed:
        plot(timed, RESULTS / "bench.png")
    if FEWER_BYTES in results:
        plot_losses(results[FEWER_BYTES]["policies"], fewer_bytes.TOKENS, RESULTS / f"{FEWER_BYTES}.png")


def _title(name: str, result: Mapping[str, Any]) -> str:
    return f"{name}: {report.describe(result).split(';')[0]}"


if __name__ == "__main__":
    main()
