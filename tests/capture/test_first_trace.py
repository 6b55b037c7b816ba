"""The first trace of a process, in a process of its own: what Dynamo does to PyTorch then is nobody's change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
PROGRAM = """
import os
import sys
import torch
from torch import nn
from fsdp_compiled import Policy, compile_sharded

for kind in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, kind
        continue
    model = nn.Linear(2, 2)
    loss = lambda model, x: model(x).square().mean()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))
    for _ in range(3):
        sharded.step(torch.ones(2, 2))
    assert sharded.captures == 1, (kind, sharded.captures)
    break
"""


def test_the_first_sharded_of_a_process_compiles_its_step_once() -> None:
    """For each optimizer in a fork of a process that has traced nothing; AdamW has its methods from Adam."""
    command = [sys.executable, "-c", PROGRAM, "SGD", "AdamW"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=ENVIRONMENT)
    assert run.returncode == 0 and "compiled again" not in run.stderr, run.stderr[-2000:]
