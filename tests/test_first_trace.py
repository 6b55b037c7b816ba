"""The first trace of a process, in a process of its own: what Dynamo does to PyTorch then is nobody's change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
PROGRAM = """
import torch
from torch import nn
from fsdp_compiled import Policy, compile_sharded

model = nn.Linear(2, 2)
loss = lambda model, x: model(x).square().mean()
optimizer = torch.optim.KIND(model.parameters(), lr=0.1)
sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))
for _ in range(3):
    sharded.step(torch.ones(2, 2))
assert sharded.captures == 1, sharded.captures
"""


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])  # AdamW has its methods from Adam
def test_the_first_sharded_of_a_process_compiles_its_step_once(kind: str) -> None:
    command = [sys.executable, "-c", PROGRAM.replace("KIND", kind)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=ENVIRONMENT)
    assert run.returncode == 0 and "compiled again" not in run.stderr, run.stderr[-2000:]
