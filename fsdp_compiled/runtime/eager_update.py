"""An optimizer's own code, run after the program on parameters that stand for the model's: what it keeps, and shows.

    program     forward, backward, reduce, unscale, clip -> gradients of this rank's shards
    then        optimizer.param_groups[g]["params"] = pieces; piece.grad = its gradient; type(optimizer).step(optimizer)

A *piece* is a parameter as `WholeUpdate` gives it to the code. The optimizer is the user's own object, so what its code
keeps in groups and attributes, and what a scheduler writes there, is where it always is. State of parameters is kept
here, by piece. A parameter that the loss does not reach has no gradient, and a step that overflowed does not run, as in
eager PyTorch.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.ir.program import OVERFLOW, Port
from fsdp_compiled.optim.optimizer_copy import Refused, attributes_of, step_of
from fsdp_compiled.optim.param_groups import options_of
from fsdp_compiled.optim.state_containers import filled, form_of, leaves_of, named_leaves
from fsdp_compiled.optim.ways import noted_by
from fsdp_compiled.plan.plan import Buffer, Part, Plan, Slot
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


class EagerUpdate(ABC):
    """Runs one optimizer's step on this rank's pieces. ``brought``: what it kept when it was taken over."""

    what: str  # that it runs on

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[int],
        plan: Plan,
        mesh: Mesh,
        shards: Mapping[str, torch.Tensor],
        brought: Brought,
    ) -> None:
        self._optimizer = optimizer
        self._plan = plan
        self._mesh = mesh
        self._own = [optimizer.param_groups[index] for index in groups]  # those whose parameters it updates
        self._slots = self._slots_of()
        self._shards: dict[str, torch.Tensor] = {}  # that the pieces are views of
        self._parts: dict[str, tuple[Buffer, Part]] = {}  # what of each parameter is in a shard here, by name
        self._pieces: dict[str, nn.Parameter] = {}
        self._views: dict[str, torch.Tensor] = {}
        for name, (buffer, slot) in self._slots.items():
            self._parts[name] = buffer, plan.part(buffer, slot, mesh.shard_rank, plan.placement.state)
        self._follow(shards)
        self._groups = [[self._pieces[name] for name in row if name in self._pieces] for row in self._names_of_groups()]
        self._state: Any = defaultdict(dict)
        parameters = {slot.name for buffer in plan.buffers for slot in buffer.slots}
        for name, value in brought.items():
            if name in self._pieces:
                self._state[self._pieces[name]] = dict(copy.deepcopy(value))
            elif name not in parameters:
                self._state[name] = value
        self._shown: dict[str, tuple[torch.Tensor, int]] = {}  # state as it was shown, with versions of copies
        self._written: dict[str, set[str]] = {"option": set(), "attribute": set()}  # by its code
        self._after = self._noted()

    def run(
        self, state: MutableMapping[str, torch.Tensor], shards: Mapping[str, torch.Tensor],
        outputs: Mapping[Port, torch.Tensor], idle: Collection[str],
    ) -> None:  # fmt: skip
        """One step on the gradients among these outputs of the program. ``state`` is what people see of the state."""
        if OVERFLOW in outputs and bool(outputs[OVERFLOW]):
            return
        for parameter in (parameter for group in self._own for parameter in group["params"]):
            if (piece := self._pieces.get(parameter._sharded_name)) is not None:
                for name in noted_by([piece]) - noted_by([parameter]):
                    delattr(piece, name)
                piece.__dict__.update({name: vars(parameter)[name] for name in noted_by([parameter])})
        self._update(shards, outputs, idle)
        torch.autograd.graph.increment_version(list(self._shards.values()))
        self.show(state)

    def changed(self) -> list[str]:
        """Attributes of the optimizer that somebody else than its code has changed since its last step."""
        now, was = self._noted(), self._after
        names = [key for key in {**was, **now} if key[0] == "attribute"]
        return [f"optimizer.{key[1]}" for key in names if now.get(key) != was.get(key)]

    @abstractmethod
    def _update(
        self, shards: Mapping[str, torch.Tensor], outputs: Mapping[Port, torch.Tensor], idle: Collection[str]
    ) -> None:
        """The step on these gradients."""

    @abstractmethod
    def _follow(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Makes pieces of these shards, or has them follow."""

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

    def _names_of_groups(self) -> list[list[str]]:
        return [[parameter._sharded_name for parameter in group["params"]] for group in self._own]

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
