"""What a step trains on: the same windows whatever the number of ranks, from a position that can be saved.

    epoch 0               epoch 1
    7 2 9 | 0 5 1 | 8 3   6 | 4 1 0 | ...       the order of windows, from the seed alone; | where a step begins
            ^ position 3

*Position* counts the windows that steps have taken since the run began, by all ranks together. A step takes the next
``batch`` windows, across the end of an epoch too, so that in each epoch every window is seen once. How the windows of a
step are dealt out to ranks follows from the number of ranks, and is the only thing that does: `Share`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_compiled.cli.data import Windows, padded


@dataclass(frozen=True)
class Share:
    """How ``batch`` windows are dealt out: each rank takes ``parts`` microbatches of ``rows`` windows.

        batch 12, world 3, at most 2 rows       batch 8, world 3, at most 4 rows
        rank 0:  0  1 |  2  3                   rank 0:  0  1  2
        rank 1:  4  5 |  6  7                   rank 1:  3  4  5
        rank 2:  8  9 | 10 11                   rank 2:  6  7  -      -: a row whose targets do not count

    On fewer ranks a rank takes more microbatches (`Sharded.accumulate`), in the memory of one; on more ranks it takes
    fewer rows.
    """

    batch: int
    world: int
    rows: int
    parts: int

    @property
    def padded(self) -> bool:
        """Whether some rows do not count."""
        return self.rows * self.parts * self.world != self.batch


def share(batch: int, world: int, most: int) -> Share:
    """With at most ``most`` windows of a rank at once."""
    of_a_rank = -(-batch // world)
    parts = -(-of_a_rank // most)
    return Share(batch, world, -(-of_a_rank // parts), parts)


class Loader:
    """This rank's microbatches, step after step. Has the state of all ranks' position, the same on each of them."""

    def __init__(self, windows: Windows, how: Share, seed: int, rank: int) -> None:
        self.position = 0
        self._windows, self._how, self._seed, self._rank = windows, how, seed, rank
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._source = {  # what a position means something for
            "text": zlib.crc32(windows.text.numpy().data),
            "bytes": windows.text.numel(),
            "context": windows.context,
            "seed": seed,
            "batch": how.batch,
        }

    def __next__(self) -> list[tuple[Tensor, Tensor]]:
        """``how.parts`` pairs of tokens and targets [rows, context]; the position moves on."""
        indices, rows = self.windows_at(self.position), self._how.rows
        self.position += self._how.batch
        own = rows * self._how.parts
        mine = indices[self._rank * own : (self._rank + 1) * own]
        tokens, targets = padded(*self._windows[mine], own)
        return list(zip(tokens.split(rows), targets.split(rows), strict=True))

    def windows_at(self, position: int) -> Tensor:
        """The windows [batch] that a step at this position trains on, all ranks together."""
        found, needed = [], self._how.batch
        while needed:
            epoch, start = divmod(position, len(self._windows))
            piece = self._permutation(epoch)[start : start + needed]
            found.append(piece)
            position, needed = position + len(piece), needed - len(piece)
        return torch.cat(found)

    def _permutation(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            # Of a seed the generator uses 32 bits; this spreads both numbers over them.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {epoch}".encode()))
            self._epoch, self._order = epoch, torch.randperm(len(self._windows), generator=generator)
        return self._order

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, **self._source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` for the position in another order: of another text, seed, context or batch."""
        for name, meaning in MEANINGS.items():
            if state.get(name) != self._source[name]:
                raise ValueError(
                    f"the checkpoint's position is in other data: {meaning} is {self._source[name]}, and was "
                    f"{state.get(name)} when it was saved. Give the same --data, --context, --seed and --global-batch, "
                    "or an empty --checkpoint folder"
                )
        self.position = int(state["position"])


MEANINGS = {
    "bytes": "the number of bytes to train on",
    "text": "the checksum of the text to train on",
    "context": "--context",
    "seed": "--seed",
    "batch": "the number of windows in a step",
}
