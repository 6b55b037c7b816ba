"""Where shards and optimizer state live between steps: on the device, or in host memory under ``Policy.offload``.

Host memory is pinned, so that the device copies from and to it by itself; a step returns before its copies back are
done, so whoever reads that memory on the host calls `wait_for_host_memory` first.
"""

from __future__ import annotations

import torch

from fsdp_compiled.plan.plan import Plan


def to_state_device(value: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The same values where the plan keeps shards: the tensor itself, if it is there already."""
    own = value.to(plan.state_device)
    return own.pin_memory() if plan.device.type == "cuda" and plan.state_device.type == "cpu" else own


def wait_for_host_memory(plan: Plan) -> None:
    """Waits until host memory holds what the device was told to write into it."""
    if plan.device.type == "cuda" and plan.state_device.type == "cpu":
        torch.cuda.synchronize(plan.device)
