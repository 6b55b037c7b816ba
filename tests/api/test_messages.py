"""What a person reads when a call cannot be made: their own words, before anything else of PyTorch's or Dynamo's."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded, fully_shard
from fsdp_compiled.cli.launch import refuse_used
from tests.chosen import needs_torch

ROOT = Path(__file__).parents[2]
EAGER = Policy(lower="eager")


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, weight: float = 1.0) -> torch.Tensor:
    return (model(x) - y).square().mean() * weight


def sharded_of(loss: Callable[..., Any] | None, model: nn.Module | None = None) -> Any:
    model = nn.Linear(4, 4) if model is None else model
    return compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, policy=EAGER)


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("objective", "batch", "named", "message"),
    [
        (
            loss,
            (X,),
            {},
            r"missing.* 'y'.*\(model, x, y, \*, weight=1.0\).*\(model, float32\[2, 4\]\)",
        ),
        (loss, (X, X, X), {}, r"too many positional arguments.*Got: +\(model, (float32\[2, 4\](, )?){3}\)"),
        (loss, (X,), {"z": {"a": X}}, r"missing.*'y'.*z={a: float32\[2, 4\]}"),
        (loss, (X, X), {"labels": X}, r"unexpected keyword argument 'labels'.*labels=float32"),
        (None, (X, X), {}, r"Linear.forward does not take.*Expected: \(input\).*Got: +\(float32"),
    ],
)
def test_a_wrong_number_of_arguments_says_what_is_expected_and_what_was_given(
    objective: Callable[..., Any] | None, batch: tuple[Any, ...], named: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}.*in its order or by name"):
        sharded_of(objective).step(*batch, **named)


def test_arguments_that_fit_are_let_through() -> None:
    assert sharded_of(loss).step(X, y=X, weight=2.0) >= 0
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda _, inputs: inputs[:1])  # which may take any number
    assert sharded_of(lambda model, *batch: model(*batch).mean(), model).step(X, X).isfinite()


def test_sizes_that_do_not_fit_are_told_in_one_message(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ValueError, match=r"(?s)test_messages.py.*\[2, 7\] X \[4, 4\]"),
    ):
        sharded_of(loss).step(torch.zeros(2, 7), X)
    assert not caplog.records and "fake_tensor" not in "".join(capfd.readouterr())


def test_what_the_users_code_raises_is_what_the_call_raises() -> None:
    def strict(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 3:
            raise ValueError("at least three rows, please")
        return model(x).mean()

    with pytest.raises(ValueError, match=r"^at least three rows, please$"):
        sharded_of(strict).step(X)


KEPT: list[Any] = []


@pytest.mark.parametrize("keep", [KEPT.append, lambda number: KEPT.extend([2 * number]), lambda number: number])
def test_a_number_that_is_read_off_a_tensor_and_kept_says_what_to_return(keep: Callable[[Any], Any]) -> None:
    if keep == KEPT.append:
        needs_torch((2, 13), "its Dynamo refuses the list before the number is asked for")

    def noted(model: nn.Module, x: torch.Tensor) -> Any:
        found = model(x).mean()
        return found, keep(found.item())

    class Notes(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y, keep(float(y.mean()))

    model = fully_shard(Notes(4, 4))
    for call in (sharded_of(noted).step, model):
        with pytest.raises(ValueError, match=r"(?s)test_messages.py.*(item|float)\(.*Cure: .*\(loss, aux\)") as caught:
            call(X)
        assert "requires_grad" not in str(caught.value)
    assert not KEPT


def test_a_model_that_was_taken_over_says_so_inside_another_ones_loss() -> None:
    needs_torch((2, 12), "its Dynamo does not say what an exception says")
    critic = nn.Linear(4, 1)
    sharded = sharded_of(lambda model, x: model(x).mean(), critic)
    with pytest.raises(ValueError, match=r"(?s)This Linear was taken over by compile_sharded.*Cure: .*submodule"):
        sharded_of(lambda model, x: critic(model(x)).mean()).step(X)
    with pytest.raises(ValueError, match=r"(?s)A Sharded object of compile_sharded.*Cure: .*one module"):
        sharded_of(lambda model, x: sharded(model(x)).mean()).step(X)


def test_a_run_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out: .*file/run cannot be written \(Not a directory\)"):
        refuse_used(tmp_path / "file" / "run")
    refuse_used(tmp_path / "fine")


def test_a_cache_folder_that_cannot_be_made_is_replaced_and_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = (
        "import logging, torch; logging.basicConfig()\n"
        "from fsdp_compiled import Policy, compile_sharded\n"
        "model = torch.nn.Linear(4, 4)\n"
        "sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1),\n"
        "                          loss=lambda m, x: m(x).square().mean(), policy=Policy(lower='eager'))\n"
        "print(sharded.step(torch.ones(2, 4)).item() > 0, sharded.step(torch.ones(3, 4)).item() > 0)\n"
        "import os, sys; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
        "sys.stdout.flush()\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait(); print(os.path.isdir(os.environ['TORCHINDUCTOR_CACHE_DIR']))\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answers, place, after_fork = done.stdout.split("\n")[:3]
    assert answers == "True True" and not Path(place).exists()  # gone when the process ended
    assert after_fork == "True"  # and not when one that it had forked did
    assert done.stderr.count("cannot be used (Not a directory)") == 1, done.stderr
