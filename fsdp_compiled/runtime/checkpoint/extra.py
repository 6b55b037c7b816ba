"""The user's own objects beside what is trained (``extra``): which states fit them, and giving them these."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from fsdp_compiled.runtime.checkpoint.contents import dealt_out
from fsdp_compiled.runtime.checkpoint.manifest import Manifest

log = logging.getLogger("fsdp_compiled")


def check_extra(
    manifest: Manifest, values: Mapping[str, tuple[Any, bool]], extra: Mapping[str, Any], world: int
) -> None:
    """``world``: how many ranks with batches of their own there are."""
    before = len(set(manifest.rows))
    for name, holder in extra.items():
        if f"extra {name}" in values and before != world and dealt_out(holder):
            raise ValueError(
                f"extra[{name!r}] deals examples out to {world} ranks, and its state in the checkpoint says how many "
                f"each of {before} had taken: examples would be skipped or seen twice. Load on as many ranks, or leave "
                "it out, and begin behind the examples that all ranks together have taken."
            )
        if not values.get(f"extra {name}", (None, True))[1]:
            raise ValueError(
                f"extra[{name!r}] was saved with another state on each of {manifest.world} ranks, and cannot be "
                "given to another number of them. Load on as many ranks, or leave it out; what is to be loaded on any "
                "number has a state_dict() that is the same on all ranks."
            )


def load_extra(values: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """Gives the user's objects their states; the function that is returned gives them those that they had."""
    before: list[tuple[Any, Any]] = []

    def undo() -> None:
        for holder, state in reversed(before):
            try:
                holder.load_state_dict(state)
            except Exception as error:
                log.error("a %s cannot be given its state back: %s", type(holder).__name__, error)

    try:
        for name, holder in extra.items():
            if f"extra {name}" in values:
                if callable(getattr(holder, "state_dict", None)):
                    before.append((holder, copy.deepcopy(holder.state_dict())))
                holder.load_state_dict(values[f"extra {name}"])
    except BaseException:
        undo()
        raise
    return undo
