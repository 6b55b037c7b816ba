"""Sends parts of parameters, which every rank has, to the rank that owns each, and back: a message each way.

    rank 0 has  aaa bb        to owners        rank 0, who owns a:  aaa AAA
    rank 1 has  AAA BBB       ------------->   rank 1, who owns b:  bb BBB
                              <-------------
                              back

A message is an all-to-all of bytes along the shard axis, whatever the dtypes; what a rank has for itself is not in it.
One call begins a message and another waits for it, so that other work can be done meanwhile. A message may begin with a
word, a number that tells the sender's condition, for all to compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_compiled.distributed.mesh import Mesh

COLLECTIVES = torch.ops._c10d_functional
Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Owned:
    """One tensor: who owns it, and the elements ``[first, last)`` of it that each rank along the shard axis has."""

    owner: int
    parts: tuple[tuple[int, int], ...]  # by rank, in order, without gaps

    @property
    def numel(self) -> int:
        return self.parts[-1][1]

    @property
    def sent(self) -> int:
        """How many of its elements its owner does not have."""
        first, last = self.parts[self.owner]
        return self.numel - (last - first)


class Divided:
    """Tensors in parts, and the whole of those that this rank owns. One that it has all of is its own whole.

    ``own``: this rank's part of each row, 1-d.
    """

    def __init__(self, rows: Sequence[Owned], own: Sequence[torch.Tensor], mesh: Mesh) -> None:
        self.wholes: list[torch.Tensor | None] = []
        self.given: list[list[torch.Tensor]] = [[] for _ in range(mesh.shard)]  # this rank's parts, by owner
        self.taken: list[list[torch.Tensor]] = [[] for _ in range(mesh.shard)]  # others', in this rank's wholes
        self._here: list[torch.Tensor] = []  # this rank's parts of its wholes
        self._there: list[torch.Tensor] = []  # and where they are in these
        for row, value in zip(rows, own, strict=True):
            if row.owner != mesh.shard_rank:
                self.wholes.append(None)
                self.given[row.owner] += [value] * bool(value.numel())
            elif not row.sent:
                self.wholes.append(value)
            else:
                whole = value.new_empty(row.numel)
                self.wholes.append(whole)
                for rank, (first, last) in enumerate(row.parts):
                    if rank == mesh.shard_rank:
                        self._here.append(value)
                        self._there.append(whole[first:last])
                    elif first < last:
                        self.taken[rank].append(whole[first:last])

    def put_in(self) -> None:
        """Copies this rank's parts into the wholes."""
        _copy(self._there, self._here)

    def take_out(self) -> None:
        """Copies the wholes back into this rank's parts."""
        _copy(self._here, self._there)


class Message:
    """Sends these tensors to the other ranks, and theirs to ``places``; both by rank, 1-d. Under way once it is made.

    ``word``: below 2**63; None: it has none. Collective.
    """

    def __init__(
        self,
        sent: Sequence[Sequence[torch.Tensor]],
        places: Sequence[Sequence[torch.Tensor]],
        mesh: Mesh,
        word: int | None = None,
    ) -> None:
        ranks, me = range(mesh.shard), mesh.shard_rank
        self._me, self._word = me, word
        said = [] if word is None else [torch.full((1,), word, device=mesh.device)]
        going = [[_bytes(one) for one in (*said, *sent[rank])] if rank != me else [] for rank in ranks]
        self._places = [[_bytes(one) for one in (*said, *places[rank])] if rank != me else [] for rank in ranks]
        pieces = [piece for row in going for piece in row]
        self._sent = torch.cat([torch.empty(0, dtype=torch.uint8, device=mesh.device), *pieces])
        lengths = [[sum(map(len, row)) for row in side] for side in (self._places, going)]
        self._got = COLLECTIVES.all_to_all_single(self._sent, *lengths, mesh.groups["shard"])

    def wait(self) -> list[int]:
        """Waits until the message has come; it is in no place yet. Returns the word of each rank."""
        got = COLLECTIVES.wait_tensor(self._got)
        del self._sent
        pieces = iter(got.split([len(place) for row in self._places for place in row]))
        self._come = [[next(pieces) for _ in row] for row in self._places]
        if self._word is None:
            return []
        words = torch.cat([row[0] for row in self._come if row]).view(torch.int64).tolist()
        return [*words[: self._me], self._word, *words[self._me :]]

    def put(self) -> None:
        """Copies what came into its places."""
        first = self._word is not None
        places, come = ([one for row in side for one in row[first:]] for side in (self._places, self._come))
        _copy(places, come)


class Round:
    """An update's way to the owners and back; under way once it is made. Collective, as is each call.

    ``gradients``, ``parameters``: this rank's parts, 1-d, by name.
    """

    def __init__(self, rows: Mapping[str, Owned], gradients: Named, parameters: Named, mesh: Mesh) -> None:
        self._rows, self._mesh = rows, mesh
        self._gradients, self._parameters = (
            Divided(list(rows.values()), [own[name] for name in rows], mesh) for own in (gradients, parameters)
        )
        sides = self._gradients, self._parameters
        given, taken = (
            [[one for side in sides for one in getattr(side, name)[rank]] for rank in range(mesh.shard)]
            for name in ("given", "taken")
        )
        self._message = Message(given, taken, mesh)

    @property
    def in_place(self) -> Sequence[torch.Tensor]:
        """Parameters that this rank owns and has all of: they are updated where they are."""
        pairs = zip(self._rows.values(), self._parameters.wholes, strict=True)
        return [whole for row, whole in pairs if whole is not None and not row.sent]

    def receive(self) -> tuple[Named, Named]:
        """Gradients and parameters that this rank owns, whole, 1-d."""
        for side in (self._gradients, self._parameters):
            side.put_in()
        self._message.wait()
        self._message.put()
        gradients, parameters = (
            {name: whole for name, whole in zip(self._rows, side.wholes, strict=True) if whole is not None}
            for side in (self._gradients, self._parameters)
        )
        return gradients, parameters

    def send_back(self, word: int) -> None:
        """Sends the new parameters back, and this rank's word."""
        self._message = Message(self._parameters.taken, self._parameters.given, self._mesh, word)

    def wait(self) -> list[int]:
        """Waits until they are back; returns the ranks' words. Nothing is written yet."""
        return self._message.wait()

    def write(self) -> None:
        """Writes the new parameters into this rank's parts."""
        self._message.put()
        self._parameters.take_out()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _copy(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    if values:
        torch._foreach_copy_(list(places), list(values))
