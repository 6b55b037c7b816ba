"""Private names of PyTorch's that are gone, or are not what they were: the same numbers, or an error by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_compiled import CaptureError, Policy, compile_sharded
from fsdp_compiled.capture import aot, dynamo, plain_way
from fsdp_compiled.torch_private import names
from tests import equal_models
from tests.chosen import chosen
from tests.workers.private_names import HOW, asked, loss, model

ROOT = Path(__file__).parents[2]


EVERY = chosen(
    [(use, how) for use in names.TABLE for how in HOW],
    [(use, how) for use, row in names.TABLE.items() for how in HOW if how == "gone" or row.kind == "core"],
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    around = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-m", "tests.workers.private_names"]
    with subprocess.Popen(
        command, env=around, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.mark.parametrize(("use", "how"), EVERY)
def test_without_a_name_all_is_the_same_or_refused_by_name(use: str, how: str, worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(json.dumps([use, how]) + "\n")
    worker.stdin.flush()
    eager, *taken = map(json.loads, json.loads(worker.stdout.readline()))
    kind, _, without = names.TABLE[use]
    assert how != "gone" or {one["name"] for one in taken} == set(asked(use))
    for one in taken:
        case = f"{one['name']} {one['how']}: {one}"
        if "error" in one:
            assert kind == "core" and one["error"] == "UnsupportedTorch", case
            assert "Tested are" in one["text"], case
            assert one["how"] != "gone" or one["name"] in one["text"], case
        else:
            assert one["losses"] == eager["losses"], case
            if one["how"] == "gone" and not one["name"].endswith("?"):
                assert kind != "core" and any(without in line for line in one["logged"]), case


MODELS = [
    *("", "dropout", "autocast", "begins with nothing", "counts", "a literal in each", "tuple", "in place", "tied"),
    *("frozen", "one frozen inside", "literals", "shared", "rotary", "takes turns", "checkpointed", "around"),
    *("hidden states", "two lists"),
]


@pytest.mark.parametrize("like", MODELS)
def test_the_plain_way_gives_the_same_program(like: str) -> None:
    make = equal_models.TwoLists if like == "two lists" else lambda: equal_models.Model(like)
    fast = equal_models.program_of(make())
    with names.plainly():
        assert names.plain() and not names.uses("equal blocks")
        plain = equal_models.program_of(make())
    assert plain.text() == fast.text()
    assert not names.plain()


def test_the_plain_way_replaces_no_function_of_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    whole, own = aot.aot_module_simplified, [name for use in names.FAST for name in names.TABLE[use].names]
    known = {name: one for name in own if names.has(name) and callable(one := names.find(name))}

    def looking(*given: object, **named: object) -> object:
        now = {name: getattr(*names.attribute(name)) for name in known}
        seen.append([name for name, one in known.items() if now[name] is not one])
        return whole(*given, **named)

    monkeypatch.setattr(aot, "aot_module_simplified", looking)
    with names.plainly():
        equal_models.program_of(equal_models.Model())
    assert seen == [[]]
    equal_models.program_of(equal_models.Model())  # control
    assert len(seen) == 2 and len(seen[1]) >= 8


def stepped() -> list[float]:
    net = model()
    sharded = compile_sharded(
        net, torch.optim.SGD(net.parameters(), 0.1), loss=loss, policy=Policy(lower="eager", clip=1.0)
    )
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    return [float(sharded.step(x)) for _ in range(3)]


def test_a_capture_that_fails_the_fast_way_goes_the_plain_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> object:
        raise TypeError("somebody took another argument away")

    expected = stepped()
    monkeypatch.setattr(dynamo.object_identity, "asked_of_lists", lambda: nullcontext() if names.plain() else fails())
    assert stepped() == expected
    assert "took another argument away. Please report it" in caplog.text
    assert not names.plain()


def test_a_model_that_fails_either_way_is_told_so() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square_root()  # type: ignore[operator]

    net = nn.Sequential(nn.Linear(8, 8), Fails())
    sharded = compile_sharded(net, torch.optim.SGD(net.parameters(), 0.1), loss=loss, policy=Policy(lower="eager"))
    with pytest.raises(CaptureError, match="square_root"):
        sharded.step(torch.ones(4, 8))


def test_where_no_model_can_be_captured_pytorch_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "aot_module_simplified", lambda *_, **__: None)
    net = model()
    sharded = compile_sharded(net, torch.optim.SGD(net.parameters(), 0.1), loss=loss, policy=Policy(lower="eager"))
    with pytest.raises(names.UnsupportedTorch, match=r"a model of three layers cannot be captured.*Tested are"):
        sharded.step(torch.ones(4, 8))


@pytest.mark.parametrize("fault", [nullcontext, pytest.fail])
def test_the_trial_tells_a_fast_way_that_gives_another_program(
    fault: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plain_way.disk_cache, "folder", lambda: tmp_path)
    found = []

    def tried() -> str:
        found.append(names.plain())
        return str(fault is nullcontext or names.plain())

    monkeypatch.setattr(plain_way, "_try", tried)
    said = plain_way.trial.__wrapped__()
    assert said == ("" if fault is nullcontext else "on a small model the fast way gives another program")
    assert plain_way.trial.__wrapped__() == said and found == [True, False]  # the second time it is read from disk


def test_the_answer_is_asked_for_anew_where_a_name_is_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plain_way._key()
    assert plain_way._key() == before
    monkeypatch.setattr(names.find("torch._dynamo.guards.CheckFunctionManager"), "build_guards", lambda self: None)
    monkeypatch.setattr(names, "_found", {})
    assert plain_way._key() != before


def test_a_release_that_is_not_known_goes_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not names.plain()
    monkeypatch.setattr(names, "RELEASE", "2.99")
    assert names.plain()
    monkeypatch.setattr(names, "RELEASE", names.TESTED[-1])
    monkeypatch.setenv("FSDP_COMPILED_PLAIN", "1")
    assert names.plain()
