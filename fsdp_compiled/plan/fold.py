"""Folds repeated parts of printed text.

    layers.0    wait for layers_0_gather              ×28:
    layers.0    views, compute: 52 operators            layers.0..27  wait for layers_0..27_gather
    layers.1    wait for layers_1_gather                layers.0..27  views, compute: 52 operators
    layers.1    views, compute: 52 operators
    ...

Lines repeat that differ in nothing but whole numbers, each of which grows, or shrinks, by the same from one time to the
next, and stand in the same columns: so the folded text says all that the whole one does. Texts that were
written to a file fold as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

LEAST = 4  # times; a few lines are read as they are
LONGEST = 4096  # lines that repeat together
TRIED = 128  # places where a row of lines may begin again
NUMBER = re.compile(r"((?<!\d)(?:0|[1-9]\d{0,17})(?!\d))")
GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # before a column
# A gap is one character of Unicode's private area, which says where the column begins.
FIRST, LAST = "\ue000", "\uf8ff"
COLUMN = re.compile(f"[{FIRST}-{LAST}]")


@dataclass(frozen=True)
class Repeat:
    """``lines``, ``times`` times, with columns in the place of gaps. ``steps``: what each number in each line grows by
    from one time to the next."""

    times: int
    lines: tuple[str, ...]
    steps: tuple[tuple[int, ...], ...]

    def text(self) -> Iterator[str]:
        """Numbers that move as the first and the last."""
        rows = [self._row(*pair) for pair in zip(self.lines, self.steps, strict=True)]
        if len(rows) == 1:
            yield f"{spaced(rows[0])}  ×{self.times}"
            return
        yield f"{' ' * (len(rows[0]) - len(rows[0].lstrip()))}×{self.times}:"
        yield from (spaced(f"  {row}") for row in rows)

    def _row(self, line: str, steps: Sequence[int]) -> str:
        pieces = NUMBER.split(line)
        last = self.times - 1
        for place, step in enumerate(steps):
            if step:
                pieces[2 * place + 1] += f"..{int(pieces[2 * place + 1]) + last * step}"
        return "".join(pieces)


def fold(lines: Iterable[str]) -> list[str]:
    """The lines as they are printed."""
    return [line for part in repeats(list(lines)) for line in ([part] if isinstance(part, str) else part.text())]


def folded(text: str) -> str:
    return "\n".join(fold(text.split("\n")))


def repeats(lines: Sequence[str]) -> Iterator[str | Repeat]:
    """The lines in order; where some repeat, as many as do, in the row that takes in most of them."""
    columned = [_columned(line) for line in lines]
    forms: dict[tuple[str, ...], int] = {}
    keys: list[int] = []
    numbers: list[tuple[int, ...]] = []
    for place, line in enumerate(columned):
        pieces = NUMBER.split(line) if line is not None else ["", str(place)]
        keys.append(forms.setdefault(tuple(pieces if line is None else pieces[::2]), len(forms)))
        numbers.append(tuple(map(int, pieces[1::2])))
    places: dict[int, list[int]] = {}  # of each form, those that are still ahead, the last first
    for place in reversed(range(len(keys))):
        places.setdefault(keys[place], []).append(place)
    start = 0
    while start < len(keys):
        ahead = places[keys[start]]
        while ahead[-1] <= start and len(ahead) > 1:
            ahead.pop()
        periods = [place - start for place in ahead[: -TRIED - 1 : -1] if 0 < place - start <= LONGEST]
        # What repeats so often has its first two lines thrice.
        near = [(one, start + 2 * one, min(one, 2)) for one in periods]
        periods = [one for one, at, two in near if keys[start : start + two] == keys[at : at + two]]
        rows = [(_times(keys, numbers, start, period), period) for period in periods]
        times, period = max((row for row in rows if row[0] >= LEAST), key=_covered, default=(1, 1))
        if times == 1:
            yield lines[start]
        else:
            first, second = (numbers[at : at + period] for at in (start, start + period))
            steps = tuple(tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(first, second, strict=True))
            yield Repeat(times, tuple(line for line in columned[start : start + period] if line is not None), steps)
        start += times * period


def _covered(row: tuple[int, int]) -> tuple[int, int]:
    return row[0] * row[1], row[0]


def _times(keys: Sequence[int], numbers: Sequence[tuple[int, ...]], start: int, period: int) -> int:
    """How often the row of ``period`` lines that begins at ``start`` stands there, one time after the other."""
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


def _columned(line: str) -> str | None:
    """None for a line that has such characters of its own."""
    if COLUMN.search(line):
        return None
    return GAP.sub(lambda gap: chr(ord(FIRST) + gap.end()) if ord(FIRST) + gap.end() <= ord(LAST) else gap[0], line)


def spaced(line: str) -> str:
    """With gaps again, each as wide as leads to its column, or two where that is passed."""
    found = ""
    for part in re.split(f"({COLUMN.pattern})", line):
        is_gap = COLUMN.fullmatch(part)
        found += " " * max(2, ord(part) - ord(FIRST) - len(found)) if is_gap else part
    return found
