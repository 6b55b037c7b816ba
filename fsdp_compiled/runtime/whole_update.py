"""The update of an optimizer that needs whole parameters: its own code, after the program, on those that a rank owns.

    program     forward, backward, reduce, unscale, clip -> gradients of this rank's shards
    to owners   an all-to-all along the shard axis: parts of gradients and parameters -> whole ones, on their owners
    then        param_groups[g]["params"] = those that this rank owns; type(optimizer).step(optimizer)
    back        an all-to-all: parts of the new parameters -> shards

Ranks run one program, which their gradients leave before ranks differ: what a rank owns is of any shape, and nothing is
padded or computed twice. Work is divided by cost (`plan.owners`): in a whole step each matrix is orthogonalised once.
Sent are 3/world of the parameters' bytes a rank and step, where forward, backward and reduction send 2 to 3 times
all of them: gathering gradients instead of reducing them would save nothing that can be seen.

State lives on its owner alone, in whatever form the optimizer's code gives it. Where every rank has whole gradients and
state (``"ddp"``, or one rank along the shard axis) each updates all for itself and nothing is sent. Replicas (HSDP) do
the same work on the same numbers. The last message back begins with a word: a rank whose step fails says so, and ranks
compare what their code counts in groups and attributes, so that one that starts to depend on other parameters late in
training is an error on all of them, and parameters are what they were. Where messages travel beside compute this goes
in rounds, a call of the step each (`plan.owners`), if that is proved to come to the same.

The eager code is what runs under both lowerings, so the numbers are those of eager PyTorch on the same gradients, bit
for bit, Newton-Schulz in bfloat16 included. See `fsdp_compiled.optim.whole` for who may.

One round of an update by owners: some parameters, whose parts travel to their owners and back; see `plan.owners`.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.distributed.mesh import Mesh, RankError, from_first
from fsdp_compiled.distributed.owners import Divided, Message, Owned
from fsdp_compiled.ir.program import Port
from fsdp_compiled.optim.optimizer_copy import attributes_of
from fsdp_compiled.optim.state_containers import all_leaves
from fsdp_compiled.optim.whole import OnItsOwn, is_known
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.owners import Update, rounds, update_cost
from fsdp_compiled.plan.plan import Buffer, Slot
from fsdp_compiled.runtime.eager_update import INSTEAD, EagerUpdate
from fsdp_compiled.runtime.shard_model import write_slot

FAILED = 0  # a word
HALF = (
    "The optimizer's state may be half updated: load a checkpoint, or build the model and call compile_sharded again."
)


class WholeUpdate(EagerUpdate):
    """Runs one optimizer's step on the whole parameters that this rank owns."""

    what = "whole parameters"

    def __init__(self, *given: Any, apart: bool = False) -> None:
        """``apart``: whether its step may be called on some parameters, and then on others."""
        self._apart = apart
        self._orders: dict[tuple[str, ...], list[tuple[dict[str, Owned], list[list[nn.Parameter]]]]] = {}
        self._nothing: dict[str, torch.Tensor] = {}  # what pieces hold between steps
        super().__init__(*given)

    @property
    def owned(self) -> list[str]:
        """The parameters that this rank updates."""
        return list(self._pieces)

    @property
    def leaves(self) -> dict[str, Leaf]:
        """The parameters that any rank updates."""
        return {name: slot.leaf for name, (_, slot) in self._slots.items()}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's own whose parameters it updates."""
        return self._own

    @property
    def names_of_groups(self) -> list[list[str]]:
        return self._names_of_groups()

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

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
        own = attributes_of(self._optimizer)
        return {
            "written": sorted(self._written["option"]),
            "attributes": {name: own[name] for name in sorted(self._written["attribute"] & own.keys())},
        }

    def go_on(self, owned: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """From these, which take the places of `of_parameters` and `of_all_ranks`."""
        for name, piece in self._pieces.items():
            self._state.pop(piece, None)
            if name in owned:
                self._state[piece] = {key: _placed(value, str(key), piece.device) for key, value in owned[name].items()}
        vars(self._optimizer).update(others["attributes"])
        self._written = {"option": set(others["written"]), "attribute": set(others["attributes"])}

    def _slots_of(self) -> dict[str, tuple[Buffer, Slot]]:
        return {name: place for name, place in super()._slots_of().items() if place[0].updated}

    def _follow(self, shards: Mapping[str, torch.Tensor]) -> None:
        """The shards that parts are taken from; pieces hold values only while a step runs."""
        if self._shards and all(shards[key] is known for key, known in self._shards.items()):
            return
        self._shards = {buffer.key: shards[buffer.key] for buffer, _ in self._slots.values()}
        for name, (buffer, part) in self._parts.items():
            self._views[name] = part.of(self._shards[buffer.key].detach())
        owners = self._plan.owners
        for name, (buffer, slot) in self._slots.items() if not self._pieces else ():
            if owners.get(name, self._mesh.shard_rank) == self._mesh.shard_rank:
                # Of the parameter's shape, and of one element in memory.
                nothing = torch.zeros((), dtype=buffer.dtype, device=self._plan.device).expand(slot.leaf.shape)
                self._nothing[name] = nothing
                self._pieces[name] = nn.Parameter(nothing)

    def _update(
        self, shards: Mapping[str, torch.Tensor], outputs: Mapping[Port, torch.Tensor], idle: Collection[str]
    ) -> None:
        self._follow(shards)
        of_buffers = {key: outputs.get(Port("out", "update", key)) for key in self._shards}
        gradients: dict[str, torch.Tensor] = {}
        for name, (buffer, part) in self._parts.items():
            gradient = of_buffers[buffer.key]
            if gradient is not None and name not in idle:
                gradients[name] = part.of(gradient)
        parameters = {name: self._views[name] for name in gradients}
        if self._plan.owners:
            self._by_owners(gradients, parameters)
        else:
            before = self._noted()
            self._on(gradients, parameters, self._groups)
            self._note(before)

    def _on(
        self, gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor],
        groups: Sequence[Sequence[nn.Parameter]],
    ) -> None:  # fmt: skip
        """The step on these whole ones, flat, in place; the pieces that its code is given, by group."""
        given = [(name, self._pieces[name], values) for name, values in parameters.items()]
        try:
            for name, piece, values in given:
                in_shape = self._slots[name][1].leaf.in_shape
                piece.data, piece.grad = in_shape(values), in_shape(gradients[name])
            self._step(nullcontext() if is_known(type(self._optimizer)) else OnItsOwn(), groups)
            for name, piece, values in given:
                if piece.data_ptr() != values.data_ptr():  # its code bound `p.data` anew
                    write_slot(values, Slot(self._slots[name][1].leaf, 0), piece.detach())
        finally:
            for name, piece, _ in given:
                piece.data = self._nothing[name]

    def _by_owners(self, gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        order = self._order(tuple(parameters))
        rounds = [Round(rows, gradients, parameters, self._mesh) for rows, _ in order]
        # What a rank has all of is updated where it is, and put back where a rank fails; what others update is written
        # once all have said that theirs went well.
        written = [value for one in rounds for value in one.in_place]
        kept = [value.clone() for value in written]
        try:
            self._in_rounds(rounds, [groups for _, groups in order])
        except BaseException:  # an interrupt too
            for value, old in zip(written, kept, strict=True):
                value.copy_(old)
            raise
        for one in rounds:
            one.write()

    def _in_rounds(self, row: Sequence[Round], groups: Sequence[list[list[nn.Parameter]]]) -> None:
        """The step on what this rank owns; raises where it fails on any rank."""
        failure: BaseException | None = None
        before = self._noted()
        noted = []
        for index, (one, pieces) in enumerate(zip(row, groups, strict=True)):
            last = index == len(row) - 1
            given = one.receive()
            try:
                if failure is None and (last or any(pieces)):
                    self._on(*given, pieces)
                    noted += [self._noted()] if len(row) > 1 else []
                if failure is None and last:
                    self._note(before)
                    self._check_calls(noted)
            except BaseException as error:  # an interrupt too would leave the others waiting
                failure = error
            one.send_back(None if not last else FAILED if failure is not None else self._counted_so_far())
        words = [one.wait() for one in row][-1]
        if failure is not None:
            raise failure
        if FAILED in words:
            raise RankError(
                f"The update of what rank {words.index(FAILED)} along the shard axis owns failed there, so no rank "
                f"wrote its own. {HALF}"
            )
        if odd := [rank for rank, other in enumerate(words) if other != words[0]]:
            raise RankError(
                f"What {type(self._optimizer).__name__} keeps in its groups and attributes is not the same on ranks 0 "
                f"and {odd[0]} along the shard axis. Either one rank's script set an option alone: set it on all. Or "
                "its code wrote it, for ranks own different parameters, and how it updates one depends on others now: "
                f"{INSTEAD[0].lower()}{INSTEAD[1:]} No rank wrote its own. {HALF}"
            )

    def _check_calls(self, noted: Sequence[Mapping[tuple[str, str, int], Any]]) -> None:
        """``noted``: groups and attributes after each call of a step. Raises where its code counts calls there."""
        for one in noted[1:]:
            if odd := sorted(key[1] for key in noted[0].keys() | one.keys() if noted[0].get(key) != one.get(key)):
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} runs in several calls of its step, so that messages travel "
                    f"meanwhile, and now writes another {odd[0]!r} in each: it would count calls for steps. Nothing in "
                    "its first steps told. Let it count from its first step, or leave out Policy.network."
                )

    def _order(self, names: tuple[str, ...]) -> list[tuple[dict[str, Owned], list[list[nn.Parameter]]]]:
        """The rounds of an update of these: the parameters of each, and the pieces that the code is given, by group.

        The last is given what is in no other: those without gradients too.
        """
        if names not in self._orders:
            rows = {name: self._row(name) for name in names}
            updates = [
                Update(row.owner, update_cost(leaf.shape), row.sent * leaf.dtype.itemsize)
                for row, leaf in ((row, self._slots[name][1].leaf) for name, row in rows.items())
            ]
            found = rounds(updates, self._plan.machine, self._plan.shard, self._apart and self._plan.hides)
            early = [{self._pieces.get(names[place]) for place in places} for places in found[:-1]]
            given = [[[piece for piece in group if piece in some] for group in self._groups] for some in early]
            rest = [[piece for piece in group if not any(piece in some for some in early)] for group in self._groups]
            rounds_rows = [{names[place]: rows[names[place]] for place in places} for places in found]
            self._orders[names] = list(zip(rounds_rows, [*given, rest], strict=True))
        return self._orders[names]

    def _counted_so_far(self) -> int:
        """A checksum of what its groups and attributes say, which is the same on all owners."""
        return zlib.crc32(repr(sorted(self._after.items())).encode()) + 1

    def _row(self, name: str) -> Owned:
        """Who owns a parameter, and which of its elements each rank has."""
        parts = self._plan.parts(*self._slots[name])
        return Owned(self._plan.owners[name], tuple((part.first, part.last) for part in parts))


def first_rank_s(value: Any, mesh: Mesh, device: torch.device) -> Any:
    """Rank 0's tensors and numbers, on every rank; what is on a GPU there is on this rank's here. Collective."""
    if mesh.world == 1:
        return value
    places: list[str] = []

    def on_host(leaf: Any) -> Any:
        places.append(leaf.device.type if isinstance(leaf, torch.Tensor) else "")
        return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf

    given, where = from_first((pytree.tree_map(on_host, value), places) if mesh.rank == 0 else None, mesh)
    kinds = iter(where)
    return pytree.tree_map(lambda leaf: leaf.to(device) if next(kinds) not in ("", "cpu") else leaf, given)


def _placed(value: Any, name: str, device: torch.device) -> Any:
    """What was read, where the optimizer keeps it: step counts stay on the host, as torch.optim has them."""

    def one(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) and (name != "step" or leaf.dim()) else leaf

    return pytree.tree_map(one, value)


Named = Mapping[str, torch.Tensor]


class Round:
    """These parameters, on their way to their owners once it is made. Collective, as is each call.

    ``gradients``, ``parameters``: this rank's parts, 1-d, by name.
    """

    def __init__(self, rows: Mapping[str, Owned], gradients: Named, parameters: Named, mesh: Mesh) -> None:
        self._rows, self._mesh = rows, mesh
        self._gradients, self._parameters = (
            Divided(list(rows.values()), [own[name] for name in rows], mesh) for own in (gradients, parameters)
        )
        self._travels = any(row.sent for row in rows.values())
        self._message: Message | None = None
        if self._travels:
            sides = self._gradients, self._parameters
            given, taken = (
                [[one for side in sides for one in getattr(side, name)[rank]] for rank in range(mesh.shard)]
                for name in ("given", "taken")
            )
            self._message = Message(given, taken, mesh)

    @property
    def in_place(self) -> Sequence[torch.Tensor]:
        """Parameters that this rank has all of and owns: they are updated where they are."""
        pairs = zip(self._rows.values(), self._parameters.wholes, strict=True)
        return [whole for row, whole in pairs if whole is not None and not row.sent]

    def receive(self) -> tuple[Named, Named]:
        """Gradients and parameters that this rank owns, whole, 1-d."""
        for side in (self._gradients, self._parameters):
            side.put_in()
        if self._message is not None:
            self._message.wait()
            self._message.put()
        gradients, parameters = (
            {name: whole for name, whole in zip(self._rows, side.wholes, strict=True) if whole is not None}
            for side in (self._gradients, self._parameters)
        )
        return gradients, parameters

    def send_back(self, word: int | None = None) -> None:
        """The new parameters are on their way back. ``word``: of this rank, at the end of the last round."""
        self._message = None
        if self._travels or word is not None:
            self._message = Message(self._parameters.taken, self._parameters.given, self._mesh, word)

    def wait(self) -> list[int]:
        """Until they are back; the ranks' words, if there are any. Nothing is written yet."""
        return self._message.wait() if self._message is not None else []

    def write(self) -> None:
        """The new parameters into this rank's parts."""
        if self._message is not None:
            self._message.put()
        self._parameters.take_out()
