"""A save that comes while one is being written, into a second buffer; and what a save need not do again."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.distributed import mesh
from fsdp_compiled.runtime.checkpoint import data_file, saving
from fsdp_compiled.runtime.checkpoint.saving import Image
from fsdp_compiled.runtime.checkpoint.writing import SaveError

X = torch.ones(2, 4)


def build() -> Sharded:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return compile_sharded(
        model,
        torch.optim.AdamW(model.parameters()),
        loss=lambda m, x: m(x).square().mean(),
        policy=Policy(lower="eager"),
    )


def weights(sharded: Sharded) -> list[torch.Tensor]:
    return [one.clone() for one in (*sharded.state.parameters.values(), *sharded.state.optimizer.values())]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_a_second_save_copies_while_the_first_is_written(tmp_path: Path, writers: threading.Event) -> None:
    sharded, states, futures = build(), [], []
    for _ in range(2):
        sharded.step(X)
        states.append(weights(sharded))
        futures.append(sharded.save(tmp_path, busy="double_buffer"))
    sharded.step(X)
    assert not any(future.done() for future in futures)
    with pytest.raises(ValueError, match=r"step 1 in .* is still being written"):
        sharded.save(tmp_path, busy="refuse")
    threading.Timer(0.2, writers.set).start()
    third = sharded.save(tmp_path, busy="double_buffer")  # waits for the first, whose buffer it needs
    assert futures[0].done()
    assert [one.result().name for one in (*futures, third)] == ["step-1", "step-2", "step-3"]
    assert len(sharded._checkpoints._images) == 2
    other = build()
    for step, state in enumerate(states, 1):
        assert other.load(tmp_path, step=step) == step and same(weights(other), state)
    assert not same(*states)


def test_one_buffer_serves_who_waits(tmp_path: Path, writers: threading.Event) -> None:
    sharded = build()
    writers.set()
    for _ in range(3):
        sharded.step(X)
        sharded.save(tmp_path)
    sharded.step(X)
    sharded.save(tmp_path, wait=True)
    assert len(sharded._checkpoints._images) == 1


def test_the_second_is_written_after_the_first_and_when_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded, go, order, write = build(), threading.Event(), [], data_file.write

    def failing(path: Path, *given: Any) -> Any:
        go.wait(60)
        order.append(path.parent.name.split(".")[1])
        if order == ["step-0"]:
            raise OSError(28, "No space left on device")
        return write(path, *given)

    monkeypatch.setattr(data_file, "write", failing)
    first = sharded.save(tmp_path)
    sharded.step(X)
    second = sharded.save(tmp_path, busy="double_buffer", keep=1)
    go.set()
    assert second.result() == tmp_path / "step-1" and order[0] == "step-0" and set(order[1:]) == {"step-1"}
    with pytest.raises(SaveError, match=r"step 0 .* No space left"):
        sharded.step(X)
    sharded.step(X)
    with pytest.raises(SaveError):
        first.result()
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-1"]


def test_a_step_that_is_being_written_is_replaced_when_it_is_there(tmp_path: Path, writers: threading.Event) -> None:
    sharded = build()
    first = sharded.save(tmp_path)
    threading.Timer(0.2, writers.set).start()
    again = sharded.save(tmp_path, busy="double_buffer", replace=True)
    assert first.done() and again.result() == tmp_path / "step-0"


def test_ranks_meet_twice_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, met, agree = build(), [], mesh.agree

    def count(ranks: Any, what: str, text: str, *given: Any, **named: Any) -> Any:
        met.append(text)
        return agree(ranks, what, text, *given, **named)

    monkeypatch.setattr(mesh, "agree", count)
    sharded.save(tmp_path, wait=True)
    assert met == ["what they save", "the end"]


def test_what_is_written_is_found_again_where_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, held = [], saving.held
    monkeypatch.setattr(saving, "held", lambda *given: (found.append(1), held(*given))[1])
    sharded = build()
    for _ in range(3):
        sharded.step(X)
        sharded.save(tmp_path, wait=True)
    assert len(found) == 1
    key, old = next(iter(sharded.state.parameters.items()))
    sharded.state.parameters[key] = expected = 3.0 * (old != 0)  # in other memory; what fills up is zero
    place = sharded.save(tmp_path / "other", wait=True).result()
    assert len(found) == 2
    old.fill_(5.0)
    other = build()
    other.load(place.parent)
    assert torch.equal(other.state.parameters[key], expected) and expected.any()


def test_another_layout_of_what_is_beside_the_shards_is_arranged_anew(tmp_path: Path) -> None:
    class Kept:
        value: Any = 0

        def state_dict(self) -> Any:
            return {"value": self.value}

        def load_state_dict(self, state: Any) -> None:
            self.value = state["value"]

    sharded, kept = build(), Kept()
    for step, value in enumerate((torch.arange(3), torch.arange(3) + 7, torch.arange(5.0), 2, torch.arange(3))):
        sharded.step(X)
        kept.value, state = value, weights(sharded)
        sharded.save(tmp_path, wait=True, extra={"kept": kept})
        other, read = build(), Kept()
        assert other.load(tmp_path, extra={"kept": read}) == step + 1
        assert same(weights(other), state) and torch.equal(torch.as_tensor(read.value), torch.as_tensor(value))
        assert torch.equal(other.state.buffers["1.running_mean"], sharded.state.buffers["1.running_mean"])


def test_what_fails_while_it_copies_is_told_as_what_fails_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = build()

    def none(*_: Any) -> Any:
        raise MemoryError("no host memory")

    with monkeypatch.context() as patched:
        patched.setattr(Image, "fill", none)
        future = sharded.save(tmp_path)
    with pytest.raises(SaveError, match="rank 0: MemoryError: no host memory"):
        future.result()
    assert sharded.save(tmp_path, wait=True).result() == tmp_path / "step-0"


def test_an_interrupt_while_it_copies_ends_this_save_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = build()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Image, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sharded.save(tmp_path)
    with pytest.raises(SaveError, match="it was interrupted while it copied"):
        sharded.save(tmp_path, wait=True)
    assert sharded.save(tmp_path, wait=True).result() == tmp_path / "step-0"


def test_what_no_file_can_hold_is_refused_before_ranks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"scales": torch.zeros(2, dtype=torch.float8_e8m0fnu)}

    monkeypatch.setattr(saving, "digest", None)
    with pytest.raises(ValueError, match=r"extra odd:scales is torch.float8_e8m0fnu, which safetensors files cannot"):
        build().save(tmp_path, extra={"odd": Odd()})
    assert sorted(os.listdir(tmp_path)) == [".lock"]
