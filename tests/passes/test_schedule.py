"""When gathers start, how many units are alive, and that neither changes a number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fsdp_compiled import Policy, Program
from fsdp_compiled.ir.nodes import is_collective, is_view, role_of
from tests import models
from tests.chosen import chosen, examples
from tests.models import Block, Recipe
from tests.recipes import program_of, trained
from tests.simulate import stages


def recipe(blocks: int = 5, **policy: object) -> Recipe:
    return Recipe((Block("linear"),) * blocks, policy=Policy(lower="eager", bucket_mb=0, **policy))  # type: ignore[arg-type]


def alive_by_node(program: Program) -> list[set[str]]:
    """The units gathered while each node runs, counted as a reader of the text would: by names not yet done with."""
    nodes = list(program.graph.nodes)
    last: dict[fx.Node, int] = {}
    for index in reversed(range(len(nodes))):
        for source in nodes[index].all_input_nodes:
            last.setdefault(source, index)
    owner: dict[fx.Node, str] = {}
    end: dict[fx.Node, int] = {}
    for node in nodes:
        if role_of(node) == "gather":
            owner[node] = node.meta["mark"].unit
        elif role_of(node) in ("wait", "part") or is_view(node):
            if held := [owner[source] for source in node.all_input_nodes if source in owner]:
                owner[node] = held[0]
    for index, node in enumerate(nodes):
        end[node] = max(last.get(node, index), index)
    alive: list[set[str]] = [set() for _ in nodes]
    for index, node in enumerate(nodes):
        if node in owner:
            for place in range(index, end[node] + 1):
                alive[place].add(owner[node])
    return alive


def order(program: Program) -> list[tuple[str, str]]:
    """Gathers, waits for them and first uses in the order they run, with their units; waits as ``wait``."""
    return [
        ("gather" if is_collective(node) else "wait", node.meta["mark"].unit)
        for node in program.graph.nodes
        if role_of(node) == "gather" or (role_of(node) == "wait" and role_of(node.all_input_nodes[0]) == "gather")
    ]


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_a_gather_starts_as_many_units_ahead_as_asked(ahead: int) -> None:
    found = order(program_of(recipe(prefetch=ahead)))
    waits = [unit for what, unit in found if what == "wait"]
    turn = len(waits) // 2 + 1  # a phase begins with nothing on the wire
    for place, unit in enumerate(waits[:turn]):
        started = [name for what, name in found[: found.index(("wait", unit))] if what == "gather"]
        assert started == waits[: min(place + 1 + ahead, turn)], f"before the wait for {unit}"
    gathers = [unit for what, unit in found if what == "gather"]
    assert gathers == waits, "the wire serves units in another order than they are used in"


def test_what_backward_gathers_first_starts_with_backward() -> None:
    program = program_of(recipe(prefetch=2))
    backward = [node for node in program.graph.nodes if node.meta.get("phase") == "backward"]
    assert role_of(backward[0]) == "gather"


def test_a_reduction_is_waited_for_late_but_not_at_the_end() -> None:
    for ahead in (1, 2, 3):
        in_flight, most = 0, 0
        for node in program_of(recipe(6, prefetch=ahead)).graph.nodes:
            if role_of(node) == "reduce":
                in_flight += 1
            elif role_of(node) == "wait" and role_of(node.all_input_nodes[0]) == "reduce":
                in_flight -= 1
            most = max(most, in_flight)
        assert most == ahead and in_flight == 0


@pytest.mark.parametrize("kind", ["step", "microbatch", "gradient", "forward"])
def test_every_kind_of_program_is_scheduled(kind: str) -> None:
    assert order(program_of(recipe(prefetch=1), kind))[:3] == [
        ("gather", "root"),
        ("gather", "blocks.0"),
        ("wait", "root"),
    ]


@pytest.mark.parametrize(
    ("most", "shard"),
    chosen(
        [(most, shard) for most in (1, 2, 3, 6) for shard in ("zero3", "zero2")],
        [(1, "zero3"), (2, "zero2"), (3, "zero3"), (6, "zero2")],
    ),
)
def test_a_limit_changes_no_number(shard: str, most: int) -> None:
    free, bound = recipe(shard=shard, prefetch=0), recipe(shard=shard, limit=most)
    mine, theirs = trained(bound), trained(free)
    assert all(map(torch.equal, mine.losses, theirs.losses))
    for name, value in mine.parameters.items():
        assert torch.equal(value, theirs.parameters[name])
    alive, unbound = (max(map(len, alive_by_node(one.program))) for one in (mine, theirs))
    assert alive == min(most, unbound + 1)  # one ahead
    again = len(mine.program.marked("gather")) - len(theirs.program.marked("gather"))
    assert (again > 0) == (most < unbound)


@settings(max_examples=examples(4, 12), deadline=None, derandomize=True)
@given(models.recipes(), st.integers(1, 6), st.integers(0, 3))
def test_no_node_of_any_program_has_more_units_alive_than_the_limit(what: Recipe, most: int, ahead: int) -> None:
    policy = replace(what.policy, limit=most, prefetch=min(ahead, most - 1))
    try:
        program = program_of(replace(what, policy=policy))
    except ValueError as error:
        assert "at once" in str(error) and f"limit={most}" in str(error)
        return
    assert max(map(len, alive_by_node(program)), default=0) <= most


def test_without_the_limit_the_same_programs_have_more_alive() -> None:
    """The control of the two above."""
    assert max(map(len, alive_by_node(program_of(recipe(prefetch=3))))) == 5
    assert max(map(len, alive_by_node(program_of(recipe(prefetch=0, shard="zero2"))))) == 6


def test_a_node_that_reads_more_units_than_the_limit_is_refused_with_its_place() -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ (self.parts[0].weight + self.parts[1].weight)).square().mean()

    model = Sum()
    with pytest.raises(ValueError, match=r"reads parameters of 2 units at once: parts\.0, parts\.1\. Give limit=2"):
        stages(model, None, None, (torch.ones(2, 4),), Policy(limit=1, bucket_mb=0, lower="eager"), kind="gradient")


def test_choices_are_told_and_follow_the_network() -> None:
    wide = Recipe((Block("linear"),) * 5, width=7, hidden=11)

    def notes(**policy: object) -> str:
        return "\n".join(program_of(replace(wide, policy=Policy(lower="eager", bucket_mb=0, **policy))).notes)  # type: ignore[arg-type]

    assert "prefetch=1 (auto): " in notes() and "limit=3 (auto)" in notes()
    assert "prefetch=2, as given" in notes(prefetch=2)
    assert "limit=2, as given; at most 2 units alive at once" in notes(limit=2)
    assert _of_gathers(notes(network=1e-5)) > 100 * _of_gathers(notes())


def _of_gathers(notes: str) -> float:
    """The seconds in ``of 6.6 ms of gathers``."""
    number, unit = notes.split(" of gathers")[0].split()[-2:]
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefetch": -1}, "Policy.prefetch is -1; expected a whole number from 0 up"),
        ({"prefetch": True}, "Policy.prefetch is True"),
        ({"limit": 0}, "Policy.limit is 0; expected a whole number from 1 up"),
        ({"limit": 2, "prefetch": 2}, "leaves no room for prefetch=2.*limit=3 or more"),
        ({"bucket_mb": -1}, "Policy.bucket_mb is -1; expected MiB"),
        ({"network": 0}, "Policy.network is 0; expected gigabits a second"),
        ({"network": (1.0, 0.5, 2.0)}, "expected gigabits a second"),
        ({"network": (1.0,)}, "expected gigabits a second"),
        ({"network": ()}, "expected gigabits a second"),
        ({"network": "fast"}, 'Policy.network is .fast.; expected .*"measure"'),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**fields)  # type: ignore[arg-type]
