"""`fsdp-compiled check`: what is wrong on a machine is told by name, with an exit code, and what is right is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compiled.cli import check, main
from fsdp_compiled.cli.check import ALONE, KERNELS, TOGETHER, Skipped, Wrong, results
from fsdp_compiled.kernels.operators import IMPLEMENTATIONS, RUNS

CPU = torch.device("cpu")


def wrong(_: torch.device) -> str:
    raise Wrong("losses [2.0], expected [1.0]")


def missing(_: torch.device) -> str:
    raise Skipped("no GPU")


def broken(_: torch.device) -> str:
    raise OSError("no such file\nand more")


def test_each_test_is_a_row_whatever_it_raises() -> None:
    made = tuple(check.Test(run.__name__, run) for run in (wrong, missing, broken, lambda _: "fine"))
    assert list(results(made, CPU)) == [
        ("wrong", "FAILED", "losses [2.0], expected [1.0]"),
        ("missing", "skipped", "no GPU"),
        ("broken", "FAILED", "OSError: no such file"),
        ("<lambda>", "ok", "fine"),
    ]


def test_between_ranks_all_is_well_here_and_the_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "ALONE", (check.Test("nothing", lambda _: "there"),))
    assert main(["check", "--out", str(tmp_path)]) == 0
    said = capfd.readouterr().out
    assert "all is well: 5 passed" in said and "as FSDP2 on 2 ranks" in said and "bit for bit" in said
    found = json.loads((tmp_path / "check.json").read_text())
    assert [row[0] for row in found["rows"]] == ["nothing", *(test.name for test in TOGETHER)]
    assert found["torch"] == torch.__version__ and found["hardware"]


def test_a_failure_is_told_at_the_end_and_by_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "ALONE", (check.Test("arithmetic", wrong),))
    monkeypatch.setattr(check, "TOGETHER", ())
    monkeypatch.setattr(check, "launch", lambda *_: 0)
    assert main(["check", "--out", str(tmp_path)]) == 1
    assert f"1 of 1 failed: arithmetic. Please report it, with {tmp_path / 'check.json'}." in capsys.readouterr().out
    monkeypatch.setattr(check, "launch", lambda *_: 7)
    monkeypatch.setattr(check, "TOGETHER", TOGETHER)
    monkeypatch.setattr(check, "ALONE", ())
    assert main(["check"]) == 1
    assert "a rank ended with exit code 7" in capsys.readouterr().out


def test_one_process_is_no_place_for_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--nproc", "1"]) == 2
    assert "expected 2 or more" in capsys.readouterr().err


def test_a_lowering_that_trains_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same test, of a reference that is a little off."""
    test = check.lowering("eager")
    assert "bit for bit" in test.run(CPU)
    right = check.by_hand
    monkeypatch.setattr(check, "by_hand", lambda *given: [loss * 1.00001 for loss in right(*given)])
    with pytest.raises(Wrong, match="expected"):
        test.run(CPU)


@pytest.mark.parametrize("like", KERNELS, ids=lambda like: like.name)
def test_its_kernels_are_calls_that_their_references_take(like: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.failure(like, CPU) == ""
    monkeypatch.setitem(RUNS, (like.name, "cpu"), lambda *_, **__: torch.zeros(1))
    assert check.failure(like, CPU)


def test_every_kernel_and_both_lowerings_are_among_the_tests() -> None:
    names = {test.name for test in ALONE}
    assert {f"kernel {name}" for name in IMPLEMENTATIONS if "." not in name} <= names
    assert {"lowering eager", "lowering inductor", "CUDA graph"} <= names
