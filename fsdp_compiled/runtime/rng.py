"""The generator's state as a value of the step's state.

Random operators draw from torch's default generator. `Generator` puts a step's own state in its place, and afterwards
the advanced state back into the step's tensor and the user's state back into the generator, so that a step is a
function of its `State` alone and draws nothing from the user's stream.
"""

from __future__ import annotations

import torch


def initial_state(device: torch.device, rank: int) -> torch.Tensor:
    """uint8 CPU tensor: on rank 0 the user's own state; on rank r a stream seeded by the user's seed and r.

    So a world of one draws what eager PyTorch would, ranks draw different masks under one seed, and the same seed
    draws the same again.
    """
    if rank == 0:
        return _get(device)
    # Far apart, so that seeds that users count up (seed, seed + 1, ...) give no rank another rank's stream.
    generator = torch.Generator(device).manual_seed((torch.initial_seed() + rank * 0x9E3779B97F4A7C15) % 2**63)
    return generator.get_state()


def _get(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class Generator:
    """``with Generator(state, device):`` draws from ``state`` and advances it in place."""

    def __init__(self, state: torch.Tensor, device: torch.device) -> None:
        self.state, self.device = state, device

    def __enter__(self) -> None:
        self.users = _get(self.device)
        _set(self.state, self.device)

    def __exit__(self, *_exception: object) -> None:
        self.state.copy_(_get(self.device))
        _set(self.users, self.device)
