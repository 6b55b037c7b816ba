"""What a checkpoint has beside shards: which of it a rank takes, and giving it to what is trained and to ``extra``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_compiled.runtime.checkpoint import loading
from fsdp_compiled.runtime.checkpoint.contents import Trained, dealt_out, derive_generators, set_generators
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.matching import Match, buffer_value, write_groups
from fsdp_compiled.runtime.checkpoint.values import decode, digest
from fsdp_compiled.runtime.state import State

log = logging.getLogger("fsdp_compiled")


def check_saved_extra(
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


def chosen_values(
    manifest: Manifest, found: Match, extra: Mapping[str, Any], rank: int, rows: Sequence[int]
) -> dict[str, tuple[Any, bool]]:
    """The values that this rank takes, as JSON, each with whether it is its own."""
    fixed = ["updates", "scale", "random", *["local"] * found.local]
    constants = [f"constant {name}" for name in found.constants]
    for name in found.buffers:
        if (value := buffer_value(manifest, name)) is not None:
            manifest.values[f"buffer {name}"] = value
    buffers = [f"buffer {name}" for name in found.buffers]
    owned = [*found.owned.values(), *["owners"] * bool(found.owned)]
    wanted = [*fixed, *owned, *constants, *buffers, *(f"extra {name}" for name in extra)]
    pairs = {name: loading.values_for(manifest, name, rank, rows) for name in wanted}
    return {name: pair for name, pair in pairs.items() if pair is not None}


def match_local(manifest: Manifest, trained: Trained, found: Match, rank: int, rows: Sequence[int]) -> None:
    """Whether this rank goes on from what was saved of local steps, and if there is some and it does not, why."""
    pair = loading.values_for(manifest, "local", rank, rows)
    if pair is None:
        return
    saved, own = pair
    sizes = {name: manifest.tensors[tree["$tensor"]].shape for name, tree in saved["state"].items()}
    found.local = trained.local is not None and own and trained.local.fits(saved, sizes, trained.state)
    if not found.local:
        found.differences.append(
            f"it is of local steps (Policy.sync_every) of {saved['sites']} sites of {saved['ranks']} ranks, which each "
            "have an optimizer's state of their own, and other sites, units or none are here; what fits of it are "
            f"weights, those of the last exchange, {saved['steps']} steps before, and each element of that state as "
            "one site had it"
        )


def write_values(
    values: Mapping[str, tuple[Any, bool]],
    tensors: Mapping[str, torch.Tensor],
    found: Match,
    trained: Trained,
    row: str,
) -> None:
    """``row``: whose batches this rank has, of how many."""
    state = trained.state
    if trained.local is not None:
        trained.local.load(decode(values["local"][0], tensors) if found.local else None, state)
    with torch.no_grad():
        state.ages.loaded(found.updated)
        for key, numbers in found.scalars.items():
            for name, number in numbers.items():
                state.optimizer[f"{key}.{name}"].fill_(decode(number, tensors))
        for name, (tree, _) in values.items():
            kind, _, rest = name.partition(" ")
            if kind == "updates":
                state.step.fill_(tree)
            elif kind == "scale":
                for one, number in tree.items():
                    if one in state.scale:
                        state.scale[one].fill_(decode(number, tensors))
            elif kind == "buffer":
                state.buffers[rest].copy_(decode(tree, tensors))
            elif kind == "constant":
                _write_constant(rest, decode(tree, tensors), state)
        for total in state.sums.values():
            total.zero_()
    owned = {name: decode(values[key][0], tensors) for name, key in found.owned.items() if key in values}
    others = decode(values["owners"][0], tensors) if "owners" in values else []
    for update, one in zip(trained.updates, others, strict=False):
        update.go_on(owned, one)
        update.show(state.optimizer)
    if trained.optimizer is not None and found.options is not None:
        groups = [{k: decode(v, {}) for k, v in one.items()} for one in found.options]
        write_groups(trained.optimizer, groups, found.written)
    if "random" not in values:  # converted from another format
        return
    tree, own = values["random"]
    if own:
        set_generators(decode(tree, tensors), state, trained.plan.device)
    else:
        derive_generators(f"{digest(tree, tensors)} {row}", state, trained.plan.device)


def _write_constant(name: str, value: torch.Tensor, state: State) -> None:
    if name in state.constants:
        state.constants[name].copy_(value)
    else:
        state.constants[name] = value
