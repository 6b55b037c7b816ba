"""Updates whole parameters with the optimizer's own code, after the program. A rank updates those that it owns.

    program     forward, backward, reduce, unscale, clip -> gradients of this rank's shards
    to owners   an all-to-all along the shard axis: parts of gradients and parameters -> whole ones, on their owners
    then        param_groups[g]["params"] = those that this rank owns; type(optimizer).step(optimizer)
    back        an all-to-all: parts of the new parameters -> shards

All ranks run one program, and differ only after gradients have left it. So a rank may own tensors of any shape, and
nothing is padded or computed twice. Work is divided by cost (`plan.owners`): a whole step orthogonalises each matrix
once. A rank sends 3/world of the parameters' bytes per step; forward, backward and reduction send 2 to 3 times all of
them. So gathering gradients instead of reducing them would save nothing noticeable.

State lives on its owner alone, in whatever form the optimizer's code gives it. If every rank has whole gradients and
state (``"ddp"``, or one rank along the shard axis), each updates everything itself and nothing is sent. Replicas (HSDP)
do the same work on the same numbers. The last message back begins with a word. With it a rank reports a failed step,
and ranks compare what the optimizer's code counts in groups and attributes. If this code starts to depend on other
parameters late in training, all ranks raise an error, and parameters are what they were.

The optimizer is the user's own object, so what its code keeps in groups and attributes, and what a scheduler writes
there, is where it always is. State of parameters is kept here. A parameter that the loss does not reach has no
gradient, and a step that overflowed does not run, as in eager PyTorch.

The eager code runs under both lowerings, so the numbers are those of eager PyTorch on the same gradients, bit for bit,
Newton-Schulz in bfloat16 included. See `fsdp_compiled.optim.whole` for which optimizers may run so.
"""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.distributed.mesh import Mesh, RankError, from_first
from fsdp_compiled.distributed.owners import Owned, Round
from fsdp_compiled.ir.program import Port
from fsdp_compiled.optim.hyperparameters import options_of
from fsdp_compiled.optim.optimizer_copy import Refused, all_leaves, attributes_of, is_plain, named_leaves, step_of
from fsdp_compiled.optim.ways import is_of_torch, noted_by
from fsdp_compiled.optim.whole import OnItsOwn
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.checkpoint.values import Tensors, digest, encode

FAILED = 0  # the word of a rank whose step failed
INSTEAD = "Use one whose update of a parameter is a function of its own gradient and state alone, such as AdamW."
HALF = (
    "The optimizer's state may be half updated: load a checkpoint, or build the model and call compile_sharded again."
)


def state_by_name(model: nn.Module, optimizer: Optimizer) -> dict[Any, Any]:
    """The optimizer's state by parameter name, before it is taken over."""
    if not optimizer.state:
        return {}
    names = {parameter: name for name, parameter in named_parameters(model)}
    return {names.get(key, key): value for key, value in optimizer.state.items()}


def first_rank_s(value: Any, mesh: Mesh, device: torch.device) -> Any:
    """Rank 0's tensors and numbers, on every rank. Those on rank 0's GPU move to this rank's GPU. Collective."""
    if mesh.world == 1:
        return value
    places: list[str] = []

    def on_host(leaf: Any) -> Any:
        places.append(leaf.device.type if isinstance(leaf, torch.Tensor) else "")
        return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf

    given, where = from_first((pytree.tree_map(on_host, value), places) if mesh.rank == 0 else None, mesh)
    kinds = iter(where)
    return pytree.tree_map(lambda leaf: leaf.to(device) if next(kinds) not in ("", "cpu") else leaf, given)


class WholeUpdate:
    """Runs one optimizer's step on the whole parameters that this rank owns: its *pieces*, which hold values only
    while a step runs.

    ``groups``: those whose parameters it updates; ``brought``: the optimizer's state when it was taken over, by
    parameter name, and named state by its own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[int],
        plan: Plan,
        mesh: Mesh,
        shards: Mapping[str, torch.Tensor],
        brought: Mapping[Any, Any],
    ) -> None:
        self.optimizer, self._plan, self._mesh = optimizer, plan, mesh
        self.groups = [optimizer.param_groups[index] for index in groups]
        names = {name for row in self.names_of_groups for name in row}
        slots = [(buffer, slot) for buffer in plan.buffers if buffer.updated for slot in buffer.slots]
        self._slots = {slot.name: (buffer, slot) for buffer, slot in slots if slot.name in names}
        self._shards: dict[str, torch.Tensor] = {}  # from which parts are taken
        self._parts = {  # each parameter's part in this rank's shard
            name: plan.part(buffer, slot, mesh.shard_rank, plan.placement.state)
            for name, (buffer, slot) in self._slots.items()
        }
        self._views: dict[str, torch.Tensor] = {}
        self._follow(shards)
        self._nothing = {  # what pieces hold between steps: the parameter's shape, with one element in memory
            name: torch.zeros((), dtype=buffer.dtype, device=plan.device).expand(slot.leaf.shape)
            for name, (buffer, slot) in self._slots.items()
            if plan.owners.get(name, mesh.shard_rank) == mesh.shard_rank
        }
        self._pieces = {name: nn.Parameter(nothing) for name, nothing in self._nothing.items()}
        self._groups = [[self._pieces[name] for name in row if name in self._pieces] for row in self.names_of_groups]
        self._state: Any = defaultdict(dict)
        parameters = {slot.name for buffer in plan.buffers for slot in buffer.slots}
        for name, value in brought.items():
            if name in self._pieces:
                self._state[self._pieces[name]] = dict(copy.deepcopy(value))
            elif name not in parameters:
                self._state[name] = value
        self._shown: dict[str, tuple[torch.Tensor, int]] = {}  # state as it was shown, with its version then
        self._written: dict[str, set[str]] = {"option": set(), "attribute": set()}  # by its code
        self._after = self._noted()
        self._rows = {  # who owns each parameter, and which of its elements each rank has
            name: Owned(plan.owners[name], tuple((part.first, part.last) for part in plan.parts(buffer, slot)))
            for name, (buffer, slot) in (self._slots.items() if plan.owners else ())
        }

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def owned(self) -> list[str]:
        """The parameters that this rank updates."""
        return list(self._pieces)

    @property
    def leaves(self) -> dict[str, Leaf]:
        """The parameters that any rank updates."""
        return {name: slot.leaf for name, (_, slot) in self._slots.items()}

    @property
    def names_of_groups(self) -> list[list[str]]:
        return [[parameter._sharded_name for parameter in group["params"]] for group in self.groups]

    def run(
        self, state: MutableMapping[str, torch.Tensor], shards: Mapping[str, torch.Tensor],
        outputs: Mapping[Port, torch.Tensor], idle: Collection[str],
    ) -> None:  # fmt: skip
        """Makes one step on the gradients among the program's outputs. ``state``: the optimizer state that users
        see."""
        for parameter in (parameter for group in self.groups for parameter in group["params"]):
            if (piece := self._pieces.get(parameter._sharded_name)) is not None:
                for name in noted_by([piece]) - noted_by([parameter]):
                    delattr(piece, name)
                piece.__dict__.update({name: vars(parameter)[name] for name in noted_by([parameter])})
        self._follow(shards)
        of_buffers = {key: outputs.get(Port("out", "update", key)) for key in self._shards}
        gradients: dict[str, torch.Tensor] = {}
        for name, (buffer, _) in self._slots.items():
            gradient = of_buffers[buffer.key]
            if gradient is not None and name not in idle:
                gradients[name] = self._parts[name].of(gradient)
        parameters = {name: self._views[name] for name in gradients}
        if self._plan.owners:
            self._by_owners(gradients, parameters)
        else:
            before = self._noted()
            self._on(gradients, parameters)
            self._note(before)
        torch.autograd.graph.increment_version(list(self._shards.values()))
        self.show(state)

    def changed(self) -> list[str]:
        """Attributes of the optimizer that were changed since its last step, but not by its own code."""
        now, was = self._noted(), self._after
        names = [key for key in {**was, **now} if key[0] == "attribute"]
        return [f"optimizer.{key[1]}" for key in names if now.get(key) != was.get(key)]

    def _follow(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Takes parts from these shards from now on."""
        if self._shards and all(shards[key] is known for key, known in self._shards.items()):
            return
        self._shards = {buffer.key: shards[buffer.key] for buffer, _ in self._slots.values()}
        for name, (buffer, _) in self._slots.items():
            self._views[name] = self._parts[name].of(self._shards[buffer.key].detach())

    def _on(self, gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        """Makes the step on these whole parameters, flat, in place."""
        given = [(name, self._pieces[name], values) for name, values in parameters.items()]
        try:
            for name, piece, values in given:
                in_shape = self._slots[name][1].leaf.in_shape
                piece.data, piece.grad = in_shape(values), in_shape(gradients[name])
            self._step()
            for name, piece, values in given:
                if piece.data_ptr() != values.data_ptr():  # its code replaced `p.data`
                    self._slots[name][1].leaf.at(values, 0).copy_(piece.detach())
        finally:
            for name, piece, _ in given:
                piece.data = self._nothing[name]

    def _step(self) -> None:
        """Calls the optimizer's own step on those pieces that have gradients."""
        try:
            with self._opened(), torch.no_grad(), nullcontext() if is_of_torch(self.optimizer) else OnItsOwn():
                step_of(type(self.optimizer))(self.optimizer)
        except Refused as error:
            raise RuntimeError(
                f"{self.name} runs as it is, on whole parameters, and now {error}: each rank would update by another "
                f"number. Nothing in its first steps told. {INSTEAD}"
            ) from error
        finally:
            for piece in self._pieces.values():
                piece.grad = None

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Inside, the optimizer holds the pieces, and its state."""
        own = self.optimizer
        before = [group["params"] for group in self.groups], own.param_groups, own.state
        for group, pieces in zip(self.groups, self._groups, strict=True):
            group["params"] = list(pieces)
        own.param_groups = list(self.groups)
        own.state = self._state
        try:
            yield
        finally:
            self._state = own.state
            for group, parameters in zip(self.groups, before[0], strict=True):
                group["params"] = parameters
            own.param_groups, own.state = before[1:]

    def _by_owners(self, gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        """Makes the step on what this rank owns. Raises an error, and writes nothing, if it fails on any rank."""
        update = Round({name: self._rows[name] for name in parameters}, gradients, parameters, self._mesh)
        # Parameters that a rank has whole are updated in place, and restored if a rank fails. What others update is
        # written once all ranks have said that their part went well.
        kept = [value.clone() for value in update.in_place]
        try:
            self._on_owned(update)
        except BaseException:  # an interrupt too
            for value, old in zip(update.in_place, kept, strict=True):
                value.copy_(old)
            raise
        update.write()

    def _on_owned(self, update: Round) -> None:
        failure: BaseException | None = None
        before = self._noted()
        given = update.receive()
        try:
            self._on(*given)
            self._note(before)
        except BaseException as error:  # an interrupt too would leave the others waiting
            failure = error
        # A checksum of what its groups and attributes say, which is the same on all owners.
        update.send_back(FAILED if failure is not None else zlib.crc32(repr(sorted(self._after.items())).encode()) + 1)
        words = update.wait()
        if failure is not None:
            raise failure
        if FAILED in words:
            raise RankError(
                f"The update of what rank {words.index(FAILED)} along the shard axis owns failed there, so no rank "
                f"wrote its own. {HALF}"
            )
        if odd := [rank for rank, other in enumerate(words) if other != words[0]]:
            raise RankError(
                f"What {self.name} keeps in its groups and attributes is not the same on ranks 0 "
                f"and {odd[0]} along the shard axis. Either one rank's script set an option alone: set it on all. Or "
                "its code wrote it, for ranks own different parameters, and how it updates one depends on others now: "
                f"{INSTEAD[0].lower()}{INSTEAD[1:]} No rank wrote its own. {HALF}"
            )

    def _note(self, before: Mapping[tuple[str, str, int], Any]) -> None:
        """Records what its code has written in groups and attributes since ``before`` was noted."""
        self._after = self._noted()
        for place, name, _ in (one for one, value in self._after.items() if before.get(one) != value):
            self._written[place].add(name)

    def _noted(self) -> dict[tuple[str, str, int], Any]:
        """Its groups' options and its attributes, as they can be compared later."""
        options = [("option", index, options_of(group)) for index, group in enumerate(self.optimizer.param_groups)]
        found = {}
        for place, index, values in [*options, ("attribute", 0, attributes_of(self.optimizer))]:
            for name, value in values.items():
                if is_plain(value):
                    found[place, name, index] = repr(value)  # most of them, without the cost of the rest
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
            f"{call} with {self.name}, which runs as it is, on whole parameters, after the program: {instead}"
        )

    def show(self, state: MutableMapping[str, torch.Tensor]) -> None:
        """Puts the optimizer's state of this rank's pieces into ``state``: tensors, and copies of numbers.

        Keys are ``"<parameter>.<name>"``.
        """
        for key in self._shown:
            state.pop(key, None)
        self._shown.clear()
        for key, value in self._kept().items():
            shown = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
            self._shown[key] = shown, shown._version
        state.update({key: shown for key, (shown, _) in self._shown.items()})

    def read(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over what users wrote into the state they see. Raises ``ValueError`` if they added or removed keys."""
        mine = {key for key in state if key.rpartition(".")[0] in self._slots or key in self._shown}
        if mine != self._shown.keys():
            odd = sorted(mine ^ self._shown.keys())
            raise ValueError(
                f"{odd[0]!r} was put into sharded.state.optimizer, or taken out: {self.name}, "
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
                    leaves, form = pytree.tree_flatten(value)
                    leaves = [_instead(leaf, given.get(label)) for label, leaf in zip(labels, leaves, strict=True)]
                    self._state[piece][top] = pytree.tree_unflatten(leaves, form)

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

    def of_parameters(self) -> dict[str, Any]:
        """What it keeps for each parameter that this rank owns, by name."""
        found = {name: dict(self._state[piece]) for name, piece in self._pieces.items() if self._state.get(piece)}
        for name, kept in found.items():
            tensors = [id(leaf) for leaf in all_leaves(kept).values() if isinstance(leaf, torch.Tensor)]
            if len(set(tensors)) < len(tensors):
                self.refuse("save", f"it keeps one tensor of {name} under two names, which would be two when loaded.")
        return found

    def of_all_ranks(self) -> dict[str, Any]:
        """What its code has written in groups, by name, and in attributes. Raises ``ValueError`` for other state."""
        if named := [name for name in self._state if isinstance(name, str)]:
            self.refuse("save", f"it keeps state {named[0]!r}, which belongs to no parameter.")
        own = attributes_of(self.optimizer)
        return {
            "written": sorted(self._written["option"]),
            "attributes": {name: own[name] for name in sorted(self._written["attribute"] & own.keys())},
        }

    def go_on(self, owned: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Goes on from what `of_parameters` and `of_all_ranks` returned."""
        for name, piece in self._pieces.items():
            self._state.pop(piece, None)
            if name in owned:
                self._state[piece] = {key: _placed(value, str(key), piece.device) for key, value in owned[name].items()}
        vars(self.optimizer).update(others["attributes"])
        self._written = {"option": set(others["written"]), "attribute": set(others["attributes"])}


def _instead(old: Any, new: torch.Tensor | None) -> Any:
    """The new value in the form in which the optimizer's code keeps it."""
    if new is None or new is old:
        return old
    if isinstance(old, torch.Tensor):
        return new.to(old.device, old.dtype).reshape(old.shape)
    return type(old)(new.item())


def _placed(value: Any, name: str, device: torch.device) -> Any:
    """What was read, on the device where the optimizer keeps it: step counts on the host, as in torch.optim."""

    def one(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) and (name != "step" or leaf.dim()) else leaf

    return pytree.tree_map(one, value)
