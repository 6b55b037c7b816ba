"""An entry in a table is all that makes a new pass, or a new fusion, run: checked, hashed, agreed upon and dumped.

That nothing else of the package knows its module is a test of `test_imports`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp_compiled
from fsdp_compiled import Policy, compile_sharded, passes
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.ir.program import NORM, Program
from fsdp_compiled.lower import fusions
from fsdp_compiled.plan.plan import Plan


def halve(program: Program, plan: Plan) -> Program:
    """A pass that only this file knows: the norm that a step tells is half of what it was."""
    edit = Edit(program)
    norm = edit.outputs[NORM]
    assert norm is not None
    with edit.at(edit.end, "update"):
        edit.set_output(NORM, edit.call(torch.ops.aten.mul.Tensor, norm, 0.5, mark=Mark("norm")))
    return edit.done("halve")


def norm_of(tmp_path: Path) -> tuple[float, str, list[str]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    sharded = compile_sharded(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda model, x: model(x).square().mean(),
        policy=Policy(lower="eager"),
    )
    sharded.step(torch.ones(2, 4))
    files = sorted(path.name for path in sharded.dump(tmp_path).iterdir())
    return sharded.grad_norm.item(), sharded.program.hash, files


@pytest.mark.parametrize("entry", ["pass", "fusion"])
def test_an_entry_is_all_that_makes_it_run(entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, is checked, changes the hash that ranks compare, and has its file in a dump."""
    norm, known, files = norm_of(tmp_path / "without")
    if entry == "pass":
        monkeypatch.setattr(passes, "CLOSING", (halve, *passes.CLOSING))
    else:
        added = {"halve": lambda target: halve if target.trains else None}
        monkeypatch.setattr(fusions, "FUSIONS", {**added, **fusions.FUSIONS})
    halved, other, more = norm_of(tmp_path / "with")
    assert halved == norm / 2 and other != known
    assert any(name.endswith("-halve.txt") for name in more) and not any("halve" in name for name in files)


def test_a_pass_that_breaks_the_program_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The broken control: the entry that was added is checked like any other."""

    def lose(program: Program, plan: Plan) -> Program:
        return Program(program.graph, program.ports[1:], (*program.history, "lose"))

    monkeypatch.setattr(passes, "CLOSING", (lose, *passes.CLOSING))
    with pytest.raises(fsdp_compiled.ProgramError, match=r"after lose: .* ports for"):
        norm_of(tmp_path)
