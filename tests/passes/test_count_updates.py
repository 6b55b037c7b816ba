"""The number of updates is state of the program, as an optimizer's own is: read and advanced with the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compiled import LossScale, Policy, compile_sharded
from fsdp_compiled.ir.program import STEP
from fsdp_compiled.passes.update import count_updates
from tests.toys import squares


@pytest.mark.parametrize("scaled", [False, True])
def test_every_update_is_counted_and_no_void_step(scaled: bool) -> None:
    model = nn.Linear(4, 2)
    policy = Policy(lower="eager", loss_scale=LossScale(init=1024) if scaled else None)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), loss=squares, policy=policy)
    batches = [torch.ones(2, 4), torch.full((2, 4), 1e30), torch.ones(2, 4)]
    counts = [int(sharded.state.step) for batch in batches if sharded.step(batch) is not None]
    assert counts == ([1, 1, 2] if scaled else [1, 2, 3])
    assert STEP in sharded.program.inputs and "count_updates" in sharded.program.history
    sharded.accumulate(batches[0])
    sharded.value_and_grad(batches[0])
    assert int(sharded.state.step) == counts[-1]
    assert all(STEP not in program.inputs for program in sharded.programs if "update" not in program.history)


def test_without_the_pass_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken control: no other place counts."""
    monkeypatch.setattr("fsdp_compiled.passes.count_updates", lambda program, plan: program.after("count_updates"))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sharded = compile_sharded(model, optimizer, loss=squares, policy=Policy(lower="eager"))
    sharded.step(torch.ones(2, 4))
    assert int(sharded.state.step) == 0 and count_updates.__name__ in sharded.program.history
