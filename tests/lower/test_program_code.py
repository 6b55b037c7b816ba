"""A graph's function computes what `fx.GraphModule`'s does, lets values go as early, and shows its lines in errors."""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fsdp_compiled.lower.program_code import Code, with_room

aten = torch.ops.aten


def graph_of(watch: Callable[..., torch.Tensor] = lambda x: x + 1) -> fx.Graph:
    graph = fx.Graph()
    x, _1 = graph.placeholder("x"), graph.placeholder("_1")  # a name as the constants have
    a = graph.call_function(aten.where.ScalarOther, (graph.call_function(aten.gt.Scalar, (x, 0)), x, -math.inf))
    b = graph.call_function(aten.amax.default, (a, [0]), {"keepdim": True})
    c = graph.call_function(aten._to_copy.default, (b,), {"dtype": torch.float64, "device": torch.device("cpu")})
    graph.call_function(watch, (c,))
    d = graph.call_function(aten.add.Tensor, (c, _1), {"alpha": 2.5})
    e = graph.call_function(torch.stack, ([d, d], 0))
    f = graph.call_function(torch.Tensor.__getitem__, (e, (slice(None, 1, None), 0)))
    graph.output([f, None, e])
    return graph


def test_the_function_computes_what_torchs_does() -> None:
    given = torch.tensor([[1.0, -2.0], [-3.0, 4.0]]), torch.ones(2)
    graph = graph_of()
    mine, torchs = Code(graph).run(*given), fx.GraphModule(nn.Module(), graph)(*given)
    assert torch.equal(mine[0], torchs[0]) and mine[1] is None and torch.equal(mine[2], torchs[2])
    assert mine[0].tolist() == [[3.5, 6.5]] and mine[0].dtype == torch.float64


def test_values_are_let_go_after_their_last_use() -> None:
    alive: list[Any] = []

    def makes(x: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(result := x + 1))
        return result

    def counts(x: torch.Tensor) -> int:
        return sum(ref() is not None for ref in alive)

    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(makes, (x,))
    b = graph.call_function(makes, (a,))
    graph.call_function(makes, (b,))  # which nothing reads
    first = graph.call_function(counts, (b,))
    c = graph.call_function(makes, (b,))
    graph.output([first, graph.call_function(counts, (c,)), a])
    results = Code(graph).run(torch.ones(1))
    assert results[:2] == [2, 2]  # a and b, then a and c


def test_an_error_shows_the_line_and_its_place() -> None:
    def breaks(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("here")

    code = Code(graph_of(breaks))
    with pytest.raises(RuntimeError, match="here") as error:
        code.run(torch.ones(2, 2), torch.ones(2))
    (frame,) = [one for one in traceback.extract_tb(error.tb) if one.name == "run"]
    assert frame.line is not None and frame.line.startswith("breaks = ") and "_to_copy" in frame.line
    place, values = code.reached(error.tb) or (0, {})
    assert code.nodes[place].target is breaks and "_to_copy_default" in values


def blocks_of(
    count: int, makes: Callable[..., Any] = torch.mul, watch: Callable[..., Any] = torch.neg, last: float = 2.0
) -> fx.Graph:
    """Blocks that are alike, but for a number in the ``last``; backward reads what each has kept."""
    graph = fx.Graph()
    x, *weights = (graph.placeholder(f"in_{place}") for place in range(count + 1))
    kept = []

    def call(block: int, phase: str, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta |= {"phase": phase, "path": f"layers.{block}.up"}
        return node

    for block, weight in enumerate(weights):
        scale = last if block == count - 1 else 2.0
        y = call(block, "forward", makes, x, weight)
        y = call(block, "forward", makes, y, scale)
        z = call(block, "forward", makes, y, torch.device("cpu") if makes is not torch.mul else 3)
        call(block, "forward", watch, z)
        x = call(block, "forward", torch.add, z, 1)
        kept.append(y)
    for block in reversed(range(count)):
        for _ in range(5):
            x = call(block, "backward", torch.sub, x, kept[block])
    graph.output([x, kept[0]])
    return graph


def functions(code: Code) -> int:
    return sum(line.startswith("def ") for line in code.text.splitlines())


def test_equal_stretches_are_one_function() -> None:
    given = [torch.randn(3) for _ in range(6)]
    for last, more in ((2.0, 0), (5.0, 1)):
        graph = blocks_of(5, last=last)
        code = Code(graph)
        assert functions(code) == 3  # run, forward and backward; what is in one block alone stands in run
        assert len(code.text.splitlines()) < 2 * 8 + 5 * 2 + 12 + 5 * more
        wanted = fx.GraphModule(nn.Module(), graph)(*given)
        assert [one.tolist() for one in code.run(*given)] == [one.tolist() for one in wanted]
    texts = [Code(blocks_of(count)).text for count in (5, 20)]
    assert [text.count("def ") for text in texts] == [3, 3]
    assert len(texts[1].splitlines()) - len(texts[0].splitlines()) == 2 * 15  # a call of each in each block


def keeping(count: int, makes: Callable[..., Any], watch: Callable[..., Any], elsewhere: int = 0) -> fx.Graph:
    """Blocks that keep three values for backward, of which something else reads those of the first ``elsewhere``."""
    graph = fx.Graph()
    x, *weights = (graph.placeholder(f"in_{place}") for place in range(count + 1))
    kept: list[list[fx.Node]] = []

    def call(block: int, phase: str, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta |= {"phase": phase, "path": f"layers.{block}.up"}
        return node

    for block, weight in enumerate(weights):
        first = call(block, "forward", makes, x, weight)
        second = call(block, "forward", makes, first, weight)
        third = call(block, "forward", makes, second, 2)
        call(block, "forward", watch, third)
        x = call(block, "forward", torch.add, third, first)
        kept.append([first, second, third])
    for block in reversed(range(count)):
        for value in (*kept[block], *kept[block][:2]):
            x = call(block, "backward", torch.sub, x, value)
        call(block, "backward", watch, x)
    for block in range(elsewhere):
        x = call(count, "backward", torch.sub, x, kept[block][0])
    graph.output([x])
    return graph


@pytest.mark.parametrize("elsewhere", [0, 1])
def test_what_a_block_keeps_is_passed_on_as_one(elsewhere: int) -> None:
    """And let go as early; unless in one of the blocks something else reads it, too."""
    alive: list[Any] = []
    seen: list[int] = []

    def makes(x: torch.Tensor, y: Any) -> torch.Tensor:
        alive.append(weakref.ref(result := x * y))
        return result

    def counts(x: torch.Tensor) -> None:
        seen.append(sum(ref() is not None for ref in alive))

    given = [torch.randn(3) for _ in range(5)]
    graph = keeping(4, makes, counts, elsewhere)
    code = Code(graph)
    (found,) = code.run(*given)
    assert functions(code) == 3
    assert code.text.count("[_kept_") == (0 if elsewhere else 8)  # made by four calls, and taken by four
    assert torch.equal(found, fx.GraphModule(nn.Module(), keeping(4, torch.mul, torch.neg, elsewhere))(*given)[0])
    assert seen == [3, 6, 9, 12, *(kept * 3 + elsewhere * (kept == 0) for kept in (3, 2, 1, 0))]


@pytest.mark.parametrize("boxed", [False, True], ids=["given", "boxed"])
def test_stretches_let_values_go_as_early(boxed: bool) -> None:
    alive: list[Any] = []
    seen: list[int] = []

    def makes(x: torch.Tensor, y: Any) -> torch.Tensor:
        alive.append(weakref.ref(result := x + 1))
        return result

    def counts(x: torch.Tensor) -> None:
        seen.append(sum(ref() is not None for ref in alive))

    code = Code(blocks_of(4, makes, counts), boxed=boxed)
    given = [torch.ones(1) for _ in range(5)]
    inputs = [weakref.ref(one) for one in given]
    if boxed:
        assert functions(code) == 3
        code.function(code, given)
        assert not given
    else:
        code.run(*given)
        given.clear()
    assert seen == [2, 3, 4, 5]  # what each block kept so far, and the last result
    assert not any(ref() is not None for ref in inputs)


@pytest.mark.parametrize("block", [0, 2, 3])
def test_an_error_in_a_stretch_shows_its_line_and_its_place(block: int) -> None:
    calls: list[int] = []

    def breaks(_: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == block + 1:
            raise RuntimeError("here")

    code = Code(blocks_of(4, watch=breaks))
    assert functions(code) == 3
    with pytest.raises(RuntimeError, match="here") as error:
        code.run(*(torch.ones(1) for _ in range(5)))
    frame = traceback.extract_tb(error.tb)[-2]
    assert "part_0" in frame.name and frame.line is not None and frame.line.startswith("breaks = ")
    place, _ = code.reached(error.tb) or (0, {})
    assert code.nodes[place].target is breaks
    assert sum(node.target is breaks for node in code.nodes[:place]) == block


def test_what_runs_after_a_stretch_is_placed_too() -> None:
    def breaks(_: torch.Tensor) -> None:
        raise RuntimeError("here")

    graph = blocks_of(4)
    end = graph.output_node()
    with graph.inserting_before(end):
        node = graph.call_function(breaks, (end.args[0][0],))  # type: ignore[index]
    code = Code(graph)
    with pytest.raises(RuntimeError, match="here") as error:
        code.run(*(torch.ones(1) for _ in range(5)))
    place, values = code.reached(error.tb) or (0, {})
    assert code.nodes[place] is node and end.args[0][1].name in values  # type: ignore[index]
    assert code.reached(None) is None


@pytest.mark.parametrize("count", [1, 3_000, 40_000])
def test_a_frame_leaves_room_for_the_frames_of_what_it_calls(count: int) -> None:
    """CPython takes frames from chunks of a power of two, in slots of 8 bytes: this one fills half of its chunk."""
    names = ", ".join(f"v{place}" for place in range(count))
    values: dict[str, Any] = {}
    exec(f"def run(given):\n [{names}] = given\n return v{count - 1}", values)
    run = values["run"]
    run.__code__ = with_room(run.__code__)
    assert run(list(range(count))) == count - 1
    slots = run.__code__.co_nlocals + run.__code__.co_stacksize
    chunk = 1 << (slots + 1_000).bit_length()
    assert chunk - slots > 30_000 and slots > chunk / 2


def test_a_program_runs_in_such_a_frame() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(torch.neg, (x,))])
    code = Code(graph)
    assert code.function.__code__.co_stacksize > 1 << 15 and code.run(torch.ones(()))[0] == -1
