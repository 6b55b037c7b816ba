"""After a compile, steps, a failing compile and close, the rest of the process is as it was."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.cpu_vec_isa import VecISA
from torch._inductor.output_code import CompiledFxGraph

from fsdp_compiled import CaptureError, Policy, compile_sharded
from tests.launch import launch

KNOWN = frozenset(sys.modules)
WORKER = Path(__file__).parents[1] / "workers" / "nothing_is_left.py"
LOGGERS = ("", "torch", "torch._subclasses.fake_tensor", "torch._dynamo", "torch._inductor")


def around() -> dict[str, Any]:
    """What a compile might touch and has to put back."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    return {
        "methods": (CompiledFxGraph.__call__, VecISA.check_build, nn.SyncBatchNorm.forward, nn.Module.__call__),
        "oneDNN": torch._C._get_mkldnn_enabled(),
        "Dynamo": torch._dynamo.config.get_config_copy(),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "modes": (torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()),
        "threads": torch.get_num_threads(),
        "warnings": list(warnings.filters),
        "loggers": [(one.level, one.disabled, list(one.handlers), list(one.filters)) for one in loggers],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "modules": {name: id(module) for name, module in sys.modules.items() if name in KNOWN},
        "hooks": [sys.excepthook, sys.unraisablehook, threading.excepthook, os._exit, sys.exit],
        "groups": (torch.distributed.destroy_process_group, torch.distributed.destroy_process_group.__code__),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("_TORCHINDUCTOR")},
    }


def branching(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x).square().mean()
    return y if y > 0 else -y


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_the_process_is_as_it_was(lower: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    torch.compile(nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))  # what PyTorch itself sets up when it compiles
    before = around()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = Policy(lower=lower)
    sharded = compile_sharded(model, optimizer, loss=lambda m, x: m(x).square().mean(), policy=policy)
    for _ in range(2):
        sharded.step(torch.randn(3, 4))
    with pytest.raises(CaptureError):
        compile_sharded(nn.Linear(4, 4), loss=branching, policy=policy).value_and_grad(torch.randn(3, 4))
    sharded.close()
    after = around()
    for what, was in before.items():
        assert after[what] == was, what


def test_ranks_leave_the_scripts_process_group_and_no_descriptor_or_thread() -> None:
    assert launch(WORKER, 2, warm=False) == {"differences": [{}, {}], "sum": 2.0}


def test_a_file_that_is_left_open_is_noticed() -> None:
    """The broken control."""
    found = launch(WORKER, 2, "leak", warm=False)["differences"]
    assert all("file descriptors" in rank for rank in found)
