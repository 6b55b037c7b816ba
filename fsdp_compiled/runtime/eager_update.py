"""The update of an optimizer that no graph was made of: its own code, run after the program, on pieces of the shards.

    program     forward, backward, reduce, unscale, clip -> gradients of this rank's shards
    then        optimizer.param_groups[g]["params"] = pieces; piece.grad = its part; type(optimizer).step(optimizer)

A *piece* is this rank's part of one parameter, 1-d, a view of its shard; what belongs to another rank is an empty one.
The optimizer is the user's own object, so what its code keeps in groups and attributes, and what a scheduler writes
there, is where it always is. State of parameters is kept here, by piece. A parameter that the loss does not reach has
no gradient, and a step that overflowed does not run, as in eager PyTorch. See `fsdp_compiled.optim.eager` for who may.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.ir.program import OVERFLOW, Port
from fsdp_compiled.optim.eager import PointwiseOnly
from fsdp_compiled.optim.groups import options_of
from fsdp_compiled.optim.nested import filled, form_of, leaves_of, named_leaves
from fsdp_compiled.optim.rules import notes_of
from fsdp_compiled.optim.twin import Refused, attributes_of, step_of
from fsdp_compiled.plan.plan import Buffer, Plan, Slot
from fsdp_compiled.runtime.checkpoint.values import Tensors, digest, encode

INSTEAD = "Use one whose update of a parameter is a function of its own gradient and state alone, such as AdamW."
PLAIN = {bool, int, float, str, type(None)}
Brought = Mapping[Any, Any]  # an optimizer's state as it was, by parameter's name; named state by its own


def state_by_name(model: nn.Module, optimizer: Optimizer) -> dict[Any, Any]:
    """What the optimizer keeps, before it is taken over."""
    if not optimizer.state:
        return {}
    names = {parameter: name for name, parameter in named_parameters(model)}
    return {names.get(key, key): value for key, value in optimizer.state.items()}


@dataclass(frozen=True)
class Kept:
    """All that its code keeps. ``states``: parameter's name, its state, its piece; ``named``: state of no parameter.

    ``attributes``: those that its code writes, ``fixed``: the others. ``written``: the groups' options that it writes.
    """

    states: list[tuple[str, Mapping[Any, Any], torch.Tensor]]
    named: Mapping[Any, Any]
    attributes: Mapping[str, Any]
    fixed: Mapping[str, Any]
    written: Collection[str]


class EagerUpdate:
    """Runs one optimizer's step on this rank's pieces.

    ``brought``: what the optimizer kept when it was taken over. ``existing_state``: this rank's part of it per element,
    by ``"<buffer key>.<name>"``.
    """

    what = "the shards"  # that it runs on

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[int],
        plan: Plan,
        mesh: Mesh,
        shards: Mapping[str, torch.Tensor],
        brought: Brought,
        existing_state: Mapping[str, torch.Tensor],
    ) -> None:
        self._optimizer = optimizer
        self._plan = plan
        self._mesh = mesh
        self._own = [optimizer.param_groups[index] for index in groups]  # those whose parameters it updates
        self._slots = self._slots_of()
        self._shards: dict[str, torch.Tensor] = {}  # that the pieces are views of
        self._places: dict[str, tuple[Buffer, int, int]] = {}  # of pieces in their shards, by parameter's name
        self._pieces: dict[str, nn.Parameter] = {}
        self._views: dict[str, torch.Tensor] = {}
        for name, (buffer, slot) in self._slots.items():
            begin, end = self._slice(buffer, mesh.shard_rank)
            first, last = slot.within(begin, end)
            self._places[name] = (buffer, first - begin, last - begin)
        self._follow(shards)
        self._groups = [[self._pieces[name] for name in row if name in self._pieces] for row in self._names_of_groups()]
        self._state: Any = defaultdict(dict)
        parameters = {slot.name for buffer in plan.buffers for slot in buffer.slots}
        for name, value in brought.items():
            if name in self._pieces:
                self._state[self._pieces[name]] = self._cut(*self._slots[name], value, existing_state)
            elif name not in parameters:
                self._state[name] = value
        self._notes = notes_of(optimizer)  # attributes that the user put on parameters
        self._shown: dict[str, tuple[torch.Tensor, int]] = {}  # state as it was shown, with versions of copies
        self._written: dict[str, set[str]] = {"option": set(), "attribute": set()}  # by its code

    def run(
        self, state: MutableMapping[str, torch.Tensor], shards: Mapping[str, torch.Tensor],
        outputs: Mapping[Port, torch.Tensor], idle: Collection[str],
    ) -> None:  # fmt: skip
        """One step on the gradients among these outputs of the program. ``state`` is what people see of the state."""
        if OVERFLOW in outputs and bool(outputs[OVERFLOW]):
            return
        for group in self._own if self._notes else ():
            for parameter in group["params"]:
                if (piece := self._pieces.get(parameter._sharded_name)) is not None:
                    piece.__dict__.update({key: vars(parameter)[key] for key in self._notes if key in vars(parameter)})
        self._update(shards, outputs, idle)
        torch.autograd.graph.increment_version(list(self._shards.values()))
        self.show(state)

    def _update(
        self, shards: Mapping[str, torch.Tensor], outputs: Mapping[Port, torch.Tensor], idle: Collection[str]
    ) -> None:
        self._follow(shards)
        for name, piece in self._pieces.items():
            buffer, first, last = self._places[name]
            gradient = outputs.get(Port("out", "update", buffer.key))
            piece.grad = None if gradient is None or name in idle else gradient[first:last]
        before = self._noted()
        self._step(PointwiseOnly(), self._groups)
        self._note(before)
        for name, piece in self._pieces.items():
            if piece.data_ptr() != self._views[name].data_ptr():  # its code bound `p.data` anew
                self._views[name].copy_(piece.detach())
                piece.data = self._views[name]

    def _note(self, before: Mapping[tuple[str, str, int], Any]) -> None:
        """What its code has written in groups and attributes since they were noted."""
        self._after = self._noted()
        for place, name, _ in (one for one, value in self._after.items() if before.get(one) != value):
            self._written[place].add(name)

    def _step(self, guard: AbstractContextManager[Any], groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """The optimizer's own step on those of these pieces, by group, that have gradients."""
        kind = type(self._optimizer)
        try:
            with self._opened(groups), torch.no_grad(), guard:
                step_of(kind)(self._optimizer)
        except Refused as error:
            raise RuntimeError(
                f"{kind.__name__} runs as it is, on {self.what}, and now {error}: each rank would update by another "
                f"number. Nothing in its first steps told. {INSTEAD}"
            ) from error
        finally:
            for group in groups:
                for piece in group:
                    piece.grad = None

    def show(self, state: MutableMapping[str, torch.Tensor]) -> None:
        """Makes ``state`` what the optimizer keeps for its parameters: tensors, and copies of numbers.

        By ``"<parameter>.<name>"``; this rank's pieces.
        """
        for key in self._shown:
            state.pop(key, None)
        self._shown.clear()
        for key, value in self._kept().items():
            shown = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
            self._shown[key] = shown, shown._version
        state.update({key: shown for key, (shown, _) in self._shown.items()})

    def read(self, state: Mapping[str, torch.Tensor]) -> None:
        """What people put or wrote into the state that they see becomes the optimizer's. Raises ``ValueError``."""
        mine = {key for key in state if key.rpartition(".")[0] in self._slots or key in self._shown}
        if mine != self._shown.keys():
            odd = sorted(mine ^ self._shown.keys())
            raise ValueError(
                f"{odd[0]!r} was put into sharded.state.optimizer, or taken out: {type(self._optimizer).__name__}, "
                "which runs as it is, keeps its state in a form of its own. Write into the tensors that there are."
            )
        given = {
            key: state[key]
            for key, (shown, version) in self._shown.items()
            if state[key] is not shown or shown._version != version
        }
        for name, piece in self._pieces.items() if given else ():
            for top, value in self._state[piece].items() if piece in self._state else ():
                labels = [f"{name}.{label}" for label in named_leaves(str(top), value)]
                if not given.keys().isdisjoint(labels):
                    leaves = [
                        _instead(leaf, given.get(label)) for label, leaf in zip(labels, leaves_of(value), strict=True)
                    ]
                    self._state[piece][top] = filled(form_of(value), leaves)

    @property
    def name(self) -> str:
        return type(self._optimizer).__name__

    def kept(self) -> Kept:
        """What a checkpoint has to hold of it, as it is."""
        pieces = {piece: name for name, piece in self._pieces.items()}
        attributes = {name: value for name, value in attributes_of(self._optimizer).items() if name != "defaults"}
        own = self._written["attribute"] & attributes.keys()
        return Kept(
            [(pieces[key], state, key.detach()) for key, state in self._state.items() if isinstance(key, nn.Parameter)],
            {key: value for key, value in self._state.items() if not isinstance(key, nn.Parameter)},
            {name: attributes[name] for name in sorted(own)},
            {name: value for name, value in attributes.items() if name not in own},
            self._written["option"],
        )

    def put(
        self,
        states: Mapping[str, Mapping[Any, Any]],
        named: Mapping[Any, Any],
        attributes: Mapping[str, Any],
        written: Collection[str],
    ) -> None:
        """Goes on from these, which are of this rank's pieces, instead of what is kept."""
        self._state = defaultdict(dict)
        self._state |= {self._pieces[name]: dict(state) for name, state in states.items()} | dict(named)
        vars(self._optimizer).update(attributes)
        self._written = {"option": set(written), "attribute": set(attributes)}

    def _noted(self) -> dict[tuple[str, str, int], Any]:
        """Its groups' options and its attributes, as they can be compared later."""
        options = [("option", index, options_of(group)) for index, group in enumerate(self._optimizer.param_groups)]
        found = {}
        for place, index, values in [*options, ("attribute", 0, attributes_of(self._optimizer))]:
            for name, value in values.items():
                if _is_plain(value):
                    found[place, name, index] = repr(value)  # most of them, without what the rest takes
                    continue
                tensors: Tensors = {}
                try:
                    found[place, name, index] = digest(encode(value, name, tensors), tensors)
                except ValueError:  # no plain data, which `kept` may refuse
                    continue
        return found

    def refuse(self, call: str, instead: str) -> None:
        """Raises ``ValueError``: this call cannot be made with an optimizer that runs as it is."""
        raise ValueError(
            f"{call} with {type(self._optimizer).__name__}, which runs as it is, on {self.what}, after the program: "
            f"{instead}"
        )

    def _slots_of(self) -> dict[str, tuple[Buffer, Slot]]:
        """What its groups hold, by name, each with where it lies."""
        names = {name for row in self._names_of_groups() for name in row}
        return {
            slot.name: (buffer, slot) for buffer in self._plan.buffers for slot in buffer.slots if slot.name in names
        }

    def _slice(self, buffer: Buffer, rank: int) -> tuple[int, int]:
        """The part of the buffer that the rank at this place of the shard axis updates."""
        if not self._plan.placement.state:
            return 0, buffer.numel
        size = buffer.numel // self._plan.shard
        return rank * size, (rank + 1) * size

    def _names_of_groups(self) -> list[list[str]]:
        return [[parameter._sharded_name for parameter in group["params"]] for group in self._own]

    def _cut(self, buffer: Buffer, slot: Slot, kept: Any, existing_state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """This rank's piece of what was kept for a parameter."""
        _, first, last = self._places[slot.name]
        found = {}
        cut: dict[int, Any] = {}  # what is kept under two names stays one tensor
        for name, value in kept.items():
            leaves = []
            for label, leaf in named_leaves(str(name), value).items():
                key = id(leaf)
                same = isinstance(leaf, torch.Tensor) and tuple(leaf.shape) == slot.leaf.shape
                if same and f"{buffer.key}.{label}" in existing_state:  # of one number, a step count is not
                    leaf = existing_state[f"{buffer.key}.{label}"][first:last].clone()
                elif isinstance(leaf, torch.Tensor) and leaf.numel() != 1:
                    raise ValueError(
                        f"{type(self._optimizer).__name__} brings along its state {label!r} of {slot.name}, of shape "
                        f"{list(leaf.shape)}, which is not the parameter's: it cannot be cut into shards. Begin with "
                        "an optimizer that has made no step."
                    )
                leaves.append(cut.setdefault(key, leaf) if isinstance(leaf, torch.Tensor) else leaf)
            found[name] = filled(form_of(value), leaves)
        return found

    def _follow(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Makes the pieces views of these shards."""
        if self._shards and all(shards[key] is known for key, known in self._shards.items()):
            return
        self._shards = {buffer.key: shards[buffer.key] for buffer, _ in self._slots.values()}
        for name, (buffer, first, last) in self._places.items():
            view = self._shards[buffer.key].detach()[first:last]
            self._views[name] = view
            if name in self._pieces:
                self._pieces[name].data = view
            else:
                self._pieces[name] = nn.Parameter(view, buffer.trainable)

    @contextmanager
    def _opened(self, groups: Sequence[Sequence[nn.Parameter]]) -> Iterator[None]:
        """Inside, the optimizer holds these pieces, and its state."""
        own = self._optimizer
        before = [group["params"] for group in self._own], own.param_groups, own.state
        for group, pieces in zip(self._own, groups, strict=True):
            group["params"] = list(pieces)
        own.param_groups = list(self._own)
        own.state = self._state
        try:
            yield
        finally:
            self._state = own.state
            for group, parameters in zip(self._own, before[0], strict=True):
                group["params"] = parameters
            own.param_groups, own.state = before[1:]

    def _kept(self) -> dict[str, Any]:
        """Tensors and numbers of the parameters' state, by name."""
        return {
            f"{name}.{label}": leaf
            for name, piece in self._pieces.items()
            if piece in self._state
            for top, value in self._state[piece].items()
            for label, leaf in named_leaves(str(top), value).items()
            if isinstance(leaf, torch.Tensor | bool | int | float)
        }


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return PLAIN.issuperset(map(type, value)) and all(map(_is_plain, value.values()))
    return kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, value)))


def _instead(old: Any, new: torch.Tensor | None) -> Any:
    """The new value as the optimizer's code keeps it."""
    if new is None or new is old:
        return old
    if isinstance(old, torch.Tensor):
        return new.to(old.device, old.dtype).reshape(old.shape)
    return type(old)(new.item())
