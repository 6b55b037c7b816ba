"""Folded texts say all that the whole ones do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compiled import Policy
from fsdp_compiled.plan.text import NUMBER, Repeat, fold, repeats, spaced
from tests.models import Stack
from tests.simulate import stages


def whole(repeat: Repeat) -> Iterator[str]:
    for time in range(repeat.times):
        for line, columns, steps in zip(repeat.lines, repeat.columns, repeat.steps, strict=True):
            pieces = NUMBER.split(line)
            pieces[1::2] = [str(int(one) + time * step) for one, step in zip(pieces[1::2], steps, strict=True)]
            yield spaced("".join(pieces), columns)


def unfolded(parts: Iterable[str | Repeat]) -> list[str]:
    """The lines that `repeats` was given."""
    return [line for part in parts for line in ([part] if isinstance(part, str) else whole(part))]


def test_rows_that_grow_are_one() -> None:
    text = ["plan", *(f"layers.{n}    1.0 MiB" for n in range(4)), "end"]
    assert fold(text) == ["plan", "layers.0..3  1.0 MiB  ×4", "end"]


def test_several_lines_repeat_together_and_columns_stay() -> None:
    pairs = [(f"    layers.{n + 1:<10}gather", f"    layers.{n:<10}views, 52 operators") for n in range(98)]
    aligned = [line for pair in pairs for line in pair]
    assert fold(aligned) == [
        "    ×98:",
        "      layers.1..98   gather",
        "      layers.0..97   views, 52 operators",
    ]


def test_what_does_not_repeat_alike_is_not_folded() -> None:
    for text in (
        ["a 1", "a 2", "a 4", "a 8"],  # grows by another number each time
        ["a 1", "a 2", "a 3"],  # a few lines are read as they are
        ["a x", "a y", "a z", "a w"],
        ["a 01", "a 02", "a 03", "a 04"],  # no numbers: 01 would come back as 1
        ["a  1", "a   2", "a    3", "a     4"],  # in other columns
    ):
        assert fold(text) == text


def test_rows_backwards_and_without_numbers_fold() -> None:
    assert fold(["b 3", "b 2", "b 1", "b 0"]) == ["b 3..0  ×4"]
    assert fold(["same"] * 5) == ["same  ×5"]


LINE = st.lists(st.sampled_from(["a", "b ", "  ", "1", "10", "07", " x", "."]), max_size=6).map("".join)
TEXT = st.lists(st.tuples(st.lists(LINE, max_size=4), st.integers(1, 7)), max_size=5)


@settings(max_examples=300, deadline=None)
@given(TEXT, st.integers(0, 30))
def test_any_text_comes_back(parts: list[tuple[list[str], int]], first: int) -> None:
    text = [line.replace("10", str(first + time)) for lines, times in parts for time in range(times) for line in lines]
    assert unfolded(repeats(text)) == text


def test_the_stages_of_a_program_come_back_and_are_short() -> None:
    sizes = []
    for layers in (8, 32):
        policy = Policy(lower="eager", bucket_mb=0)
        found, plan = stages(Stack(layers, 8), None, None, (torch.ones(4, 8),), policy, kind="gradient")
        for program in found:
            text = program.text().split("\n")
            assert unfolded(repeats(text)) == text
        sizes.append((len(fold(found[-1].text().split("\n"))), len(str(found[-1]).split("\n"))))
        assert f"×{layers}" in str(plan) and len(str(plan).split("\n")) < 8
    (lines, rows), (more_lines, more_rows) = sizes
    assert more_lines < 2.2 * lines and more_rows < 2.2 * rows  # of the whole text there is four times as much


def test_the_control_a_repeat_that_says_something_else_is_noticed() -> None:
    text = ["a 1", "a 2", "a 3", "a 4"]
    (row,) = repeats(text)
    assert isinstance(row, Repeat) and unfolded([Repeat(4, row.lines, row.columns, ((2,),))]) != text
