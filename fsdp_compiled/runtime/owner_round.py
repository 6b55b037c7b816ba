"""One round of an update by owners: some parameters, whose parts travel to their owners and back; see `plan.rounds`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.distributed.owners import Divided, Message, Owned

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
