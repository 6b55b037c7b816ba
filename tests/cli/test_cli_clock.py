"""Where a run's time went, over several attempts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fsdp_compiled.cli.clock import FILE, PARTS, Attempts, Clock, read, rows

DRIFT = 0.002  # seconds between the two clocks that are read, and of rounding


def test_the_parts_add_up_to_the_wall_time() -> None:
    before, since = time.perf_counter(), time.time()
    clock = Clock(since - 5)
    made = time.perf_counter()
    clock.enter("training")
    started = time.perf_counter() - before
    with clock.spending("saving"):
        time.sleep(0.02)
        with clock.spending("waiting"):
            time.sleep(0.02)
    clock.move("training", "compiling", 0.5)
    least = time.perf_counter() - made
    seconds = clock.seconds
    most = time.perf_counter() - before
    assert set(seconds) == set(PARTS)
    assert least - DRIFT <= sum(seconds.values()) - 5 <= most + DRIFT  # however long a busy machine lets this wait
    assert -DRIFT <= seconds["starting"] - 5 <= started + DRIFT
    assert seconds["saving"] >= 0.02 <= seconds["waiting"] and seconds["compiling"] == 0.5


def line(out: Path, **fields: object) -> None:
    with (out / FILE).open("a") as file:
        print(json.dumps(fields), file=file)


def test_steps_that_are_made_again_and_time_between_attempts_do_not_count(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    line(tmp_path, began=100.0, world=2, step=0)
    for step in (1, 2, 3, 4):
        line(tmp_path, now=110.0 + step, step=step, seconds={"starting": 10.0, "training": float(step)})
    line(tmp_path, began=120.0, world=4, step=3)  # killed after step 4, whose checkpoint was of step 3
    line(tmp_path, now=126.0, step=4, seconds={"starting": 4.0, "training": 2.0})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"now": 127.0, "st')  # cut off
    spent = read(tmp_path)
    assert spent is not None and spent.attempts == 2
    found = {part: seconds for part, seconds in spent.parts.items() if seconds}
    assert found == {"starting": 14.0, "training": 5.0, "repeated": 1.0, "down": 6.0}
    assert spent.total == 26.0 and spent.goodput == pytest.approx(5 / 26)
    assert rows(spent)[-1] == ("goodput, of 2 attempts", "26.0 s   19.2%")


def test_an_attempt_that_ended_before_its_first_record_counts(tmp_path: Path) -> None:
    before = time.perf_counter()
    clock = Clock(time.time() - 3)
    for ended in ("failed: RankError", "complete"):
        attempts = Attempts(tmp_path, clock, world=1, step=0)
        attempts.add(0, ended)
        attempts.close()
    spent = read(tmp_path)
    assert spent is not None and spent.ends == ("failed: RankError", "complete")
    assert -DRIFT <= spent.parts["starting"] - 6 <= 2 * (time.perf_counter() - before) + DRIFT


def test_a_line_that_was_cut_off_does_not_take_the_next_attempt_with_it(tmp_path: Path) -> None:
    line(tmp_path, began=100.0, world=2, step=0)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"now": 104.0, "step": 2, "sec')
    for _ in range(2):
        Attempts(tmp_path, Clock(time.time()), 2, 2).close()
    found = read(tmp_path)
    assert found is not None and found.attempts == 3


def test_an_attempt_that_was_killed_before_its_first_record_has_its_time_until_it_could_say_so(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, Clock(time.time() - 3), world=2, step=0)
    spent = read(tmp_path)
    assert spent is not None and spent.ends == ("",) and spent.parts["starting"] >= 3 - DRIFT
    assert [name for name, _ in rows(spent)][:2] == ["starting, with imports", "the last attempt runs, or was killed"]
    attempts.add(4, "complete")
    attempts.close()
    ended = read(tmp_path)
    assert ended is not None and "the last attempt runs, or was killed" not in dict(rows(ended))
