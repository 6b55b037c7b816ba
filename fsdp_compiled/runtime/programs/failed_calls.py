"""Handles a call that fails on one rank: all ranks are told, and either all go on or none does.

| it failed                                                   | the other ranks                 | afterwards         |
|-------------------------------------------------------------|---------------------------------|--------------------|
| before the program ran, or in its forward or backward       | raise `RankError` in this call  | all can go on      |
| the same, in `accumulate`                                    | raise it in the step that ends  | all can go on with |
|                                                             | the row, as this rank does      | a new row          |
| the same, in a call of forward alone                        | are not concerned               | all can go on      |
| after the last collective (an update), in a collective, by  | raise `RankError` in this call, | nobody can: every  |
| an interrupt, or inside a CUDA graph                        | or in their next                | call raises it     |

A step updates nothing before its last collective. So a call that failed before it leaves the state as it was, except
for the failed rank's random state. That rank still runs the call's collectives (`lower.pending_collectives`), so that
all can go on.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.call_store import Posted, different
from fsdp_compiled.distributed.mesh import Mesh, RankError, Unanimous, exchange
from fsdp_compiled.ir.nodes import DISAGREE, OTHER_BATCHES
from fsdp_compiled.lower.pending_collectives import Position
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.runtime.programs.program_cache import Programs
from fsdp_compiled.runtime.state import State

SAME_BATCHES = (
    "They hold parts of the same parameters and work on one batch together: give the same to all of them (a "
    "DistributedSampler with num_replicas and rank of the data-parallel ranks alone), and, where dropout draws, the "
    "same torch.manual_seed."
)
DROPPED = "The sums over microbatches were dropped; begin the row again."
HALF = "The state may be half updated: load a checkpoint, or build the model and call compile_sharded again."


@dataclass
class Row:
    """The microbatches since the last update."""

    programs: int = 0  # the sum of their programs' numbers, which ranks compare at the next step
    failure: str | None = None  # why this rank's sums are invalid

    def end(self) -> None:
        self.programs, self.failure = 0, None


class FailedCalls:
    """Handles the failures of one `Sharded`'s calls."""

    def __init__(self, mesh: Mesh, calls: Calls, programs: Programs, copies: Mapping[str, torch.Tensor]) -> None:
        self.row = Row()
        self._mesh, self._calls, self._programs, self._copies = mesh, calls, programs, copies

    def begin(self, compiled: Compiled) -> bool:
        """Whether the call that begins can succeed here. Tells the other ranks if it cannot."""
        if self.row.failure is None or compiled.kind != "last":
            return True
        self._calls.tell(f"{self.row.failure}\n{DROPPED}")
        return False

    def handle(self, compiled: Compiled, state: State, error: BaseException, ran: bool, called: str) -> BaseException:
        """Tells the other ranks of the error. Returns what this rank raises. ``ran``: whether the program was started;
        ``called``: the call and its rates, as text for people."""
        if isinstance(error, RankError | Unanimous):
            return error
        if (reason := self._calls.parting(error)) is not None:
            return RankError(reason)
        if isinstance(error, RuntimeError) and DISAGREE in str(error):  # every rank raised this
            return RankError(self._heard(compiled, state) or different(dict(enumerate(exchange(called, self._mesh)))))
        if isinstance(error, RuntimeError) and OTHER_BATCHES in str(error):
            dropped = f" {self._drop(state)}" if compiled.kind == "last" else ""
            return RankError(f"In {compiled.label}, {OTHER_BATCHES}, so nothing was updated. {SAME_BATCHES}{dropped}")
        if ran and isinstance(error, RuntimeError) and (other := self._calls.reason(error)) is not None:
            return RankError(other)
        place = compiled.pending.place(error) if ran else compiled.pending.before()
        what = f"{type(error).__name__}: {error}".strip()
        if (cause := self._for_good(compiled, place, error)) is not None:
            self._calls.abandon(f"{cause} It said:\n{what}")
            return error
        assert place is not None
        if isinstance(error, torch.OutOfMemoryError):
            traceback.clear_frames(error.__traceback__)  # frees the tensors that they hold
        if self._mesh.world == 1 or (not place.owed and compiled.kind == "forward"):
            return error
        other = self._calls.told()  # the failure of another rank may have caused this one
        try:
            if other is None:
                self._calls.tell(what)
            self._finish(compiled, state, place, what)
        except Exception as broken:
            reason = self._calls.reason(broken) if isinstance(broken, RuntimeError) else None
            if reason is None:
                self._calls.abandon(f"It could not finish the call for the others ({broken}), after:\n{what}")
            return error
        return error if other is None else RankError(other)

    def take_part(self, state: State, call: Posted, quiet: bool) -> bool:
        """Runs the collectives of a call that the other ranks are in, if that call's program is known here.

        ``quiet``: whether to take part even where the others do not learn of the failure.
        """
        compiled = self._programs.running(call.label, call.wire)
        if compiled is None or (compiled.kind == "forward" and not quiet):
            return False
        place = compiled.pending.before()
        if compiled.kind == "forward" and not compiled.pending.exact(place):
            return False
        try:
            self._finish(compiled, state, place, "another rank called something else, or refused its call")
        except RuntimeError:
            return False
        return True

    def _finish(self, compiled: Compiled, state: State, place: Position, what: str) -> None:
        if compiled.kind == "accumulate":
            self.row.failure = f"A microbatch failed: {what}"
            if not state.sums:
                state.sums.update(compiled.zeros())
            state.step_counts.added |= compiled.adds

        def given(index: int) -> torch.Tensor:
            port = compiled.inputs[index]
            return {"shard": state.parameters, "copy": self._copies}[port.kind][port.key]

        compiled.pending.finish(place, given)

    def _heard(self, compiled: Compiled, state: State) -> str | None:
        """The reason that another rank, or this one, gave for this call's failure. Drops the sums of a failed row."""
        told = self._calls.told()
        if told is not None and compiled.kind == "last" and DROPPED in told:
            self._drop(state)
        return told

    def _drop(self, state: State) -> str:
        """Drops the sums of a row that failed. Returns the sentence that says so."""
        self.row.end()
        for total in state.sums.values():
            total.zero_()
        state.step_counts.added = frozenset()
        return DROPPED

    def _for_good(self, compiled: Compiled, place: Position | None, error: BaseException) -> str | None:
        """The reason why no rank can go on; None if all can."""
        alone = self._mesh.world == 1
        if place is None:
            return f"It broke off where nobody can tell how far it came. {HALF}"
        if place.communicating and not isinstance(error, torch.OutOfMemoryError):
            return None if alone else "It broke off in a collective, which cannot be resumed."
        if alone:
            return HALF if place.wrote and compiled.kind not in ("forward", "gradient") else None
        if not place.owed and compiled.kind in ("step", "last"):
            return f"The others had all they needed for the update. {HALF}"
        if not place.owed and compiled.kind == "gradient":
            return "The others had all they needed, and have gradients that this rank has not."
        if place.owed and compiled.kind == "forward" and not compiled.pending.exact(place):
            return "The others need what it did not compute."
        if not isinstance(error, Exception) and (place.owed or compiled.kind == "accumulate"):
            return "It was interrupted."
        return None
