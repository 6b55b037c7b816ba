"""Makes the calls of a `Sharded`: finds the program, binds its inputs, and tells the other ranks of failures."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from threading import RLock, current_thread
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from fsdp_compiled.capture.global_modes import outside_modes, untraced
from fsdp_compiled.distributed.call_store import Posted
from fsdp_compiled.distributed.mesh import RankError
from fsdp_compiled.distributed.uneven_inputs import Joined
from fsdp_compiled.ir.program import CALL_PARTS, NORM, OVERFLOW, Port
from fsdp_compiled.kernels import host_copies
from fsdp_compiled.lower import bundle
from fsdp_compiled.lower.lowering import below_autograd
from fsdp_compiled.optim.given_optimizer import check_step_hooks, members
from fsdp_compiled.optim.hyperparameters import Hyperparameters
from fsdp_compiled.optim.rules import make_rules_again
from fsdp_compiled.runtime.checkpoint.writing import Checkpoints
from fsdp_compiled.runtime.eager_comparison import ProgramDiffers
from fsdp_compiled.runtime.local_steps import LocalSteps
from fsdp_compiled.runtime.managed_model import ManagedModel
from fsdp_compiled.runtime.parameters.shard_layout import Writes
from fsdp_compiled.runtime.programs.compile import Compiled, Kind
from fsdp_compiled.runtime.programs.failed_calls import HALF, FailedCalls
from fsdp_compiled.runtime.programs.program_cache import Programs
from fsdp_compiled.runtime.programs.request import Request
from fsdp_compiled.runtime.rng import RandomNumbers
from fsdp_compiled.runtime.shard_update import ShardUpdate
from fsdp_compiled.runtime.state import Copies, State, optimizer_state
from fsdp_compiled.runtime.verify import Expected, Verification
from fsdp_compiled.runtime.whole_update import WholeUpdate

ODD = 0x9E3779B97F4A7C1  # spreads the programs' numbers over 60 bits: different ones stay different
F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("fsdp_compiled")


def one_thread(method: F) -> F:
    """Raises ``RuntimeError`` if another thread is in such a call of the same object. The call is not traced.

    A step writes weights in place and hands its state on. If another thread saved or made a step meanwhile, it would
    read half-written values. No other rank could know which of two threads came first. So neither waits: the second one
    gets an error. The call holds ``self.calling``, an ``RLock``, so the same thread may make calls inside of calls.
    """

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.calling.acquire(blocking=False):
            raise RuntimeError(
                f"{type(self).__name__}.{method.__name__} was called by the thread {current_thread().name!r} while "
                "another thread is in a call of the same one, which would be read or written half-way. Make all calls "
                "from one thread, in the same order on every rank; save(wait=False) writes in the background."
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self.calling.release()

    return cast(F, untraced(run))


class ShardedCalls:
    """The parts of a `Sharded`, and its calls of programs."""

    def __init__(
        self,
        taken: ManagedModel,
        optimizer: Optimizer | None,
        programs: Programs,
        hyperparameters: Hyperparameters,
        copies: Copies,
        state: State,
        random: RandomNumbers,
        updates: Sequence[WholeUpdate] = (),
        shard_updates: Sequence[ShardUpdate] = (),
        local: LocalSteps | None = None,
    ) -> None:
        """``updates``: of optimizers whose own code runs on whole parameters; ``shard_updates``: the same on shards.
        ``local``: the local steps under ``Policy.sync_every``."""
        plan, mesh = programs.plan, programs.mesh
        self.plan = plan
        self.model = taken.model
        self._taken = taken
        self.optimizer = optimizer
        self._mesh = mesh
        self._state = state
        self._programs, self._hyperparameters, self._copies = programs, hyperparameters, copies
        self._updates, self._shard_updates, self._local = updates, shard_updates, local
        self.calling = RLock()  # for `one_thread`
        self._rank = torch.tensor([mesh.shard_rank], device=plan.device)
        # Numbers that the host sets for each call, and the tensors that hold them, at fixed addresses.
        self._numbers = {"rows": 0.0} | {f"call {part}": 0.0 for part in range(CALL_PARTS)}
        self._call = torch.zeros(CALL_PARTS, dtype=torch.float64, device=plan.device)
        self._tensors = {"rows": torch.zeros((), dtype=torch.float64, device=plan.device)}
        self._tensors |= {f"call {part}": self._call[part] for part in range(CALL_PARTS)}
        self._norm: torch.Tensor | None = None
        self._calls = taken.layout.calls = programs.calls
        self._writes = taken.layout.writes = Writes(taken.layout.shards if taken.layout.replicated else None)
        self._writes.end()
        self._joined: Joined | None = None  # inside `join`
        self._random = random
        verified = bool(plan.policy.verify)
        self._verification = Verification(taken, programs, optimizer, random) if verified else None
        self._failed = FailedCalls(mesh, self._calls, programs, copies.tensors)
        self._row = self._failed.row  # of microbatches
        self._checkpoints = Checkpoints(mesh, self._calls)
        self._calls.take_part = weakref.WeakMethod(self._take_part)

    def _need_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                f"{call} needs an optimizer, and compile_sharded was called without one. Pass it: "
                "compile_sharded(model, torch.optim.AdamW(model.parameters()), ...); or use value_and_grad."
            )

    def _run_step(self, state: State, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, State]:
        if self._local is not None:
            self._exchange_sites(self._local, state)  # what is due since one failed, and the step before it did not
            self._local.step_begins(state)
        compiled, outputs = self._run("last" if state.sums else "step", state, batch, named)
        if state is self._state:
            self._row.end()
        self._norm = outputs.get(NORM)
        result = compiled.capture.rebuild(outputs), state.consume()
        if self._local is not None:
            self._local.step_ended()
            self._exchange_sites(self._local, result[1])
        return result

    def _exchange_sites(self, local: LocalSteps, state: State) -> None:
        """Runs what is due. Collective: all ranks have made equally many steps, with the same rates."""
        while local.due:
            label = f"{local.due[0]} after {local.steps} local steps{self._hyperparameters}"
            with (
                self._meeting(label) if local.meets() else nullcontext(), outside_modes(),
                self._calls.abandoning(f"{HALF} "), self._calls.naming(),
            ):  # fmt: skip
                local.exchange(state)

    def _run(
        self, kind: Kind, state: State, batch: tuple[Any, ...], named: dict[str, Any], again: bool = False
    ) -> tuple[Compiled, dict[Port, torch.Tensor]]:
        """``again``: it is the same call, whose first program was not what eager PyTorch computes."""
        self._calls.check_open()
        if bundle.COMPILES_ONLY:
            bundle.end_if_compiled(self._mesh)
        request = self._find(kind, state, batch, named)
        try:
            with outside_modes(watched=True):
                return self._execute(request, state, again)
        except RankError as error:
            own = self._verification
            if again or own is None or not (isinstance(error, ProgramDiffers) and own.programs.goes_on(error)):
                self._checkpoints.heard(str(error))
                raise
        return self._run(kind, state, batch, named, again=True)

    def _find(self, kind: Kind, state: State, batch: tuple[Any, ...], named: dict[str, Any]) -> Request:
        """The call, with its program if it is kept. An error of this rank alone is told to the others."""
        try:  # and not `_refusing`, whose calls each step would make
            if kind in ("step", "last"):
                self._read_rates()
                for update in self._updates:
                    update.read(state.optimizer)
            self._checkpoints.check()
            self._taken.check()
            if self._taken.layout.gradients_left and kind in ("step", "last", "accumulate"):
                self._taken.check_gradients("step" if kind == "last" else kind)
            added = state.step_counts.added if kind == "last" else frozenset()
            return self._programs.find(kind, batch, named, added)
        except Exception as error:
            self._refuse(error)
            raise

    def _execute(self, request: Request, state: State, again: bool) -> tuple[Compiled, dict[Port, torch.Tensor]]:
        kind, batch, named = request.kind, request.batch, request.named
        if self._writes.shards is not None:
            self._writes.begin()
        self._programs.module_buffers.take(state.buffers, self._state.buffers)
        if self._joined is not None and not again:  # ranks that have run out know of it already
            self._joined.announce(kind, request.label, (batch, named), self._hyperparameters.values, request.modes)
        self._calls.hypers = f"{self._hyperparameters.digest:x}"
        known = request.compiled
        verification, expected = self._verification, None
        if verification is not None and known is not None and verification.due(known, state):
            expected = self._expected(verification, known, request, state)
        with self._calls.naming():
            compiled = self._programs.get(request, self._state.buffers)
        self._programs.read_closed(compiled, request, state)
        if verification is not None and known is None and verification.due(compiled, state):
            self._calls.returned()
            expected = self._expected(verification, compiled, request, state)
            self._calls.post(request.said(compiled.label), compiled.wire)
        ran = False
        try:
            if compiled.counted and compiled.counted != state.step_counts.updated:
                state.step_counts.check(compiled.counted, self._programs.rules)
            given = self._bind(compiled, state, request)
            with (
                below_autograd(),
                self._random.drawing(state.drawn_from, compiled.shared) if compiled.random else nullcontext(),
            ):
                ran = True
                outputs = compiled.runner(*given)
            if self._taken.layout.differentiated and compiled.updates:
                self._taken.layout.written()
            if compiled.copied:
                self._copies.step_returned()
            found = dict(zip(compiled.outputs, outputs, strict=True))
            if expected is not None:
                assert verification is not None
                with self._of_site():
                    trace = partial(self._programs.maker.captured_again, request, self._state.buffers)
                    verification.compare(expected, compiled.capture.rebuild(found), found, state, trace)
            eagerly = compiled.updates and bool(self._updates or self._shard_updates)
            if eagerly and not (OVERFLOW in found and bool(found[OVERFLOW])):
                for one in self._shard_updates:
                    values = self._hyperparameters.values
                    one.run(self._programs.rules, values, state.optimizer, state.parameters, found, compiled.idle)
                for update in self._updates:
                    update.run(state.optimizer, state.parameters, found, compiled.idle)
                if not self._hyperparameters.unchanged():
                    self._hyperparameters.traced()  # changes by the optimizer's code are not the user's
        except BaseException as error:
            host_copies.finish()
            called = f"{request.said(compiled.label)}{self._hyperparameters}{self._writes}"
            raised = self._failed.handle(compiled, state, error, ran, called)
            if raised is error:
                raise
            raise raised from error
        finally:
            if self._writes.shards is not None:
                self._writes.end()
            self._calls.returned()
        if verification is not None:
            verification.returned(compiled)
        if kind == "accumulate":
            self._row.programs += request.number(compiled)
            state.step_counts.added |= compiled.adds
        elif kind == "last" or (compiled.counted and compiled.counted != state.step_counts.updated):
            state.step_counts.stepped(compiled.counted)
        return compiled, found

    def _expected(self, verification: Verification, compiled: Compiled, request: Request, state: State) -> Expected:
        """The results of eager PyTorch. To other ranks it is a separate call, so a rank that does not make it is an
        error."""
        shadows = self._joined is not None and self._joined.shadows is not None
        with self._of_site(), self._calls.together(verification.label(compiled)):
            rows = 0 if shadows else request.rows
            rules, values = self._programs.rules, self._hyperparameters.values
            return verification.run(compiled, request, state, rows, rules, values)

    @contextmanager
    def _of_site(self) -> Iterator[None]:
        """Tells the other sites, which go on, of an error that only the ranks of this one raise."""
        try:
            yield
        except RankError as error:
            if self._local is not None and self._calls.closed is None:
                self._calls.abandon(f"It said:\n{error}")
            raise

    def _bind(self, compiled: Compiled, state: State, request: Request) -> Sequence[Any]:
        """The program's inputs, with the numbers that this call sets."""
        if compiled.kind == "accumulate" and not state.sums:
            state.sums.update(compiled.zeros())
        good = self._failed.begin(compiled)
        if compiled.compared:
            before = self._row.programs if compiled.updates else 0
            call = (request.number(compiled) + before) * ODD + self._hyperparameters.digest + self._writes.total
            for part in range(CALL_PARTS):
                self._set_number(f"call {part}", float(call >> 20 * part & 0xFFFFF) if good else math.nan)
        if compiled.weighed:
            shadows = self._joined is not None and self._joined.shadows is not None
            self._set_number("rows", 0 if shadows else request.rows)
        if compiled.copied:
            self._copies.follow(state.parameters)
        return compiled.input_binding.inputs(request.leaves, state.held, lambda: self._holders(compiled, state))

    def _holders(self, compiled: Compiled, state: State) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The dictionaries that hold a program's inputs, by kind; all inputs but the batch.

        Ranks compare ``call`` in the reduction of the loss. It encodes program, microbatches' programs, scheduled
        rates, and the user's writes to parameters. Its parts are below 2**20, so that their squares, summed over
        thousands of ranks, are exact in float64.
        """
        return {
            "shard": state.parameters,
            "copy": self._copies.tensors,
            "buffer": state.buffers,
            "state": state.optimizer,
            "constant": compiled.constants(state),
            "hyper": self._hyperparameters.tensors,
            "rank": {"": self._rank},
            "room": compiled.rooms,
            "sum": state.sums,
            "scale": state.scale,
            "call": {"": self._call},
            "drawn": {"": self._random.drawn},
            "rows": {"": self._tensors["rows"]},
            "step": {"": state.step},
        }

    def _set_number(self, name: str, value: float) -> None:
        if value != self._numbers[name]:
            self._tensors[name].fill_(float(value))  # filled, not copied to a GPU, which makes the host wait
            self._numbers[name] = value

    def _take_part(self, call: Posted, quiet: bool) -> bool:
        """Takes part in a call that this rank does not make, so that the ranks that make it learn of that."""
        with outside_modes():
            return self._failed.take_part(self._state, call, quiet)

    def _read_rates(self) -> None:
        """Writes rates that changed to the device; a change of any other hyperparameter traces new rules."""
        for one in members(self.optimizer):
            check_step_hooks(one)
        if not self._hyperparameters.unchanged():
            with outside_modes():  # tensors made in the caller's inference mode could never be written again
                if changed := self._hyperparameters.changed(self._programs.rules):
                    self._rule_again(changed)
                self._hyperparameters.write(self._programs.rules)
        for one in self._shard_updates:
            one.check(self._programs.rules)
        if changed := [name for update in self._updates for name in update.changed()]:
            self._rule_again(changed)
        if self._joined is not None and self._joined.shadows is not None:
            self._hyperparameters.overwrite(self._joined.shadows.hypers)

    def _rule_again(self, changed: Sequence[str]) -> None:
        """Makes new rules and tries them. Traced rules are part of programs, so these programs are dropped."""
        assert self.optimizer is not None
        with outside_modes():
            rules, updated = self._programs.rules, self._state.step_counts.updated
            made = {rule.key for rule in rules if (rule.key in updated if rule.counts else int(self._state.step))}
            again = make_rules_again(self.optimizer, rules, made)
        if any(rule.eagerly is None for rule in rules):
            log.warning("%s changed, which is not scheduled: the step is compiled again.", ", ".join(changed))
            self._programs.retrace(self._hyperparameters.options())
        self._programs.rules = again
        self._hyperparameters.traced()
        for name, value in optimizer_state(self.plan, again, {}).items():
            self._state.optimizer.setdefault(name, value)  # state that the new values need, such as momentum

    @contextmanager
    def _meeting(self, label: str) -> Iterator[None]:
        """A call that runs no program: all ranks make it, or none. If a rank is lost in it, the others name it."""
        self._writes.begin()
        with self._calls.meeting(f"{label}{self._writes}"):
            try:
                yield
            finally:
                self._writes.end()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Makes a call that this rank refuses an error on every rank: the others may be about to enter a collective."""
        try:
            yield
        except Exception as error:
            self._refuse(error)
            raise

    def _refuse(self, error: Exception) -> None:
        reason = self._calls.refusal(error)
        if self._joined is not None and self._joined.shadows is None:  # else the others are in the call already
            self._joined.refuse(reason)
        self._calls.refuse(reason)
