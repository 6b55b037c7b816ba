"""What this rank writes of the flat shards: found at the first save, and again only when what it depends on is another.

That is the plan, the optimizer's rules, who else holds the same elements, and where in memory the shards are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_compiled.runtime.checkpoint.image import Part, part
from fsdp_compiled.runtime.checkpoint.manifest import Entry
from fsdp_compiled.runtime.checkpoint.stretches import Holders, aliases, held, tensors
from fsdp_compiled.runtime.checkpoint.trained import Trained


@dataclass(frozen=True)
class Shards:
    """``entries``: of all ranks together, without pieces; ``parts``: this rank's."""

    entries: Mapping[str, Entry]
    parts: Sequence[Part]
    aliases: Mapping[str, str]


class WrittenShards:
    """Remembers the last that were found."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._by: tuple[object, ...] = ()  # what is compared by identity, kept so that it stays one
        self._found: Shards | None = None

    def find(self, trained: Trained, holders: Holders) -> Shards:
        plan, state, rules = trained.plan, trained.state, trained.rules
        by = (plan, *rules)
        of = (holders, _memory(trained.weights), _memory(state.optimizer))
        alike = len(by) == len(self._by) and all(one is other for one, other in zip(by, self._by))
        if self._found is None or not alike or of != self._of:
            entries = tensors(plan, rules, state.optimizer)
            own = held(plan, rules, holders.places[holders.rank], trained.weights, state.optimizer, holders)
            parts = [part(one.name, one.start, one.values, entries[one.name].shape, one.cut) for one in own]
            self._found = Shards(entries, parts, aliases(plan))
            self._by, self._of = by, of
        return self._found


def _memory(shards: Mapping[str, torch.Tensor]) -> list[tuple[object, ...]]:
    """Where each lies. What was found holds views of them, so no other comes to the same place."""
    return [(name, one.data_ptr(), one.dtype, one.shape, one.stride()) for name, one in shards.items()]
