"""This rank's shards in the compute dtype, kept true to the shards.

    step         gathers read the copy; the update writes shard and copy together
    otherwise    shard.copy_(...), another State      -> the copy is made anew before the next step that reads it

Copies are a cache, and no part of a `State`. That somebody wrote a shard is seen by the counter that PyTorch raises
with every in-place operator; a kernel of one's own, a collective, or ``tensor.data`` raises none. After one of those,
say so: ``torch.autograd.graph.increment_version(shard)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, is_

import torch

from fsdp_compiled.plan.plan import Plan

version = attrgetter("_version")


class Copies:
    """``tensors``: by buffer key. They keep their addresses; what they hold counts only after `follow`."""

    def __init__(self, plan: Plan) -> None:
        self.tensors = {
            buffer.key: torch.empty(plan.shard_numel(buffer), dtype=plan.compute_dtype(buffer), device=plan.device)
            for buffer in plan.buffers
            if plan.copied(buffer)
        }
        self._of: list[torch.Tensor] = []  # the shards that they are copies of
        self._versions: list[int] = []

    def follow(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Makes them copies of these, where they are not."""
        now = [shards[key] for key in self.tensors]
        if list(map(version, now)) != self._versions or not all(map(is_, now, self._of)):
            known = {id(shard): number for shard, number in zip(self._of, self._versions, strict=False)}
            for shard, copy in zip(now, self.tensors.values(), strict=True):
                if known.get(id(shard)) != shard._version:
                    copy.copy_(shard)
        self._of, self._versions = now, []  # a step that fails may leave anything

    def step_returned(self) -> None:
        """The step is over: it wrote shards and copies together, or neither."""
        self._versions = list(map(version, self._of))
