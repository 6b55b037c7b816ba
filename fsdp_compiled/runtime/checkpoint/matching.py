"""A checkpoint beside the `Sharded` that loads it: what fits, and in words what does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.checkpoint.loading import Wanted
from fsdp_compiled.runtime.checkpoint.manifest import Manifest
from fsdp_compiled.runtime.checkpoint.match import Match, saved_names, unlike
from fsdp_compiled.runtime.checkpoint.matching_optimizer import match_optimizer
from fsdp_compiled.runtime.checkpoint.stretches import Place, held, parameter_name, per_element, state_name
from fsdp_compiled.runtime.checkpoint.trained import Trained
from fsdp_compiled.runtime.state import State


def match(manifest: Manifest, trained: Trained, place: Place) -> Match:
    """What of the checkpoint fits this model and optimizer, and what does not, on each side.

    ``wanted`` is what the rank at this place holds.
    """
    plan, state, rules = trained.plan, trained.state, trained.rules
    found = Match()
    places = _parameters(manifest, plan, state.buffers, found)
    match_optimizer(manifest, trained, places, found)
    orders = {
        name: slot.leaf.order
        for buffer in plan.buffers
        for slot in buffer.slots
        for name in (parameter_name(slot), *(state_name(slot, one) for one in per_element(buffer, rules)))
    }
    for one in held(plan, rules, place, state.parameters, state.optimizer):
        if one.name in places:
            found.wanted.append(Wanted(places[one.name], one.start, one.stop, orders[one.name], one.values, one.cut))
    _buffers(manifest, state, found)
    _constants(manifest, state, found)
    return found


def _parameters(manifest: Manifest, plan: Plan, buffers: Iterable[str], found: Match) -> dict[str, str]:
    """By our name of a tensor, the saved one that fits it, for parameters."""
    places: dict[str, str] = {}
    used: set[str] = set()
    for slot in (slot for buffer in plan.buffers for slot in buffer.slots):
        saved = saved_names(manifest, slot.leaf.names)
        used |= saved
        if not saved:
            found.differences.append(f"{slot.name} is not in the checkpoint")
        elif len(saved) > 1:
            found.differences.append(f"{' and '.join(sorted(saved))} are one parameter here, and two in the checkpoint")
        elif (reason := unlike(manifest, _saved_as(saved), slot.leaf.whole_shape, slot.leaf.dtype)) is not None:
            found.differences.append(f"{slot.name} {reason}")
        else:
            places[parameter_name(slot)] = _saved_as(saved)
    saved_parameters = {name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")}
    # Other formats do not tell parameters and buffers apart, and have a tied one under each of its names.
    saved_parameters -= used | set(buffers) | {name for name, first in manifest.aliases.items() if first in used}
    found.differences += [f"{name} is not in the model" for name in sorted(saved_parameters)]
    return places


def _saved_as(names: set[str]) -> str:
    return f"model.{next(iter(names))}"


def _buffers(manifest: Manifest, state: State, found: Match) -> None:
    saved = {name.removeprefix("buffer ") for name in manifest.values if name.startswith("buffer ")}
    for name, tensor in state.buffers.items():
        value = buffer_value(manifest, name)
        if value is None:
            found.differences.append(f"the buffer {name} is not in the checkpoint")
            continue
        tree = value["same"] if "same" in value else value["by_rank"][0]
        if (reason := unlike(manifest, tree["$tensor"], tensor.shape, tensor.dtype)) is not None:
            found.differences.append(f"the buffer {name} {reason}")
        else:
            found.buffers.append(name)
    found.differences += [f"the buffer {name} is not in the model" for name in sorted(saved - set(state.buffers))]


def _constants(manifest: Manifest, state: State, found: Match) -> None:
    """Those that no program reads yet are compared when one does."""
    for key, value in manifest.values.items():
        kind, _, name = key.partition(" ")
        if kind != "constant":
            continue
        own, tree = state.constants.get(name), value["same"] if "same" in value else value["by_rank"][0]
        if own is not None and (reason := unlike(manifest, tree["$tensor"], own.shape, own.dtype)) is not None:
            found.differences.append(f"the tensor {name} that the loss updates {reason}")
        else:
            found.constants.append(name)


def buffer_value(manifest: Manifest, name: str) -> dict[str, Any] | None:
    """What is saved of a buffer; in what was converted it may stand among the parameters."""
    if f"buffer {name}" not in manifest.values and f"model.{name}" in manifest.tensors:
        return {"same": {"$tensor": f"model.{name}"}}
    return manifest.values.get(f"buffer {name}")
