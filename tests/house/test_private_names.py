"""Private names of PyTorch's that are gone, or are not what they were: the same numbers, or an error by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import CaptureError, Policy, compile_sharded
from fsdp_compiled.capture import aot, dynamo, plain_way
from fsdp_compiled.torch_private import names
from tests import equal_models
from tests.chosen import chosen
from tests.workers.private_names import HOW, cases, loss, model

ROOT = Path(__file__).parents[2]
CORE = [use for use, row in names.TABLE.items() if row.kind == "core"]
OTHERS = [use for use in names.TABLE if use not in CORE]
# Some that can be done without, at once. Neighbours in the table share names, so they are not together.
TOGETHER = [(tuple(OTHERS[first::8]), "gone") for first in range(8)]
Tell = Callable[[tuple[str, ...], str], dict[str, Any]]


@pytest.fixture(scope="module")
def tell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tell]:
    """What a process without these names tells."""
    around = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-m", "tests.workers.private_names"]
    with subprocess.Popen(
        command, env=around, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def told(taken: tuple[str, ...], how: str) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([taken, how]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())  # type: ignore[no-any-return]

        yield told


@pytest.fixture(scope="module")
def eager(tell: Tell) -> list[float]:
    return tell((), "")["losses"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("uses", "how"),
    chosen(
        [*(((use,), how) for use in names.TABLE for how in HOW), *TOGETHER],
        [*(((use,), how) for use in CORE for how in HOW), *TOGETHER],
        lambda case: "-".join((*case[0], case[1])),
    ),
)
def test_without_names_all_is_the_same_or_refused_by_name(
    uses: tuple[str, ...], how: str, tell: Tell, eager: list[float]
) -> None:
    core = uses[0] in CORE
    for taken in cases(uses, how):
        one = tell(taken, how)
        case = f"{taken} {how}: {one}"
        if "error" in one:
            assert core and one["error"] == "UnsupportedTorch", case
            assert "Tested are" in one["text"], case
            assert how != "gone" or taken[0] in one["text"], case
            continue
        assert one["losses"] == eager, case
        for use, name in zip(uses, taken):
            if how == "gone" and not name.endswith("?"):
                assert not core and any(names.TABLE[use].without in line for line in one["logged"]), case


MODELS = chosen(
    [
        *("", "dropout", "autocast", "begins with nothing", "counts", "a literal in each", "tuple", "in place", "tied"),
        *("frozen", "one frozen inside", "literals", "shared", "rotary", "takes turns", "checkpointed", "around"),
        *("hidden states", "two lists"),
    ],
    # The others are compared with what is traced and differentiated whole in tests/capture.
    ["", "dropout", "counts", "in place", "shared", "checkpointed", "hidden states", "two lists"],
)


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
