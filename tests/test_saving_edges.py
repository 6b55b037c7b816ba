"""Saves that meet something odd: another of the same process, a file system without locks, a kill between two names."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.runtime.checkpoint.values import decode, encode


def build(steps: int = 1) -> Sharded:
    model = nn.Linear(4, 4)
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda m, x: m(x).sum(), policy=Policy(lower="eager")
    )
    for _ in range(steps):
        sharded.step(torch.ones(2, 4))
    return sharded


def test_containers_with_a_bound_and_odd_arrays_come_back() -> None:
    value = {
        "bounded": deque([1, (2, torch.ones(1))], maxlen=2),
        "arrays": [np.arange(6).reshape(2, 3)[::-1, ::2], np.arange(3, dtype=">i4"), np.broadcast_to(1.5, (2, 2))],
    }
    tensors: dict[str, torch.Tensor] = {}
    found = decode(encode(value, "x", tensors), tensors)
    assert found["bounded"] == value["bounded"] and found["bounded"].maxlen == 2
    for one, expected in zip(found["arrays"], value["arrays"], strict=True):
        assert np.array_equal(one, expected)
