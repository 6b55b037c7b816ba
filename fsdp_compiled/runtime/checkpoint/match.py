"""What of a checkpoint fits a `Sharded` that loads it, and how what does not is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_compiled.runtime.checkpoint.loading import Wanted
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.param_step_counts import Names

SHOWN = 20  # differences in one message


@dataclass
class Match:
    """What fits. ``wanted``: what is read into this rank's shards. ``scalars``: by a rule's key, its numbers."""

    wanted: list[Wanted] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    owned: dict[str, str] = field(default_factory=dict)  # by parameter, the value that is its optimizer's state
    buffers: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    options: list[dict[str, Any]] | None = None  # of each group, as JSON, where rates are taken over
    updated: dict[str, Names] = field(default_factory=dict)  # by rules' keys, who has made their steps
    written: Sequence[str] = ()  # options that the optimizer's own code writes, which are taken over too
    local: bool = False  # whether a rank goes on from what it had of local steps
    differences: list[str] = field(default_factory=list)


def saved_names(manifest: Manifest, names: Sequence[str]) -> set[str]:
    """Under which first names these names of one parameter were saved."""
    firsts = {manifest.aliases.get(name, name) for name in names}
    return {name for name in firsts if f"model.{name}" in manifest.tensors}


def unlike(manifest: Manifest, name: str, shape: Sequence[int], dtype: torch.dtype) -> str | None:
    entry = manifest.tensors[name]
    if (entry.shape, entry.dtype) == (tuple(shape), dtype):
        return None
    return f"is {_kind(dtype, shape)} here, and {_kind(entry.dtype, entry.shape)} in the checkpoint"


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def refusal(path: Any, differences: Sequence[str]) -> str:
    """The message for what does not fit."""
    lines = [f"  {line}" for line in differences[:SHOWN]]
    if len(differences) > SHOWN:
        lines.append(f"  ... and {len(differences) - SHOWN} more")
    return "\n".join(
        [
            f"{path} is of another model or optimizer, so nothing was loaded:",
            *lines,
            "Build what was saved, or pass strict=False, which loads what fits and leaves the rest as it is.",
        ]
    )
