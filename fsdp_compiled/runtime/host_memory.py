"""Where shards and optimizer state live between steps: on the device, or in host memory under ``Policy.offload``; and
the rooms that a step has there for what its forward keeps.

Host memory is pinned, so that the device copies from and to it by itself; a step returns before its copies back are
done, so whoever reads that memory on the host calls `wait_for_host_memory` first.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels import host_copies
from fsdp_compiled.plan.plan import Plan


def to_state_device(value: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The same values where the plan keeps shards: the tensor itself, if it is there already."""
    own = value.to(plan.state_device)
    return own.pin_memory() if plan.device.type == "cuda" and plan.state_device.type == "cpu" else own


def wait_for_host_memory(plan: Plan) -> None:
    """Waits until host memory holds what the device was told to write into it."""
    if plan.device.type == "cuda" and plan.state_device.type == "cpu":
        torch.cuda.synchronize(plan.device)


class Rooms(dict[str, torch.Tensor]):
    """Host memory for each value that a program keeps there, by name."""

    def __init__(self, program: Program) -> None:
        self.devices = {node.meta["val"].device for node in program.marked("restore")} - {torch.device("cpu")}
        for port, node in program.inputs.items():
            if port.kind == "room":
                self[port.key] = host_copies.make_room(node.meta["val"], pinned=bool(self.devices))

    def __del__(self) -> None:
        """What a device was told to copy goes on after the host forgot the program."""
        for device in self.devices:
            with suppress(Exception):  # Python ends
                torch.cuda.synchronize(device)
