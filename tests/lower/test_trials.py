"""A graph that gives other numbers than its program is noticed at its first launch, and never used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled import Sharded
from fsdp_compiled.lower import trials
from fsdp_compiled.lower.cuda_graph import WARM
from tests.graphs import make, refuses_the_graph, same, stand_in
from tests.standin import Recorded, StandIn
from tests.toys import batches

Damage = Callable[[Recorded], None]


def without_the_last_write(graph: Recorded) -> None:
    """As if an operator had been left out of the capture."""
    calls = graph.calls
    last = max(
        index
        for index, (func, *_) in enumerate(calls)
        if func is torch.ops.aten.addcdiv_.default or "add_" in str(func)
    )
    del calls[last]


def reads_other_memory(graph: Recorded) -> None:
    """As if a tensor that the graph reads had been freed and its place taken."""
    replay = graph.replay

    def launch() -> None:
        replay()
        for slot in graph.slots:
            tensor = slot.outside() if slot.outside is not None else None
            if tensor is not None and tensor.is_floating_point() and tensor.numel() > 8:
                tensor.mul_(1.5)
                return

    graph.replay = launch  # type: ignore[method-assign]


def gives_nan(graph: Recorded) -> None:
    replay = graph.replay

    def launch() -> None:
        replay()
        for slot in graph.slots:
            if slot.kept is not None and slot.kept.dtype == torch.uint8:  # the results, as they are handed out
                slot.kept.fill_(255)

    graph.replay = launch  # type: ignore[method-assign]


class Broken(StandIn):
    """Captures, and then something happens to the graph."""

    def __init__(self, damage: Damage) -> None:
        super().__init__()
        self.damage = damage

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Recorded]:
        results, graph = super().capture(run)
        self.damage(graph)
        return results, graph


@pytest.mark.parametrize("damage", [without_the_last_write, reads_other_memory, gives_nan])
def test_a_broken_graph_is_dropped_and_the_steps_are_the_programs(
    damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    sharded, plain = make(Broken(damage), dropout=0.2), make(False, dropout=0.2)
    for batch in batches(WARM + 4):
        state = torch.get_rng_state()
        left = sharded.step(*batch)
        torch.set_rng_state(state)
        assert torch.equal(left, plain.step(*batch))
    assert same(sharded.state, plain.state)
    assert sharded.replays == 0 and stand_in(sharded).log.count("capture") == 1
    said = [record.getMessage() for record in caplog.records if "without a CUDA graph" in record.getMessage()]
    assert len(said) == 1 and "other numbers than the program" in said[0] and "report" in said[0]
    assert torch.__version__ in said[0]


def test_without_the_comparison_the_broken_graph_would_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(trials, "BOUND", float("inf"))
    sharded, plain = make(Broken(reads_other_memory)), make(False)
    for batch in batches(WARM + 1):
        sharded.step(*batch)
        plain.step(*batch)
    assert sharded.replays == 1 and not same(sharded.state, plain.state)


def test_where_a_graph_was_asked_for_other_numbers_are_an_error_and_nothing_is_written() -> None:
    refuses_the_graph(make(Broken(gives_nan), wanted=True), "other numbers")


def check_replays(sharded: Sharded, plain: Sharded) -> None:
    """Four steps are replayed, and all give what those without a graph do."""
    for batch in batches(WARM + 4):
        state = torch.get_rng_state()
        left = sharded.step(*batch)
        torch.set_rng_state(state)
        assert torch.equal(left, plain.step(*batch))
    assert sharded.replays == 4 and same(sharded.state, plain.state)


def test_a_graph_that_is_right_is_tried_once_and_its_numbers_are_kept() -> None:
    sharded, plain = make(True, dropout=0.2), make(False, dropout=0.2)
    check_replays(sharded, plain)


def test_checksums_tell_a_moved_element_from_a_reordered_sum() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(10_000)
    expected = {"shard": trials.checksum(tensor)}
    nudged = {"shard": trials.checksum(tensor * (1 + 1e-6 * torch.randn(10_000)))}
    assert not trials.difference(expected, nudged)
    assert trials.difference(expected, {"shard": trials.checksum(tensor.roll(1) * 1.01)})
    assert trials.difference(expected, {"shard": (float("nan"), float("nan"))})
    nan = {"shard": (float("nan"), float("nan"))}
    assert not trials.difference(nan, nan)


class Memory(TorchDispatchMode):
    """A GPU's memory: no more than this for one tensor. A sum in another dtype copies what it adds (PyTorch's
    ``ReduceOpsUtils.h``, ``make_reduction``: ``self.to(in_dtype)``)."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = (kwargs or {}).get("dtype")
        if func is torch.ops.aten.sum.default and wide not in (None, args[0].dtype):
            self.take(args[0].numel() * wide.itemsize)
        result = func(*args, **(kwargs or {}))
        known = {one.untyped_storage()._cdata for one in pytree.tree_leaves(args) if isinstance(one, torch.Tensor)}
        for one in pytree.tree_leaves(result):
            if one.untyped_storage()._cdata not in known:
                self.take(one.nbytes)
        return result

    def take(self, size: int) -> None:
        if size > self.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")


def test_a_checksum_takes_little_memory_however_large_the_tensor() -> None:
    tensor = torch.randn(3 * trials.SLICE + 5)
    expected = float(tensor.double().sum()), float(tensor.double().abs().sum())
    with Memory(8 * trials.SLICE):
        assert trials.checksum(tensor) == pytest.approx(expected, rel=1e-9)
        with pytest.raises(torch.OutOfMemoryError):  # the control
            tensor.sum(dtype=torch.float64)


@pytest.mark.parametrize("good", [0, 1, 10])  # checksums before one fails, of the 14 of program and launch
def test_a_trial_without_memory_is_undone_and_the_graph_is_launched_untried(
    good: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sharded, plain = make(True, dropout=0.2), make(False, dropout=0.2)
    checksum, count = trials.checksum, 0

    def once(tensor: torch.Tensor) -> trials.Checksum:
        nonlocal count
        count += 1
        if count > good:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return checksum(tensor)

    monkeypatch.setattr(trials, "checksum", once)
    check_replays(sharded, plain)
    said = [record.getMessage() for record in caplog.records if "not compared" in record.getMessage()]
    assert len(said) == 1 and "(rank 0: OutOfMemoryError: CUDA out of memory)" in said[0]
    assert count == good + 1, "a trial is made once"
    assert stand_in(sharded).log[WARM + 1 : WARM + 3] == ["warm", "launch"]


def test_copies_that_a_host_has_no_room_for_are_not_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert 2**20 < trials.free_memory() < 2**60
    said = {"memory.max": "100\n", "memory.current": "90\n", "memory.stat": "anon 80\ninactive_file 7\n"}
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: said[path.name] if path.name in said else read(path))
    assert trials.free_memory() == 17
    sharded, plain = make(True), make(False)
    monkeypatch.setattr(trials, "free_memory", lambda: 1024.0)
    for batch in batches(WARM + 4):
        assert torch.equal(sharded.step(*batch), plain.step(*batch))
    assert sharded.replays == 4 and same(sharded.state, plain.state)
    assert stand_in(sharded).log.count("warm") == WARM, "the program did not run beside it"
    assert "MemoryError: copies take" in caplog.text
