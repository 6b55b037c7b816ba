"""Uneven inputs: a rank that has run out of batches goes on with weight zero until all ranks have.

    rank 0: with sharded.join():          rank 1: with sharded.join():
                for batch in five:                    for batch in three:
                    sharded.step(batch)                   sharded.step(batch)
                                                      # here it makes two more steps, on zeros that count nothing

Every rank holds shards that the others need, so it cannot leave: it *shadows* the calls of the ranks that have batches.
Before each call inside `join`, ranks tell each other what they are about to run (one small exchange between hosts, as
in DDP's `Join`). The programs are those of ``Policy(weigh="rows")``, with no collective more.

A call that fails leaves the block as it is: ranks with batches may catch the error and go on, and a rank that has run
out goes on in their steps. A rank that leaves the block by an error tells the others, and the block ends for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_compiled.distributed.call_store import REFUSED, different
from fsdp_compiled.distributed.mesh import Mesh, RankError, exchange

OUT = "has run out of batches"
LEFT = "left join: "


class RankLeft(RankError):
    """A rank left the block by an error."""


@dataclass(frozen=True)
class Announced:
    """What a rank is about to run, for those that shadow it."""

    kind: str
    label: str
    example: Any  # the batch, its tensors on the meta device
    hypers: Mapping[str, float]
    modes: Any  # the modes around it

    def batch(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A batch of zeros of the same form."""
        return pytree.tree_map_only(
            torch.Tensor,
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).zero_(),
            self.example,
        )


class Joined:
    """What `Sharded.join` gives: ``shadowed``, how many steps this rank made after it had run out."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.shadows: Announced | None = None  # the call that this rank makes for another
        self.shadowed = 0
        self._over: str | None = None  # why nobody is in the block any more

    def announce(self, kind: str, label: str, batch: Any, hypers: Mapping[str, float], modes: Any) -> None:
        """Tells ranks that have run out what to run. Raises `RankError` if ranks are about to do different things."""
        if self.shadows is None:
            example = pytree.tree_map_only(
                torch.Tensor,
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
                batch,
            )
            self._agree(Announced(kind, label, example, dict(hypers), modes))

    def refuse(self, reason: str) -> None:
        """Makes it an error on every rank that this one refuses its call."""
        self._agree(Announced("", REFUSED + reason, None, {}, None))

    def leave(self, error: Exception) -> None:
        """Tells the others that this rank leaves the block by this error."""
        if self._over is None:
            with suppress(Exception):
                self._agree(Announced("", f"{LEFT}{type(error).__name__}: {error}", None, {}, None))

    def shadow(self, run: Callable[[Announced], None], closed: Callable[[], bool]) -> None:
        """Runs what the others run, until all have run out; ``closed`` says whether that has become impossible."""
        failure: Exception | None = None
        while True:
            try:
                call = self._agree(None)
            except RankLeft as left:
                raise failure or left from None
            except RankError as error:
                failure = error  # the others have one as well, and may catch it
                continue
            if call is None:
                return
            self.shadows = call
            try:
                run(call)
                self.shadowed += call.kind in ("step", "last")
            except Exception as error:
                if closed():
                    raise
                failure = error
            finally:
                self.shadows = None

    def _agree(self, mine: Announced | None) -> Announced | None:
        if self._over is not None:
            raise RankLeft(self._over)
        calls = exchange(mine, self._mesh)
        if any(call is not None and call.label.startswith(LEFT) for call in calls):
            lines = [f"  rank {rank}: {call.label if call else OUT}" for rank, call in enumerate(calls)]
            self._over = "\n".join(["A rank left the block of join by an error, and so it ends on all:", *lines])
            raise RankLeft(self._over)
        labels = {call.label for call in calls if call is not None}
        if len(labels) > 1 or any(label.startswith(REFUSED) for label in labels):
            raise RankError(different({rank: call.label if call else OUT for rank, call in enumerate(calls)}))
        return next((call for call in calls if call is not None), None)
