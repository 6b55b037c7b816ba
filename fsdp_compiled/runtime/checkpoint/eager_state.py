"""What an optimizer keeps whose own code runs on pieces of the shards (`EagerUpdate`), in whatever form it keeps it.

    state[p] = {"queue": deque([a, b], 3), "seen": 2}      a, b: of the piece's shape
       files:     optimizer.state.up.weight.queue_0        whole tensors by name, as all other state
       manifest:  up.weight: {"tree": {"queue": {"$bounded": [3, [at queue_0, at queue_1]]}, "seen": 2}, "tensors": ...}

Numbers and forms are the same on all ranks, since every element is updated alike; where they are not, the save is
refused. So are tensors that are neither of the piece's shape nor one number, and what is no plain data.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_compiled.optim.nested import filled, form_of, is_container, leaves_of, named_leaves
from fsdp_compiled.plan.plan import Plan, Slot
from fsdp_compiled.runtime.checkpoint.loading import Wanted
from fsdp_compiled.runtime.checkpoint.manifest import Entry, Manifest
from fsdp_compiled.runtime.checkpoint.stretches import Holders, Place, Stretch, state_name, updated_ranges
from fsdp_compiled.runtime.checkpoint.values import decode, encode
from fsdp_compiled.runtime.eager_update import EagerUpdate

AT = "$at"  # stands for a tensor in a tree, with its label
OTHERS = "what belongs to no parameter"
Labels = Mapping[str, Mapping[str, torch.Tensor]]  # pieces by parameter and label


@dataclass
class Packed:
    """A value as JSON, and its tensors by label."""

    tree: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def _pack(what: str, values: Mapping[Any, Any], piece: torch.Tensor | None) -> Packed:
    """Raises ``ValueError`` by name for what a checkpoint cannot hold. ``piece``: of the parameter that it is for."""
    found = Packed({})
    known: dict[int, str] = {}
    held: dict[Any, Any] = {}
    for top, value in values.items():
        marks = []
        _refuse_factories(f"{what}[{top!r}]", value)
        for label, leaf in zip(named_leaves(str(top), value), leaves_of(value), strict=True):
            if not isinstance(leaf, torch.Tensor):
                marks.append(leaf)
                continue
            if piece is not None and leaf.data_ptr() == piece.data_ptr() and leaf.numel():
                raise ValueError(f"{what}[{top!r}] is the parameter itself, which is saved once.")
            if id(leaf) not in known:
                label = re.sub(r"\W", "_", label)
                while label in found.tensors:
                    label += "_"
                whole = piece is not None and leaf.shape == piece.shape
                if (leaf.numel() != 1 and not whole) or leaf.is_complex():
                    raise ValueError(
                        f"{what}[{top!r}] holds a {leaf.dtype} tensor of shape {list(leaf.shape)}, which is neither a "
                        "number nor of its parameter's shape: it cannot be given to other ranks."
                    )
                found.tensors[label] = leaf
                known[id(leaf)] = label
            marks.append({AT: known[id(leaf)]})
        held[top] = filled(form_of(value), marks) if is_container(value) else marks[0]
    found.tree = encode(held, what, {})
    return found


def _refuse_factories(where: str, value: Any) -> None:
    if isinstance(value, defaultdict):
        raise ValueError(f"{where} holds a defaultdict, whose defaults are made by code: no checkpoint holds that.")
    for one in value.values() if isinstance(value, dict) else value if is_container(value) else ():
        _refuse_factories(where, one)


@dataclass(frozen=True)
class Own:
    """What this rank says of it, as plain data, and its pieces."""

    said: dict[str, Any]
    pieces: Labels


def own_of(eager: EagerUpdate) -> Own:
    """Raises ``ValueError`` by name for what a checkpoint cannot hold."""
    kept = eager.kept()
    rows = {name: (_pack(f"{eager.name}.state of {name}", state, piece), piece) for name, state, piece in kept.states}
    for name, value in kept.fixed.items():
        if not callable(value):
            encode(value, f"{eager.name}.{name}", {})
    others = {"named": kept.named, "attributes": kept.attributes}
    packed = {name: _pack(f"{eager.name}'s {name}", values, None) for name, values in others.items()}
    said = {
        "states": {
            name: {"size": piece.numel(), "tree": one.tree, "tensors": _kinds(one.tensors, piece)}
            for name, (one, piece) in rows.items()
        },
        "written": sorted(kept.written),
        **{name: {"tree": one.tree, "tensors": _kinds(one.tensors, None)} for name, one in packed.items()},
    }
    return Own(said, {name: one.tensors for name, (one, _) in rows.items()})


def _kinds(tensors: Mapping[str, torch.Tensor], piece: torch.Tensor | None) -> dict[str, dict[str, Any]]:
    """By label: whether it is of the piece's shape, None where that is one number too; and the number if it is one."""
    found = {}
    for label, leaf in tensors.items():
        one: dict[str, Any] = {"piece": piece is not None and leaf.shape == piece.shape}
        one["dtype"] = str(leaf.dtype).removeprefix("torch.")
        if leaf.numel() == 1:
            number = encode(leaf.item(), label, {})
            one |= {"shape": list(leaf.shape), "number": number, "beside": leaf.device.type == "cpu"}
            one["piece"] = None if one["piece"] else False
        found[label] = one
    return found


def agreed(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks say of it, as one. Raises ``ValueError`` by name where they differ."""
    for name in ("written", "named", "attributes"):
        if any(rank[name] != ranks[0][name] for rank in ranks):
            raise ValueError(f"The optimizer's {name} differ between ranks, which each have one: {OTHERS}.")
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        for name, one in rank["states"].items():
            by_name.setdefault(name, []).append(one)
    states: dict[str, Any] = {}
    certain: dict[str, bool] = {}  # by label, as some parameter tells
    for name, rows in by_name.items():
        rows = [one for one in rows if one["size"]] or rows[:1]  # an empty piece tells nothing
        for label in rows[0]["tensors"]:
            kinds = {one["tensors"].get(label, {}).get("piece") for one in by_name[name]} - {None}
            if len(kinds) == 1:
                certain[label] = kinds.pop()
        states[name] = rows
    found = {}
    for name, rows in states.items():
        tensors = [
            {label: _kind(one, certain.get(label, True)) for label, one in row["tensors"].items()} for row in rows
        ]
        if any(row["tree"] != rows[0]["tree"] or one != tensors[0] for row, one in zip(rows, tensors)):
            raise ValueError(f"What the optimizer keeps of {name} is not the same number or form on all ranks.")
        found[name] = {"tree": rows[0]["tree"], "tensors": tensors[0]}
    return {"states": found, **{name: ranks[0][name] for name in ("written", "named", "attributes")}}


def _kind(one: Mapping[str, Any], likely: bool) -> dict[str, Any]:
    piece = likely if one["piece"] is None else one["piece"]
    return {"piece": True, "dtype": one["dtype"]} if piece else {**one, "piece": False}


def entries(agreed_on: Mapping[str, Any], plan: Plan) -> dict[str, Entry]:
    """Its tensors, as all ranks hold them together."""
    slots = {slot.name: slot for buffer in plan.buffers for slot in buffer.slots}
    return {
        state_name(slots[name], label): Entry(slots[name].leaf.whole_shape, _dtype(kind), slots[name].leaf.order)
        for name, one in agreed_on["states"].items()
        for label, kind in one["tensors"].items()
        if kind["piece"]
    }


def _dtype(kind: Mapping[str, Any]) -> torch.dtype:
    found = getattr(torch, kind["dtype"])
    assert isinstance(found, torch.dtype)
    return found


def stretches(
    agreed_on: Mapping[str, Any], own: Labels, plan: Plan, place: Place, holders: Holders
) -> Iterator[Stretch]:
    """What of it a rank here writes, so that all ranks write each element once."""
    held = {slot.name: start for slot, start, _ in updated_ranges(plan, place, None)}
    for slot, start, stop in updated_ranges(plan, place, holders):
        for label, kind in agreed_on["states"].get(slot.name, {"tensors": {}})["tensors"].items():
            if kind["piece"] and start < stop:
                values = own[slot.name][label][start - held[slot.name] : stop - held[slot.name]]
                yield Stretch(state_name(slot, label), start, stop, values)


def match(
    manifest: Manifest, plan: Plan, eager: EagerUpdate, place: Place, first_of: Callable[[Slot], str | None]
) -> tuple[list[Wanted], Callable[[], None], list[str]]:
    """What is read for it, the function that gives it what was read, and in words what does not fit.

    ``first_of``: under which name a parameter was saved; None for one that does not fit.
    """
    saved = manifest.values["eager"]["same"]
    known = {name for row in manifest.values["optimizer"]["same"]["parameters"] for name in row}
    wanted: list[Wanted] = []
    wrong: list[str] = []
    states: dict[str, Any] = {}
    for slot, start, stop in updated_ranges(plan, place, None):
        first = first_of(slot)
        if first is None or first not in known:
            wrong.append(f"the checkpoint has no optimizer's state of {slot.name}")
        elif (one := saved["states"].get(first)) is not None:
            tensors: dict[str, torch.Tensor] = {}
            for label, kind in one["tensors"].items():
                tensors[label] = _room(kind, stop - start, plan.device)
                if kind["piece"] and start < stop:
                    name = f"optimizer.state.{first}.{label}"
                    wanted.append(Wanted(name, start, stop, slot.leaf.order, tensors[label]))
            states[slot.name] = one["tree"], tensors
    others = {
        name: (saved[name]["tree"], {key: _room(kind, 0, plan.device) for key, kind in saved[name]["tensors"].items()})
        for name in ("named", "attributes")
    }

    def put() -> None:
        eager.put(
            {name: _unpack(*one) for name, one in states.items()},
            _unpack(*others["named"]),
            _unpack(*others["attributes"]),
            saved["written"],
        )

    return wanted, put, wrong


def _room(kind: Mapping[str, Any], size: int, device: torch.device) -> torch.Tensor:
    dtype = _dtype(kind)
    if kind["piece"]:
        return torch.empty(size, dtype=dtype, device=device)
    number = torch.tensor(decode(kind["number"], {}), dtype=dtype).reshape(kind["shape"])
    return number if kind["beside"] else number.to(device)


def _unpack(tree: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    found = pytree.tree_map(
        lambda leaf: tensors[leaf[AT]] if _is_mark(leaf) else leaf, decode(tree, {}), is_leaf=_is_mark
    )
    assert isinstance(found, dict)
    return found


def _is_mark(value: Any) -> bool:
    return type(value) is dict and list(value) == [AT]
