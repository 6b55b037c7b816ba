"""Prints a plan, and numbers of bytes, for people. Folds repeated parts of printed text:

    layers.0    wait for layers_0_gather              ×28:
    layers.0    views, compute: 52 operators            layers.0..27  wait for layers_0..27_gather
    layers.1    wait for layers_1_gather                layers.0..27  views, compute: 52 operators
    layers.1    views, compute: 52 operators
    ...

Lines are folded if they differ only in whole numbers, each of which grows or shrinks by the same step from one
repetition to the next, and stand in the same columns. So the folded text says all that the whole one does. Texts that
were written to a file fold as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_compiled.plan.owners import update_cost

if TYPE_CHECKING:
    from fsdp_compiled.plan.plan import Buffer, Plan


def human(nbytes: float) -> str:
    """``1536`` -> ``'1.5 KiB'``."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or suffix == "GiB":
            return f"{nbytes:.0f} B" if suffix == "B" else f"{nbytes:.1f} {suffix}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def _kind(buffer: Buffer) -> str:
    if not buffer.trainable:
        return "frozen"
    return "no optimizer" if buffer.group is None else f"group {buffer.group}"


def _tensor_parallel(plan: Plan) -> list[str]:
    """The parameters that are cut over the tp axis, and those that each rank along it has whole."""
    if plan.tp == 1:
        return []
    split, whole = ([s for b in plan.buffers if b.split == cut for s in b.slots] for cut in (True, False))
    held = sum(plan.shard_numel(b) * b.dtype.itemsize for b in plan.buffers if not b.split)
    return [
        f"tensor parallelism: {len(split)} parameters cut over {plan.tp} ranks (sizes above are of a rank's parts), "
        f"{len(whole)} whole on each, of which a rank holds {human(held)}"
    ]


def _whole_updates(plan: Plan) -> list[str]:
    """Which parameters are updated whole, by which ranks, how even that is, and the bytes that it sends."""
    if not (owned := plan._owned):
        return []
    what = f"updated whole: {len(owned)} parameters"
    if not plan.owners:
        return [f"{what}, by every rank for itself" if plan.world > 1 else what]
    costs, counts, sent = [0.0] * plan.shard, [0] * plan.shard, 0.0
    for slot, held in owned:
        owner = plan.owners[slot.name]
        costs[owner] += update_cost(slot.leaf.shape)
        counts[owner] += 1
        sent += (sum(held) - held[owner]) * slot.leaf.dtype.itemsize / plan.shard
    return [
        f"{what}, each by its owner: {min(counts)} to {max(counts)} a rank, the most work is "
        f"{max(costs) / (sum(costs) / plan.shard):.2f} times the mean; a step sends {human(2 * sent)} a rank to owners "
        f"and {human(sent)} back, on average"
    ]


def describe(plan: Plan) -> list[str]:
    total = sum(math.prod(slot.leaf.whole_shape) for buffer in plan.buffers for slot in buffer.slots)
    lines = [
        f"plan: {plan.policy.shard} on {plan.shard} rank{'s' * (plan.shard > 1)}"
        + (f" x {plan.replicate} replicas" if plan.replicate > 1 else "")
        + (f" x {plan.tp} tensor-parallel" if plan.tp > 1 else "")
        + f", {len(plan.units)} units, {total:,} parameters, of which a rank holds {human(plan.persistent_bytes)}",
        f"{'unit':<24}{'buffer':<20}{'parameters':>12}{'gathered':>12}{'a rank holds':>14}{'padding':>9}",
    ]
    for unit in plan.units:
        for index, buffer in enumerate(unit.buffers):
            lines.append(
                f"{unit.name if index == 0 else '':<24}{str(buffer.dtype)[6:] + ', ' + _kind(buffer):<20}"
                f"{len(buffer.slots):>12}{human(buffer.nbytes):>12}"
                f"{human(plan.shard_numel(buffer) * buffer.dtype.itemsize):>14}{buffer.padding:>9}"
            )
    lines += _tensor_parallel(plan)
    lines += _whole_updates(plan)
    lines += [f"chosen: {note}" for note in plan.notes]
    if held := plan.copy_bytes:
        lines.append(f"shards in the compute dtype, for gathers without a cast (copies): {human(held)} more a rank")
    if held := plan.sum_bytes():
        kept = plan.policy.accumulate
        other = "full" if kept == "shards" else "shards"
        instead = plan.sum_bytes(other)
        note = f"; under {other!r} it would be {human(instead)}" if instead != held else ""
        lines.append(f"while microbatches are added up (accumulate={kept!r}): {human(held)} more a rank{note}")
    return lines


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


LEAST = 4  # repetitions, at least; fewer lines are read as they are
LONGEST = 4096  # lines of one repetition, at most
TRIED = 128  # places that are tried for the start of the next repetition
NUMBER = re.compile(r"((?<!\d)(?:0|[1-9]\d{0,17})(?!\d))")
GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # the gap before a column


@dataclass(frozen=True)
class Repeat:
    """``lines``, repeated ``times`` times, with gaps of two spaces. ``columns``: where each gap of each line ends.
    ``steps``: by how much each number in each line grows from one repetition to the next."""

    times: int
    lines: tuple[str, ...]
    columns: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, ...], ...]

    def text(self) -> Iterator[str]:
        """The folded lines: a number that changes is printed as its first and last value."""
        rows = [self._row(*pair) for pair in zip(self.lines, self.steps, strict=True)]
        if len(rows) == 1:
            yield f"{spaced(rows[0], self.columns[0])}  ×{self.times}"
            return
        yield f"{' ' * (len(rows[0]) - len(rows[0].lstrip()))}×{self.times}:"
        yield from (spaced(f"  {row}", columns) for row, columns in zip(rows, self.columns, strict=True))

    def _row(self, line: str, steps: Sequence[int]) -> str:
        pieces = NUMBER.split(line)
        last = self.times - 1
        for place, step in enumerate(steps):
            if step:
                pieces[2 * place + 1] += f"..{int(pieces[2 * place + 1]) + last * step}"
        return "".join(pieces)


def fold(lines: Iterable[str]) -> list[str]:
    """The lines as they are printed, with repetitions folded."""
    return [line for part in repeats(list(lines)) for line in ([part] if isinstance(part, str) else part.text())]


def folded(text: str) -> str:
    return "\n".join(fold(text.split("\n")))


def repeats(lines: Sequence[str]) -> Iterator[str | Repeat]:
    """The lines in order. Where lines repeat, they become a `Repeat`: the one that covers the most lines."""
    columns = [tuple([gap.end() for gap in GAP.finditer(line)]) for line in lines]
    close = [GAP.sub("  ", line) for line in lines]
    forms: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
    keys: list[int] = []
    numbers: list[tuple[int, ...]] = []
    for place, line in enumerate(close):
        pieces = NUMBER.split(line)
        keys.append(forms.setdefault((tuple(pieces[::2]), columns[place]), len(forms)))
        numbers.append(tuple(map(int, pieces[1::2])))
    places: dict[int, list[int]] = {}  # for each form, the lines of it that are still ahead, the last first
    for place in reversed(range(len(keys))):
        places.setdefault(keys[place], []).append(place)
    start = 0
    while start < len(keys):
        ahead = places[keys[start]]
        while ahead[-1] <= start and len(ahead) > 1:
            ahead.pop()
        periods = [place - start for place in ahead[: -TRIED - 1 : -1] if 0 < place - start <= LONGEST]
        # A repetition that counts has its first two lines three times.
        near = [(one, start + 2 * one, min(one, 2)) for one in periods]
        periods = [one for one, at, two in near if keys[start : start + two] == keys[at : at + two]]
        rows = [(_times(keys, numbers, start, period), period) for period in periods]
        times, period = max((row for row in rows if row[0] >= LEAST), key=_covered, default=(1, 1))
        if times == 1:
            yield lines[start]
        else:
            first, second = (numbers[at : at + period] for at in (start, start + period))
            steps = tuple(tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(first, second, strict=True))
            end = start + period
            yield Repeat(times, tuple(close[start:end]), tuple(columns[start:end]), steps)
        start += times * period


def _covered(row: tuple[int, int]) -> tuple[int, int]:
    return row[0] * row[1], row[0]


def _times(keys: Sequence[int], numbers: Sequence[tuple[int, ...]], start: int, period: int) -> int:
    """How often the ``period`` lines that begin at ``start`` stand there, one repetition after the other."""
    row, times = keys[start : start + period], 1
    while keys[(at := start + times * period) : at + period] == row:
        if times > 1:
            before, now, last = (numbers[one : one + period] for one in (at - 2 * period, at - period, at))
            if any(
                b - a != c - b
                for three in zip(before, now, last, strict=True)
                if not three[0] == three[1] == three[2]
                for a, b, c in zip(*three, strict=True)
            ):
                break
        times += 1
    return times


def spaced(line: str, columns: Sequence[int]) -> str:
    """The line with gaps that end at these columns, or are two wide where the text is past that."""
    found, *parts = GAP.split(line)
    for part, column in zip(parts, columns, strict=True):
        found = f"{found}  ".ljust(column) + part
    return found
