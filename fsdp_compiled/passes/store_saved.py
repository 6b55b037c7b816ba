"""Moves chosen saved values to host memory until backward, so that a step fits its memory.

    before                                after, for ``{"gelu_3"}``

    gelu_3 = gelu(u)                      gelu_3 = gelu(u)
    y = mm(gelu_3, t(down))               y = mm(gelu_3, t(down))
    z = mm(y, up)                         sent = store_(room, gelu_3)             # to the host, beside what follows
    ...                                   z = mm(y, up)
                                          there = stored(sent, gelu_3)            # gelu_3 is freed here
                                          ...
    ...                                   back = restore(there, "cuda")           # from the host, beside backward
                                          ...
    d_down = mm(t(gelu_3), d_y)           gelu_3' = restored(back, there)
                                          d_down = mm(t(gelu_3'), d_y)

A copy starts behind forward's last use. It is waited for before the start of the copy `AHEAD` after it, at the latest
where forward ends: so at most that many values are in device memory for their copy alone. On the way back a copy starts
where the value `AHEAD` before it has arrived, at the earliest where backward begins. `runtime.programs.memory_budget`
chooses the values (`saved_values.storable`). The pass runs after all passes that move compute, and before `limit`. A
value that backward no longer reads stays. A copy is exact: no number changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

from fsdp_compiled.analysis.saved_values import AHEAD, Kept, kept
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark, fake_tensor, owner, positions
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.kernels.host_copies import operators
from fsdp_compiled.plan.plan import Plan


def store_saved(names: Collection[str]) -> Callable[[Program, Plan], Program]:
    """The pass for forward values of these names."""

    def transform(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        order = positions(edit.graph)
        found = [one for node in edit.graph.nodes if node.name in names and (one := kept(node, order))]
        if not found:
            return program.after("store_saved")
        stored = _store(edit, sorted(found, key=lambda one: order[one.last]))
        _restore(edit, sorted(found, key=lambda one: order[one.readers[0]]), stored, plan)
        return edit.done("store_saved")

    return transform


def _store(edit: Edit, values: list[Kept]) -> dict[fx.Node, fx.Node]:
    """Copies the values to rooms; returns, for each value, the room once the copy has arrived."""
    end = next(node for node in edit.graph.nodes if node.meta.get("phase", "forward") != "forward")
    places = [one.last.next for one in values]
    sent, stored = [], {}
    for one, place in zip(values, places, strict=True):
        example = one.value.meta["val"]
        like = fake_tensor(edit.mode, tuple(example.shape), example.stride(), example.dtype, torch.device("cpu"))
        room = edit.add_input(Port("in", "room", one.name), like)
        with edit.at(place, "forward"):
            sent.append(edit.call(operators.store_.default, room, one.value, mark=_mark("store", one)))
    for index, one in enumerate(values):
        later = sent[index + AHEAD] if index + AHEAD < len(sent) else end
        with edit.at(later, "forward"):
            call = operators.stored.default
            stored[one.value] = edit.call(call, sent[index], one.value, mark=_mark("stored", one))
    return stored


def _restore(edit: Edit, values: list[Kept], stored: dict[fx.Node, fx.Node], plan: Plan) -> None:
    """Makes backward read the values that are copied back from the rooms."""
    start = next(node for node in edit.graph.nodes if node.meta.get("phase", "forward") != "forward")
    places = [one.readers[0] for one in values]
    waits: list[fx.Node] = []
    for index, (one, place) in enumerate(zip(values, places, strict=True)):
        room = stored[one.value]
        with edit.at(waits[index - AHEAD].next if index >= AHEAD else start, "backward"):
            value = edit.call(operators.restore.default, room, plan.device, mark=_mark("restore", one))
        with edit.at(place, place.meta["phase"]):
            waits.append(edit.call(operators.restored.default, value, room, mark=_mark("restored", one)))
        _read(edit, one, waits[-1])


def _read(edit: Edit, one: Kept, value: fx.Node) -> None:
    """Replaces the value by the one that came back, and repeats its views."""
    made = {one.value: value}
    for reader in one.readers:
        for wanted in [source for source in reader.all_input_nodes if source in one.aliases]:
            chain, source = [], wanted
            while source not in made:
                chain.append(source)
                source = source.all_input_nodes[0]
            with edit.at(reader, reader.meta["phase"]):
                for alias in reversed(chain):
                    made[alias] = edit.clone(alias, made)
            reader.replace_input_with(wanted, made[wanted])


def _mark(role: str, one: Kept) -> Mark:
    return Mark(role, owner(one.value), one.name)  # type: ignore[arg-type]
