"""Ten of the fuzzer's programs (tests/fuzz/), right, or refused by name; `make test-all` runs a hundred of them, and
`make fuzz` two thousand, a thousand stacks of blocks (tests/fuzz/stacks.py), three hundred loops of `fully_shard`
(tests/fuzz/loops/) and as many weights of classes of their own (tests/fuzz/classes.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_compiled.capture.guards import Guards
from tests.chosen import chosen
from tests.fuzz import classes, stacks
from tests.fuzz.cases import Case, make_case
from tests.fuzz.loops.launched import on_ranks
from tests.fuzz.parts import Factor
from tests.fuzz.sides import Ours
from tests.fuzz.trial import Outcome, run, shrunk
from tests.launch import launch

CHUNK, FEW, LOOPS = 10, 5, 2
REFUSALS: list[Outcome] = []


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    yield
    REFUSALS.clear()


@pytest.mark.parametrize("start", chosen(range(0, 100, CHUNK), [0]))
def test_generated_programs_are_plain_pytorch_or_refused_by_name(start: int) -> None:
    wrong = []
    for seed in range(start, start + CHUNK):
        outcome = run(make_case(seed))
        if outcome.kind == "refused":
            REFUSALS.append(outcome)
        elif outcome.kind:
            least = shrunk(outcome)
            wrong.append(
                f"seed {seed} (python -m tests.fuzz --seed {seed}): {outcome.kind}: {outcome.said}\n"
                f"at its smallest: {least.case}\n{least.said}\n{least.trace}"
            )
    assert not wrong, "\n".join(wrong)


def test_generated_programs_on_two_ranks() -> None:
    """Each with a call at the end that fails on one of them."""
    found = launch(Path(__file__).parents[1] / "workers" / "fuzz.py", 2, "0", "4")
    wrong = {case: said for case, said in found.items() if any(not one.startswith("refused") for one in said if one)}
    assert not wrong, json.dumps(wrong, indent=1)
    assert all(all(said) for said in found.values()), "refused on one rank alone"
    assert len(found) <= 2


@pytest.mark.parametrize("start", chosen(range(0, 100, FEW), [0]))
def test_stacks_of_blocks_that_hold_objects(start: int) -> None:
    """Replaced, shared and changed between steps; by both faces."""
    outcomes = {seed: stacks.run(seed) for seed in range(start, start + FEW)}
    wrong = {seed: said for seed, (kind, said) in outcomes.items() if kind in ("differs", "crashed")}
    assert not wrong, "\n".join(f"python -m tests.fuzz --stacks --seed {seed}: {said}" for seed, said in wrong.items())
    assert sum(kind == "refused" for kind, _ in outcomes.values()) <= 3


def test_control_a_stack_whose_guards_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guards, "hold", lambda guards: True)
    assert "differs" in {stacks.run(seed)[0] for seed in range(4)}


def test_weights_of_generated_classes() -> None:
    outcomes = {seed: classes.run(seed) for seed in range(40)}
    wrong = {seed: said for seed, (kind, said) in outcomes.items() if kind in ("differs", "crashed")}
    assert not wrong, "\n".join(f"python -m tests.fuzz --classes --seed {seed}: {said}" for seed, said in wrong.items())
    assert {kind for kind, _ in outcomes.values()} == {"right", "refused"}


def test_control_a_weight_whose_class_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary tensor in its place, in silence, is found."""
    monkeypatch.setattr("fsdp_compiled.plan.leaf.own_mathematics", lambda kind: ())
    assert any(classes.run(seed)[0] == "differs" for seed in range(40))


@pytest.mark.parametrize("start", chosen(range(0, 40, LOOPS), [0]))
def test_loops_of_fully_shard(start: int) -> None:
    outcomes = list(on_ranks(range(start, start + LOOPS)))
    wrong = {seed: said for seed, kind, said in outcomes if kind in ("differs", "crashed")}
    assert not wrong, "\n".join(f"python -m tests.fuzz --loops --seed {seed}: {said}" for seed, said in wrong.items())
    assert sum(kind == "refused" for _, kind, _ in outcomes) <= 1


@pytest.mark.parametrize(("fault", "seed"), [("undivided", 8), ("unasked", 11), ("uncast", 0)])
def test_control_a_loop_that_does_not_divide_or_ask_guards_or_cast(fault: str, seed: int) -> None:
    assert [kind for _, kind, _ in on_ranks([seed], fault)] == ["differs"]


def test_few_of_them_are_refused() -> None:
    assert len(REFUSALS) <= 8, [outcome.said for outcome in REFUSALS]


def test_a_case_is_its_seed() -> None:
    assert make_case(7) == make_case(7) != make_case(8)
    assert len({make_case(seed) for seed in range(200)}) == 200


CASE = Case(0, ("factor", "linear"), "weighted", "adamw", True, "decay", (), False, (3,), ("step", "step", "step"))


def test_the_plain_case_is_right() -> None:
    assert run(CASE).kind == ""


@pytest.mark.parametrize("broken", ["act", "rate", "weights"])
def test_a_side_that_does_otherwise_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a change of the model, of the rate or of the result that one side alone sees."""
    right = getattr(Ours, broken)

    def act(side: Ours, action: str, call: int) -> object:
        for module in side.modules(Factor):
            module.factor = 0.7001
        return right(side, action, call)

    damaged = {"act": act, "rate": lambda side, _: None, "weights": lambda side: {**right(side), "more": None}}
    monkeypatch.setattr(Ours, broken, damaged[broken])
    outcome = run(replace(CASE, actions=("step", "rate", "step")))
    assert outcome.kind == "differs"
    if broken == "rate":
        assert shrunk(outcome).kind == "differs"
