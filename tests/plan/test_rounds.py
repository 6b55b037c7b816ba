"""In which rounds owners update what they own, so that messages travel while they compute."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fsdp_compiled.plan.hardware import CPU
from fsdp_compiled.plan.owners import FLOPS, Update, _seconds, rounds

A_SECOND = CPU.flops / FLOPS  # of cost, on one rank
MB = 1e6 * CPU.network / 1e9  # so many bytes, of which the network carries 1e3 a second
LOCAL = [Update(rank, A_SECOND, 0.0) for rank in (0, 1)] * 3
CUT = [Update(rank, A_SECOND, 400 * MB) for rank in (0, 1)]  # 800 MB of each rank's to owners, 400 back
UPDATES = [*LOCAL[:2], *CUT, *LOCAL[2:]]


def test_what_is_sent_is_between_what_is_not() -> None:
    """Two thirds of what a rank has already are updated while messages go to owners, and a third while they go back."""
    assert rounds(UPDATES, CPU, 2, several=True) == [[0, 1, 4, 5], [2, 3], [6, 7]]
    assert _seconds([[0, 1, 4, 5], [2, 3], [6, 7]], UPDATES, CPU, 2) < 4 + 2 * CPU.latency
    assert _seconds([list(range(8))], UPDATES, CPU, 2) > 5.1


def test_one_round_where_there_is_nothing_to_hide() -> None:
    everything = [list(range(8))]
    assert rounds(UPDATES, CPU, 2, several=False) == everything
    assert rounds(UPDATES, replace(CPU, flops=1e30), 2, several=True) == everything  # one word more takes longer
    assert rounds(LOCAL, CPU, 2, several=True) == [list(range(6))]
    assert rounds([], CPU, 2, several=True) == [[]]


def test_where_all_is_sent_it_goes_in_chunks() -> None:
    updates = [Update(rank, A_SECOND, 400 * MB) for rank in (0, 1)] * 4
    found = rounds(updates, CPU, 2, several=True)
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert _seconds(found, updates, CPU, 2) < _seconds([list(range(8))], updates, CPU, 2) - 2


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e9), st.floats(0, 1e9)), max_size=9))
def test_each_once_and_never_predicted_to_take_longer(rows: list[tuple[int, float, float]]) -> None:
    updates = [Update(*row) for row in rows]
    found = rounds(updates, CPU, 4, several=True)
    assert sorted(place for row in found for place in row) == list(range(len(rows)))
    assert _seconds(found, updates, CPU, 4) <= _seconds([list(range(len(rows)))], updates, CPU, 4)
