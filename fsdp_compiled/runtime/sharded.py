"""Sharded: what a person holds and calls.

A step is a pure function of a `State` and a batch. The state's tensors are written in place (donated, as `jax.jit`
says): `Sharded.apply` consumes the state it is given, and `Sharded.step` keeps one state and applies to it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.analysis import dump
from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.capture.ambient import outside_modes, untraced
from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.call_store import Posted
from fsdp_compiled.distributed.mesh import Mesh, RankError
from fsdp_compiled.distributed.uneven_inputs import Announced, Joined
from fsdp_compiled.ir.program import CALL_PARTS, NORM, Port, Program
from fsdp_compiled.lower.cuda_graph import Replays
from fsdp_compiled.lower.lowering import below_autograd
from fsdp_compiled.optim.hyperparameters import Hyperparameters
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.optim.rules import make_rules_again
from fsdp_compiled.optim.together import members
from fsdp_compiled.optim.wrapped import check_step_hooks
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.checkpoint.checkpoints import Busy, Checkpoints, check_wish, path
from fsdp_compiled.runtime.checkpoint.contents import check_extra
from fsdp_compiled.runtime.checkpoint.trained import Trained
from fsdp_compiled.runtime.checkpoint.writing import Saving
from fsdp_compiled.runtime.compile import Compiled, Kind
from fsdp_compiled.runtime.compute_copies import Copies
from fsdp_compiled.runtime.eager_update import EagerUpdate
from fsdp_compiled.runtime.failed_calls import FailedCalls
from fsdp_compiled.runtime.full_state_dict import full_state_dict
from fsdp_compiled.runtime.host_memory import wait_for_host_memory
from fsdp_compiled.runtime.module_buffers import take
from fsdp_compiled.runtime.one_thread import one_thread
from fsdp_compiled.runtime.parameter_writes import Writes
from fsdp_compiled.runtime.program_cache import Programs
from fsdp_compiled.runtime.request import Request
from fsdp_compiled.runtime.rng import RandomNumbers
from fsdp_compiled.runtime.state import State, optimizer_state
from fsdp_compiled.runtime.taken_model import TakenModel
from fsdp_compiled.runtime.whole_update import WholeUpdate

ODD = 0x9E3779B97F4A7C1  # spreads the programs' numbers over 60 bits: different ones stay different
log = logging.getLogger("fsdp_compiled")


class Sharded:
    """A sharded model, its optimizer, and the compiled programs that train it; made by `compile_sharded`.

    ``plan``: who is gathered with whom, and where every element lives. ``model`` and ``optimizer``: those that were
    taken over, for their modes, buffers and rates.
    """

    def __init__(
        self,
        taken: TakenModel,
        optimizer: Optimizer | None,
        loss: Callable[..., Any] | None,
        plan: Plan,
        mesh: Mesh,
        state: State,
        rules: Sequence[Rule],
        random: RandomNumbers,
        updates: Sequence[EagerUpdate] = (),
        replays: Replays | None = None,
    ) -> None:
        self.plan = plan
        self.model = taken.model
        self._taken = taken
        self.optimizer = optimizer
        self._mesh = mesh
        self._state = state
        self._hyperparameters = Hyperparameters(optimizer, plan.device)
        self._updates = updates  # of optimizers that run as they are
        self.calling = RLock()  # for `one_thread`
        self._rank = torch.tensor([mesh.shard_rank], device=plan.device)
        # Numbers that the host sets from call to call, and the tensors that hold them and keep their places.
        self._numbers = {"rows": 0.0} | {f"call {part}": 0.0 for part in range(CALL_PARTS)}
        self._call = torch.zeros(CALL_PARTS, dtype=torch.float64, device=plan.device)
        self._tensors = {"rows": torch.zeros((), dtype=torch.float64, device=plan.device)}
        self._tensors |= {f"call {part}": self._call[part] for part in range(CALL_PARTS)}
        self._copies = Copies(plan)
        self._norm: torch.Tensor | None = None
        self._calls = taken.layout.calls = Calls(mesh)
        self._writes = taken.layout.writes = Writes(taken.layout.shards if taken.layout.replicated else None)
        self._writes.end()
        self._joined: Joined | None = None  # inside `join`
        self._random = random
        self._programs = Programs(taken, loss, plan, mesh, rules, self._calls, random.bound, replays=replays)
        self._failed = FailedCalls(mesh, self._calls, self._programs, self._copies.tensors)
        self._row = self._failed.row  # of microbatches
        self._checkpoints = Checkpoints(mesh, self._calls)
        self._calls.take_part = weakref.WeakMethod(self._take_part)

    # What a person calls.

    @untraced
    @one_thread
    def step(self, *batch: Any, **named: Any) -> Any:
        """One optimizer step on this rank's batch.

        Returns the loss averaged over the ranks, a 0-d tensor of the loss's dtype; with ``aux``, ``(loss, aux)``,
        where ``aux`` is this rank's own. Collective: every rank calls it with a batch of the same shapes.
        """
        self._need_optimizer("step")
        result, self._state = self._run_step(self._state, batch, named)
        return result

    @untraced
    @one_thread
    def accumulate(self, *batch: Any, **named: Any) -> Any:
        """Adds one microbatch's gradient, without an update; the next `step` uses the mean over all of them.

        With a loss that is a mean over the batch, n - 1 calls and a `step` on equal parts are one step on the whole.
        Returns this rank's own loss, not averaged over ranks; the next `step` returns the mean over microbatches and
        ranks. ``Policy.accumulate`` says what is held in between. Collective.
        """
        self._need_optimizer("accumulate")
        compiled, outputs = self._run("accumulate", self._state, batch, named)
        self._row.programs += compiled.number
        return compiled.capture.rebuild(outputs)

    @untraced
    @one_thread
    def apply(self, state: State, *batch: Any, **named: Any) -> tuple[State, Any]:
        """The functional form of `step`: ``(state, loss)``; consumes the state it is given. Collective.

        Equal states and batches give equal results, random numbers included: a clone of `state` holds those that it
        draws (see `State`). `state` itself draws from PyTorch's default generator, as `step` does.
        """
        self._need_optimizer("apply")
        for update in self._updates:
            with self._refusing():
                update.refuse("apply", "what its code keeps in groups and attributes is in no State. Call step.")
        result, new = self._run_step(state, batch, named)
        if state is self._state:
            self._state = new
        wait_for_host_memory(self.plan)
        return new, result

    @untraced
    @one_thread
    def value_and_grad(self, *batch: Any, **named: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """``(loss, gradients)``, and nothing is updated but module buffers and the random state. Collective.

        ``gradients``: by parameter name, this rank's shard of the gradient's mean over the ranks: the 1-d part, in
        the parameter's memory order, that lies in this rank's slice; often empty. Under ``"ddp"`` and ``"zero1"``,
        the whole. ``parameter.grad`` is the same memory, in the place of what it was: ``clip_grad_norm_`` there clips
        what is returned. With ``aux``, the first element is ``(loss, aux)``.
        """
        compiled, outputs = self._run("gradient", self._state, batch, named)
        gradients: dict[str, torch.Tensor] = {}
        for buffer in self.plan.buffers:
            port = Port("out", "gradient", buffer.key)
            if port in outputs:
                size = outputs[port].numel()
                start = self._mesh.shard_rank * size if self.plan.placement.gradient else 0
                for slot in buffer.slots:
                    first, last = slot.within(start, start + size)
                    gradients[slot.name] = outputs[port][first - start : last - start]
        flats = {port.key: one for port, one in outputs.items() if port.kind == "gradient"}
        self._taken.leave_gradients(flats, compiled.idle)
        return compiled.capture.rebuild(outputs), gradients

    @untraced
    @one_thread
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Forward with gathered parameters and without gradient, in train or eval mode as the model is. Collective."""
        compiled, outputs = self._run("forward", self._state, inputs, named)
        return compiled.capture.rebuild(outputs)

    @contextmanager
    def join(self) -> Iterator[Joined]:
        """For ranks with uneven numbers of batches, as DDP's ``join``. Collective; needs ``Policy(weigh="rows")``.

        ``with sharded.join(): for batch in loader: sharded.step(*batch)``: a rank that comes to the end of the block
        goes on in the steps of those that have not, with weight zero, until all have. So each step is one on all rows
        that there are, and no rank waits for one that left. Before each call ranks exchange a few bytes between hosts,
        for which the host waits for the device.

        A scheduler that the loop steps stands still meanwhile on a rank that has run out: its steps are made with the
        others' rates. Step it as often as ``shadowed``, of what ``join`` gives, says.
        """
        if self.plan.policy.weigh != "rows":
            raise ValueError(
                "join lets ranks without a batch take part with weight zero, but Policy.weigh is "
                f'{self.plan.policy.weigh!r}. Pass Policy(weigh="rows") to compile_sharded.'
            )
        for update in self._updates:
            update.refuse("join", "it reads its own rates, not those of ranks that go on. Cut the batches even.")
        if self.plan.tp > 1:
            raise ValueError(
                "join is not supported under tensor parallelism yet: ranks along the tp axis would have to run out "
                "together. Give every rank as many batches (DistributedSampler pads)."
            )
        if self._joined is not None:
            raise RuntimeError("join inside join: one block is for all the calls in it.")
        joined = self._joined = Joined(self._mesh)
        try:
            yield joined
            joined.shadow(self._shadow, lambda: self._calls.closed is not None)
        except Exception as error:
            if self._calls.closed is None:
                joined.leave(error)
            raise
        finally:
            self._joined = None

    @property
    def grad_norm(self) -> torch.Tensor:
        """The last step's global gradient norm before clipping, a 0-d float32 tensor."""
        if self._norm is None:
            raise RuntimeError("No step was taken yet, so there is no gradient norm. Call sharded.step(*batch) first.")
        return self._norm

    @property
    def loss_scale(self) -> torch.Tensor:
        """What the next step multiplies its loss by, a 0-d float32 tensor."""
        return self._scale("factor").clone()

    @property
    def overflows(self) -> torch.Tensor:
        """How many steps updated nothing, because a gradient was not finite on some rank; a 0-d int64 tensor."""
        return self._scale("overflows").clone()

    @property
    def captures(self) -> int:
        """How many programs were compiled."""
        return self._programs.captures

    @property
    def replays(self) -> int:
        """How many calls were one launch of a CUDA graph."""
        return self._programs.replays.launches

    def close(self) -> None:
        """Destroys the CUDA graphs; calls after it warm up and capture again. On every rank, or on none.

        A script that ends, or ends its process group with ``dist.destroy_process_group``, has this done for it.
        """
        self._programs.replays.close()

    @property
    def state(self) -> State:
        """This rank's state, to be handed to `apply`."""
        wait_for_host_memory(self.plan)
        take(self._programs.replaced_buffers(), self._state.buffers)
        return self._state

    @untraced
    @one_thread
    def full_state_dict(self) -> dict[str, Any]:
        """The ordinary ``model.state_dict()``, on the CPU of rank 0; empty on the other ranks. Collective."""
        state = self._state
        if self._joined is not None:
            raise RuntimeError("full_state_dict inside join: the other ranks may still train. Call it after the block.")
        with self._refusing():
            self._taken.check()
            take(self._programs.replaced_buffers(), state.buffers, self._state.buffers)
        with self._meeting("full_state_dict"), outside_modes():
            return full_state_dict(self.model, self.plan, self._mesh, state.parameters, state.buffers)

    @untraced
    @one_thread
    def save(
        self,
        folder: str | Path,
        step: int | None = None,
        keep: int | None = None,
        wait: bool = False,
        extra: Mapping[str, Any] | None = None,
        *,
        replace: bool = False,
        busy: Busy = "wait",
    ) -> Saving:
        """Saves all that training goes on from in ``folder/step-N/``, for any number of ranks. Collective.

        ``step``: N; left out, how many updates were made. ``keep``: how many checkpoints stay, older ones are removed
        once this one is complete; None: all. ``extra``: objects by name, whose ``state_dict()`` goes along: a
        scheduler, a sampler. ``replace``: a checkpoint of this step may be there already.

        Returns a future once the state is copied; files are written in the background (``wait``: not so), and
        ``result()`` is the checkpoint's folder, or raises `SaveError` on every rank, as does the next call. ``busy``:
        what to do while the one before is being written, ``"wait"`` or ``"refuse"``.
        """
        with self._refusing():
            if busy not in ("wait", "refuse"):
                raise ValueError(f'busy is {busy!r}; expected "wait" or "refuse".')
            wish = check_wish(folder, step, keep, replace)
            given = check_extra(extra, load=False)
            self._between_steps("save")
            self._checkpoints.wait(busy)
            trained = self._trained("save", eagerly=True)
        if wish.step is None:
            wish = dataclasses.replace(wish, step=int(self._state.step))
        with self._meeting(f"save to {wish}, extra {list(given)}"), outside_modes():
            future = self._checkpoints.save(wish, trained, given)
        if wait:
            future.result()
        return future

    @untraced
    @one_thread
    def load(
        self,
        folder: str | Path,
        step: int | None = None,
        strict: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> int | None:
        """Goes on from the newest complete checkpoint in the folder, or the one of this step. Collective.

        Returns its step, or None where there is none. Whatever number of ranks, placement and units wrote it, all
        tensors keep their places, and programs stay compiled. ``extra``: objects whose ``load_state_dict`` gets what
        was saved under their names. Nothing is changed unless every rank has read and verified all of it: raises
        ``ValueError``, by name, for a damaged checkpoint, and for one of another model or optimizer, of which
        ``strict=False`` loads what fits by name, shape and dtype, and says what did not.
        """
        with self._refusing():
            if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
                raise ValueError(f"step is {step!r}; expected a whole number, or None for the newest checkpoint.")
            place, given = path(folder), check_extra(extra, load=True)
            if self._joined is not None:
                raise RuntimeError("load inside join: the other ranks may still train. Call it after the block.")
            self._checkpoints.wait()
            trained = self._trained("load", eagerly=True)
        label = f"load from {place}, step {step}, strict={bool(strict)}, extra {list(given)}"
        # One rank may load after a call that left its state half updated.
        with self._meeting(label) if self._mesh.world > 1 else nullcontext(), outside_modes():
            found = self._checkpoints.load(place, step, bool(strict), trained, given)
        if found is not None:
            self._row.end()
            self._calls.reopen()
        return found

    @untraced
    @one_thread
    def export(self, folder: str | Path) -> None:
        """Writes the weights in the layout of Hugging Face, for ``from_pretrained(folder)``. Collective.

        Safetensors files, their index where there are several, ``config.json`` where the model has a ``config``. No
        rank holds more than its own shards. ``folder`` must not exist, or be empty; it is there whole or not at all.
        """
        with self._refusing():
            place = path(folder)
            trained = self._trained("export", optimizer=False)
        with self._meeting(f"export to {place}"), outside_modes():
            self._checkpoints.export(place, self.model, trained)

    @untraced
    @one_thread
    def import_weights(self, folder: str | Path, strict: bool = True) -> None:
        """Loads weights in the layout of Hugging Face, cast to the parameters' dtypes. Collective.

        The optimizer's state stays as it is. No rank reads more than its own shards. Raises ``ValueError``, by name,
        for weights of another model, of which ``strict=False`` loads what fits, and says what did not.
        """
        with self._refusing():
            place = path(folder)
            trained = self._trained("import_weights", optimizer=False)
        with self._meeting(f"import from {place}, strict={bool(strict)}"), outside_modes():
            self._checkpoints.import_weights(place, bool(strict), self.model, trained)

    @untraced
    @one_thread
    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads an ordinary ``model.state_dict()``, that of rank 0; others may give ``{}``. Collective.

        The optimizer's state stays as it is. Raises ``ValueError``, by name, for weights of another model.
        """
        with self._refusing():
            trained = self._trained("load_full_state_dict", optimizer=False)
        with self._meeting("load_full_state_dict"), outside_modes():
            self._checkpoints.load_weights(state_dict, self.model, trained)

    @untraced
    @one_thread
    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """The ordinary ``optimizer.state_dict()``, on the CPU of rank 0; empty on the other ranks. Collective."""
        with self._refusing():
            self._need_optimizer("full_optimizer_state_dict")
            trained = self._trained("full_optimizer_state_dict")
        with self._meeting("full_optimizer_state_dict"), outside_modes():
            return self._checkpoints.optimizer_state_dict(trained)

    @untraced
    @one_thread
    def load_full_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads an ordinary ``optimizer.state_dict()``, that of rank 0; others may give ``{}``. Collective.

        Of the groups' options rates are taken over. Raises ``ValueError``, by name, for what does not fit.
        """
        with self._refusing():
            self._need_optimizer("load_full_optimizer_state_dict")
            trained = self._trained("load_full_optimizer_state_dict")
        with self._meeting("load_full_optimizer_state_dict"), outside_modes():
            self._checkpoints.load_optimizer(state_dict, trained)

    @untraced
    @one_thread
    def state_dict(self) -> dict[str, Any]:
        """For `torch.distributed.checkpoint`: ``dcp.save({"app": sharded})``. Collective.

        ``{"model": {...}, "optim": {"state": {...}, "param_groups": [...]}, "updates": ...}`` by the model's own
        names. What this rank holds a part of is a DTensor of the whole, over views of the shards, so that DCP copies
        out of the state itself, and into it when it loads: a load of DCP's that fails leaves half of it, unlike
        `load`. Random states are not in it.
        """
        with self._refusing():
            self._between_steps("state_dict")
            self._checkpoints.wait()
            trained = self._trained("state_dict")
        with self._meeting("state_dict"), outside_modes():
            return self._checkpoints.state_dict(trained)

    @untraced
    @one_thread
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returned and DCP filled, or one like it with whole tensors. Collective.

        Raises ``ValueError`` by name, with nothing changed, for what does not fit.
        """
        with self._refusing():
            trained = self._trained("load_state_dict")
        with self._meeting("load_state_dict"), outside_modes():
            self._checkpoints.load_state_dict(state_dict, trained)
        self._row.end()

    @property
    def program(self) -> Program:
        """The newest program that trains; before there is one, the newest that differentiates or runs forward."""
        return self._programs.newest.program

    @property
    def programs(self) -> tuple[Program, ...]:
        """The compiled programs that are kept, oldest first."""
        return tuple(compiled.program for compiled in self._programs.cached)

    @property
    def memory(self) -> Memory:
        """What a rank holds between steps and while `program` runs, predicted, in bytes."""
        return self._programs.newest.memory

    @property
    def lowered(self) -> str:
        """What `program` became: its pieces, by key, what compiled each, and the calls between them."""
        return self._programs.newest.lowered

    def dump(self, folder: str | Path) -> Path:
        """Writes the plan, every stage of `program` with the differences, its memory, and what it was lowered to.
        Returns the folder.

        Raises ``ValueError`` for a folder that cannot be made or written. What cannot be described is left out, and
        its file says why.
        """
        newest = self._programs.newest
        return dump.write(folder, self.plan, newest.stages, newest.memory, newest.lowered)

    def explain(self, error: Exception) -> str | None:
        """Which other rank made a collective of the script's own fail with this error, if one did: one that is gone,
        hangs, or called something else. Errors of this object's calls say it themselves."""
        return self._calls.reason(error)

    def __reduce__(self) -> Any:
        raise TypeError("A Sharded cannot be copied or pickled: it holds compiled programs and this rank's place.")

    def __repr__(self) -> str:
        return f"Sharded({type(self.model).__name__})\n{self.plan}"

    # How it is done.

    def _scale(self, name: str) -> torch.Tensor:
        if self.plan.policy.scaling is None:
            raise RuntimeError(
                'The loss is not scaled: Policy.loss_scale is None. For fp16, give Policy(loss_scale="dynamic").'
            )
        return self._state.scale[name]

    def _need_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                f"{call} needs an optimizer, and compile_sharded was called without one. Pass it: "
                "compile_sharded(model, torch.optim.AdamW(model.parameters()), ...); or use value_and_grad."
            )

    def _between_steps(self, call: str) -> None:
        """Raises for a call that is possible only between steps."""
        if self._joined is not None:
            raise RuntimeError(f"{call} inside join: the other ranks may still train. Call it after the block.")
        if self._row.programs or self._row.failure is not None:
            raise RuntimeError(
                f"{call} between microbatches: their sums are no part of a checkpoint. Call it after sharded.step."
            )

    def _trained(self, call: str, optimizer: bool = True, eagerly: bool = False) -> Trained:
        """What is saved and loaded. ``optimizer``: whether its state is; ``eagerly``: in whatever form it is kept."""
        updates = self._updates if optimizer else ()
        for update in updates:
            if not eagerly:
                update.refuse(call, "what its code keeps can have any form. Call save and load.")
            if not isinstance(update, WholeUpdate) and len(members(self.optimizer)) > 1:
                update.refuse(call, "its state is saved where it is the only optimizer.")
            update.read(self._state.optimizer)
        whole = [update for update in updates if isinstance(update, WholeUpdate)]
        pieces = next((update for update in updates if not isinstance(update, WholeUpdate)), None)
        self._taken.check()
        take(self._programs.replaced_buffers(), self._state.buffers)
        return Trained(self.plan, self._state, self.optimizer, self._programs.rules, pieces, whole)

    def _run_step(self, state: State, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, State]:
        compiled, outputs = self._run("last" if state.sums else "step", state, batch, named)
        self._row.end()
        self._norm = outputs.get(NORM)
        return compiled.capture.rebuild(outputs), state.consume()

    def _run(
        self, kind: Kind, state: State, batch: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Compiled, dict[Port, torch.Tensor]]:
        self._calls.check_open()
        try:
            if kind in ("step", "last"):
                self._read_rates()
                for update in self._updates:
                    update.read(state.optimizer)
            self._checkpoints.check()
            self._taken.check()
            if self._taken.layout.gradients_left and kind in ("step", "last", "accumulate"):
                self._taken.check_gradients("step" if kind == "last" else kind)
            request = self._programs.find(kind, batch, named)
        except Exception as error:
            self._refuse(error)
            raise
        try:
            with outside_modes(watched=True):
                return self._execute(request, state)
        except RankError as error:
            self._checkpoints.heard(str(error))
            raise

    def _execute(self, request: Request, state: State) -> tuple[Compiled, dict[Port, torch.Tensor]]:
        kind, batch, named = request.kind, request.batch, request.named
        if self._writes.shards is not None:
            self._writes.begin()
        take(request.buffers, state.buffers, self._state.buffers)
        if self._joined is not None:
            self._joined.announce(kind, request.label, (batch, named), self._hyperparameters.values, request.ambient)
        self._calls.hypers = f"{self._hyperparameters.digest:x}"
        with self._calls.naming():
            compiled = self._programs.get(request, self._state.buffers)
        self._programs.read_closed(compiled, request, state)
        ran = False
        try:
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
            if compiled.updates and self._updates:
                for update in self._updates:
                    update.run(state.optimizer, state.parameters, found, compiled.idle)
                if not self._hyperparameters.unchanged():
                    self._hyperparameters.traced()  # what its code changed is no change of the user's
        except BaseException as error:
            raised = self._failed.handle(compiled, state, error, ran, f"{self._hyperparameters}{self._writes}")
            if raised is error:
                raise
            raise raised from error
        finally:
            if self._writes.shards is not None:
                self._writes.end()
            self._calls.returned()
        return compiled, found

    def _bind(self, compiled: Compiled, state: State, request: Request) -> Sequence[Any]:
        """The program's inputs, with the numbers that this call sets."""
        if compiled.kind == "accumulate" and not state.sums:
            state.sums.update(compiled.zeros())
        good = self._failed.begin(compiled)
        if compiled.compared:
            before = self._row.programs if compiled.updates else 0
            call = (compiled.number + before) * ODD + self._hyperparameters.digest + self._writes.total
            for part in range(CALL_PARTS):
                self._set_number(f"call {part}", float(call >> 20 * part & 0xFFFFF) if good else math.nan)
        if compiled.weighed:
            shadows = self._joined is not None and self._joined.shadows is not None
            self._set_number("rows", 0 if shadows else request.rows)
        if compiled.copied:
            self._copies.follow(state.parameters)
        return compiled.input_binding.inputs(request.leaves, state.held, lambda: self._holders(compiled, state))

    def _holders(self, compiled: Compiled, state: State) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Who holds a program's inputs, by kind, but for the batch.

        ``call`` is what ranks compare in the reduction of the loss: program, microbatches' programs, and scheduled
        rates; in parts below 2**20, so that their squares, summed over thousands of ranks, are exact in float64.
        """
        return {
            "shard": state.parameters,
            "copy": self._copies.tensors,
            "buffer": state.buffers,
            "state": state.optimizer,
            "constant": compiled.constants(state),
            "hyper": self._hyperparameters.tensors,
            "rank": {"": self._rank},
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
        """Takes this rank's part in a call that it does not make, so that those who make it learn that."""
        with outside_modes():
            return self._failed.take_part(self._state, call, quiet)

    def _read_rates(self) -> None:
        """Writes rates that changed to the device; a change of any other hyperparameter traces new rules."""
        if self.optimizer is not None:
            check_step_hooks(self.optimizer)
        if not self._hyperparameters.unchanged():
            with outside_modes():  # tensors made in the caller's inference mode could never be written again
                if changed := self._hyperparameters.changed(self._programs.rules):
                    self._retrace(changed)
                self._hyperparameters.write(self._programs.rules)
        if self._joined is not None and self._joined.shadows is not None:
            self._hyperparameters.overwrite(self._joined.shadows.hypers)

    def _shadow(self, call: Announced) -> None:
        """Makes another rank's call, on a batch that counts nothing."""
        batch, named = call.batch(self.plan.device)
        calls = {"accumulate": self.accumulate, "gradient": self.value_and_grad, "forward": self.__call__}
        with call.ambient.entered():
            calls.get(call.kind, self.step)(*batch, **named)

    def _retrace(self, changed: Sequence[str]) -> None:
        assert self.optimizer is not None
        if all(rule.eagerly is not None for rule in self._programs.rules):
            make_rules_again(self.optimizer, self._programs.rules)  # is tried again, and reads what changed by itself
            self._hyperparameters.traced()
            return
        log.warning("%s changed, which is not scheduled: the step is compiled again.", ", ".join(changed))
        with outside_modes():
            self._programs.retrace(make_rules_again(self.optimizer, self._programs.rules))
        self._hyperparameters.traced()
        for name, value in optimizer_state(self.plan, self._programs.rules, {}).items():
            self._state.optimizer.setdefault(name, value)  # that the new values ask for, momentum for one

    @contextmanager
    def _meeting(self, label: str) -> Iterator[None]:
        """A call that is no program: all ranks make it, or none; where one is lost in it, the others say which."""
        self._writes.begin()
        self._programs.meet(f"{label}{self._writes}")
        try:
            with self._calls.naming():
                yield
        finally:
            self._writes.end()
            self._calls.returned()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """A call that this rank refuses is an error on every rank: the others may be on their way into a collective."""
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
