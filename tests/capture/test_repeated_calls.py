"""Dynamo walks through two of many equal blocks: graph and guards are those of walking through all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.variables.builder import VariableBuilder
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.capture import dynamo, dynamo_run, guards
from fsdp_compiled.capture.blocks import guard_probes, repeated_calls, walked_blocks
from fsdp_compiled.capture.blocks.repeated_calls import Repeats
from tests import equal_models as equal
from tests.chosen import TORCH, chosen
from tests.repeated_models import LAYERS, Model, loss
from tests.toys import squares


class _Stop(Exception):
    """After Dynamo."""


def traced(model: nn.Module, function: Any, patch: pytest.MonkeyPatch) -> tuple[list[Any], int]:
    """What Dynamo makes of it, guards as it notes them, graph, guards as it builds them; how many blocks it did not
    walk through."""
    found: list[Any] = []
    watched: list[Repeats] = []
    select, complete, repeats = guards.Recorder.select, dynamo_run.Trace.complete, dynamo.Repeats
    more, make = Repeats.more, guards.Recorder.guards

    def asked(guards: Any) -> set[Any]:
        plain = (bool, int, float, str, type(None))
        names = [(guard.name, kind, value if isinstance(value, plain) else None) for guard, kind, value in guards]
        return {(*one, repr(value)) for *one, value in names if "__builtins" not in str(one)}  # some of it twice

    def selecting(self: Any, entries: Any) -> Any:
        kept = select(self, entries)
        chosen = [entry for entry, keep in zip(entries, kept, strict=True) if keep]
        found.append(sorted(asked((entry.orig_guard, entry.guard_type, entry.value) for entry in chosen)))
        return kept

    def adding(self: Repeats, chosen: Any) -> Any:
        added = more(self, chosen)
        built = ((guard, guard.create_fn_name(), block.values[place]) for block, place, guard in self.built)
        found[-1] = sorted({*found[-1], *asked(built)})
        return added

    def building(self: Any, *given: Any) -> Any:
        guards = make(self, *given)
        lines = [line.strip(" |+-").split("  # ")[0] for line in str(guards._manager).split("\n")]
        lines = [line.split(" (HINT: ")[0].rstrip() for line in lines]
        found.append(sorted({line for line in lines if "__builtins" not in line}))
        return guards

    def seeing(self: Any) -> None:
        complete(self)
        found.append([described(node) for node in self.module.graph.nodes])

    def watching(*given: Any) -> Repeats:
        watched.append(repeats(*given))
        return watched[-1]

    def stop(*_: Any) -> Any:
        raise _Stop

    with patch.context() as patched:
        patched.setattr(guards.Recorder, "select", selecting)
        patched.setattr(guards.Recorder, "guards", building)
        patched.setattr(dynamo_run.Trace, "complete", seeing)
        patched.setattr(Repeats, "more", adding)
        patched.setattr(dynamo, "Repeats", watching)
        patched.setattr(dynamo_run, "differentiate", stop)
        with pytest.raises(_Stop):
            equal.program_of(model, function)
    return found, len(watched[0].written)


def full(model: nn.Module, function: Any, patch: pytest.MonkeyPatch) -> tuple[list[Any], int]:
    """`traced`, with every block walked through."""
    with patch.context() as patched:
        patched.setattr(repeated_calls, "FEWEST", 1000)
        return traced(model, function, patch)


def described(node: torch.fx.Node) -> list[Any]:
    """All of a node but for names."""
    value = node.meta.get("example_value")
    stack = node.meta.get("nn_module_stack") or {}
    places = {other: place for place, other in enumerate(node.graph.nodes)}
    return [
        node.op,
        "" if node.op == "placeholder" else str(node.target),
        node._dynamo_source.name if node.op == "placeholder" else "",
        repr(torch.fx.node.map_arg((node.args, node.kwargs), lambda one: places[one])),
        node.meta.get("stack_trace"),
        [(path, kind, "@" in key) for key, (path, kind) in stack.items()],
        [
            (v.shape, v.stride(), v.dtype, v.requires_grad, type(v)) if isinstance(v, torch.Tensor) else v
            for v in pytree.tree_leaves(value)
        ],
        sorted(node.meta),
    ]


@pytest.fixture(scope="module", autouse=True)
def traced_before() -> None:
    """The first trace of a process asks of more: the module torch, by its name."""
    equal.program_of(Model("shared"), loss)


# What each model has in its blocks, and how many of them are not walked through.
WRITTEN = {
    # all but the first two
    **dict.fromkeys(
        ("shared", "dropout", "random", "arguments", "read after", "written later", "twice", "plain tensors",
         "reads and does not use", "global set before", "a function inside", "partial functions", "no grad",
         "autocast inside", "written in pieces", "returns its argument", "hands on", "views",
         "views written later", "a slice", "a slice with more", "a slice backwards", "a new list"), LAYERS - 2
    ),
    # and but for the one that differs
    **dict.fromkeys(
        ("another dropout", "one in eval mode", "frozen", "tied", "tied inside", "read outside", "hook",
         "another class inside", "own forward", "longer table", "minus zero", "an attribute of its argument",
         "autocast for one", "numbers of one value", "global set for one", "another global",
         "one of a global's kind", "another partial function"), LAYERS - 3
    ),
    # blocks, and within each that is walked through; in torch 2.11 a list's method differs from the next one's
    "experts": (LAYERS - 2) * (1 + 2 if TORCH >= (2, 12) else LAYERS),
    "an attribute more": LAYERS - 3 if TORCH >= (2, 12) else 0,
    **dict.fromkeys(("numbers", "some without gradient", "strides"), 3 - 1),
    # none
    **dict.fromkeys(
        ("closure", "writes a buffer", "global", "writes its input", "shared changes", "counts", "annotated",
         "a hook on a tensor", "checkpointed inside", "views of its argument", "global collects",
         "writes its input in pieces", "fills an object", "texts",
         "collects in a new object", "an attribute of its result"), 0
    ),
}  # fmt: skip
# Others differ from these in what a person writes, and not in what finds it.
CHOSEN = (
    "shared", "dropout", "read after", "written later", "plain tensors", "reads and does not use", "experts",
    "another dropout", "tied inside", "read outside", "hook", "another class inside", "autocast for one",
    "an attribute more", "numbers", "some without gradient", "closure", "writes a buffer", "shared changes", "counts",
    "a hook on a tensor", "checkpointed inside", "global set before", "global set for one", "global collects",
    "one of a global's kind", "another partial function", "a function inside", "collects in a new object",
    "an attribute of its result", "no grad", "written in pieces", "hands on", "views written later",
    "views of its argument", "fills an object", "a slice", "a slice with more",
)  # fmt: skip


@pytest.mark.parametrize("like", chosen(WRITTEN, CHOSEN))
def test_the_trace_is_that_of_all_blocks(like: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Model(like), loss, WRITTEN[like], monkeypatch)


@pytest.mark.parametrize(
    ("like", "written"),
    chosen(
        [("tied", 4), ("rotary", 4), ("tuple", 4), ("index", 0), ("checkpointed", 0)], [("rotary", 4), ("index", 0)]
    ),
)
def test_the_trace_is_that_of_all_blocks_of_other_models(
    like: str, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(equal.Model(like), equal.loss, written, monkeypatch)


def compare(model: nn.Module, function: Any, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [list(vars(module)) for module in model.modules()]
    wanted, none = full(model, function, monkeypatch)
    got, written = traced(model, function, monkeypatch)
    assert none == 0 and written == expected
    for one, two in zip(got, wanted, strict=True):
        more, fewer = [line for line in one if line not in two], [line for line in two if line not in one]
        assert not (more or fewer), (more, fewer)
    assert got == wanted
    assert before == [list(vars(module)) for module in model.modules()]


def test_control_blocks_whose_guards_nobody_compares_come_out_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = equal.Model("index")
    wanted, _ = full(model, equal.loss, monkeypatch)
    monkeypatch.setattr(guard_probes, "alike", lambda one, other: True)
    monkeypatch.setattr(Repeats, "check_guards", lambda *_: None)
    got, written = traced(model, equal.loss, monkeypatch)
    assert written > 0 and got != wanted


def test_guards_that_say_another_thing_are_found_when_they_are_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = equal.Model("index")
    wanted, _ = full(model, equal.loss, monkeypatch)
    monkeypatch.setattr(guard_probes, "alike", lambda one, other: True)
    with caplog.at_level("INFO", logger="fsdp_compiled"):
        got, _ = traced(model, equal.loss, monkeypatch)
    assert got[-3:] == wanted
    assert "a guard of model.layers.2 is not that of the one before" in caplog.text


def test_control_guards_that_are_not_repeated_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = full(Model("shared"), loss, monkeypatch)
    more = repeated_calls.Repeats.more
    monkeypatch.setattr(repeated_calls.Repeats, "more", lambda self, chosen: more(self, chosen) and [])
    monkeypatch.setattr(repeated_calls.Repeats, "check_guards", lambda *_: None)  # which would see it
    got, _ = traced(Model("shared"), loss, monkeypatch)
    assert got[:2] == wanted[:2] and set(got[2]) < set(wanted[2])


def test_a_block_that_could_not_be_ended_is_walked_through(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model("")
    wanted, _ = full(model, loss, monkeypatch)
    monkeypatch.setattr(walked_blocks, "another", lambda *_: 1 / 0)
    with caplog.at_level("INFO", logger="fsdp_compiled"):
        got, _ = traced(model, loss, monkeypatch)
    assert got[-3:] == wanted
    assert "every block is traced" in caplog.text


def test_why_a_block_is_walked_through_is_said_with_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="fsdp_compiled"):
        equal.program_of(Model("fills an object"), loss)
    assert "model.layers.1 is traced by itself, as equal blocks are not: argument masks is a Cache" in caplog.text
    assert "use_cache=False" in caplog.text


def test_a_change_in_a_block_that_was_not_walked_through_is_seen() -> None:
    torch.manual_seed(0)
    model = Model("")
    eager = copy.deepcopy(model)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, policy=Policy(lower="eager"))
    optimizer = torch.optim.SGD(eager.parameters(), 0.1)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    for factor in (1.0, 1.0, 3.0, 1.0):
        model.layers[5].factor = eager.layers[5].factor = factor
        value = loss(eager, tokens)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        assert sharded.step(tokens) == value
    assert sharded.captures == 2


def test_what_a_dictionary_would_make_is_not_made() -> None:
    model = Model("defaults")
    model.layers[1].table["c"] = 2.0
    equal.program_of(model, loss)
    assert [list(layer.table) for layer in model.layers] == [[], ["c"], [], [], [], [], []]


def test_a_change_of_what_a_block_alone_is_given_is_seen() -> None:
    """What nobody read before: each block is given another place of a list."""
    torch.manual_seed(0)
    model = Model("texts")
    eager = copy.deepcopy(model)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, policy=Policy(lower="eager"))
    tokens = torch.zeros(2, 3, dtype=torch.long)
    values = []
    for text in ("some", "other", "some"):
        model.texts[5] = eager.texts[5] = text
        values.append(loss(eager, tokens))
        assert sharded.value_and_grad(tokens)[0] == values[-1]
    assert values[0] != values[1] and sharded.captures == 2


class Knows(nn.Module):
    """A block that asks whether it is a certain one."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.up, self.all = nn.Linear(3, 3), [blocks]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * (3.0 if self is self.all[0][2] else 1.0)


class Known(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.blocks.extend(Knows(self.blocks) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_one_block_is_another_is_not() -> None:
    torch.manual_seed(0)
    model = Known()
    eager, x = copy.deepcopy(model), torch.randn(2, 3)
    sharded = compile_sharded(model, loss=squares, policy=Policy(lower="eager"))
    assert sharded.value_and_grad(x)[0] == squares(eager, x)


def test_a_loss_that_differentiates_inside_is_walked_through(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model("differentiated inside")
    wanted, _ = full(model, loss, monkeypatch)
    with caplog.at_level("INFO", logger="fsdp_compiled"):
        got, _ = traced(model, loss, monkeypatch)
    assert got[-3:] == wanted[-3:]
    assert "every block is traced" in caplog.text


def test_own_tensors_of_written_blocks_cost_dynamo_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[str] = []
    wrap = VariableBuilder._wrap

    def counting(self: Any, value: Any) -> Any:
        if "_parameters['" in self.source.name:
            wrapped.append(self.source.name)
        return wrap(self, value)

    monkeypatch.setattr(VariableBuilder, "_wrap", counting)
    counts = []
    for layers in (6, 12):
        wrapped.clear()
        equal.program_of(equal.Model(layers=layers), equal.loss)
        counts.append(len(wrapped))
    assert counts[0] == counts[1] > 0
    with monkeypatch.context() as patched:  # control: where all blocks are walked through
        patched.setattr(repeated_calls, "FEWEST", 1000)
        wrapped.clear()
        equal.program_of(equal.Model(), equal.loss)
    assert len(wrapped) == counts[0] + 4 * 4  # norm and up of the four others
