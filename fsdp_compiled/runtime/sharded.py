"""Sharded: the object that the user holds and calls.

A step is a pure function of a `State` and a batch. The state's tensors are written in place (donated, as `jax.jit`
says): `Sharded.apply` consumes the state it is given, and `Sharded.step` keeps one state and applies to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.capture.global_modes import outside_modes
from fsdp_compiled.distributed.uneven_inputs import Announced, Joined
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.report import dump
from fsdp_compiled.runtime.local_steps import LocalSteps
from fsdp_compiled.runtime.parameters.gathered_call import hold, release, wholes_of
from fsdp_compiled.runtime.profiling import Profile, profiling
from fsdp_compiled.runtime.sharded_calls import one_thread
from fsdp_compiled.runtime.sharded_checkpoints import ShardedCheckpoints
from fsdp_compiled.runtime.state import State, wait_for_host_memory


class Sharded(ShardedCheckpoints):
    """A sharded model, its optimizer, and the compiled programs that train it; made by `compile_sharded`.

    ``plan``: which parameters are gathered together, and where every element lives. ``model`` and ``optimizer``: the
    user's own, for train or eval mode, buffers and learning rates.
    """

    @one_thread
    def step(self, *batch: Any, **named: Any) -> Any:
        """One optimizer step on this rank's batch.

        Returns the loss averaged over the ranks, a 0-d tensor of the loss's dtype; with ``aux``, ``(loss, aux)``,
        where ``aux`` is this rank's own. Collective: every rank calls it with a batch of the same shapes.
        """
        self._need_optimizer("step")
        result, self._state = self._run_step(self._state, batch, named)
        return result

    @one_thread
    def synchronize(self) -> None:
        """Exchanges between sites now, for the steps since the last exchange, as at the end of a run; see
        ``Policy.sync_every``. Does nothing if there are none. Collective."""
        if self._local is None:
            return
        with self._refusing():
            self._between_steps("synchronize")
            self._checkpoints.check()
            self._taken.check()
        self._local.finish()
        if self._local.due:
            self._exchange_sites(self._local, self._state)
        else:
            with self._meeting(f"exchange after 0 local steps{self._hyperparameters}"):
                pass

    @one_thread
    def accumulate(self, *batch: Any, **named: Any) -> Any:
        """Adds one microbatch's gradient, without an update; the next `step` uses the mean over all of them.

        If the loss is a mean over the batch, n - 1 calls and a `step` on equal parts equal one step on the whole batch.
        Returns this rank's own loss, not averaged over ranks; the next `step` returns the mean over microbatches and
        ranks. ``Policy.accumulate`` says what is held in between. Collective.
        """
        self._need_optimizer("accumulate")
        compiled, outputs = self._run("accumulate", self._state, batch, named)
        return compiled.capture.rebuild(outputs)

    @one_thread
    def apply(self, state: State, *batch: Any, **named: Any) -> tuple[State, Any]:
        """The functional form of `step`: ``(state, loss)``; consumes the state it is given. Collective.

        Equal states and batches give equal results, random numbers included: a clone of `state` holds those that it
        draws (see `State`). `state` itself draws from PyTorch's default generator, as `step` does.
        """
        self._need_optimizer("apply")
        if self._local is not None:
            with self._refusing():
                raise ValueError("apply under Policy.sync_every: what a round has come to is in no State. Call step.")
        for update in self._updates:
            with self._refusing():
                update.refuse("apply", "what its code keeps in groups and attributes is in no State. Call step.")
        result, new = self._run_step(state, batch, named)
        if state is self._state:
            self._state = new
        wait_for_host_memory(self.plan)
        return new, result

    @one_thread
    def value_and_grad(self, *batch: Any, **named: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """Returns ``(loss, gradients)``. Updates nothing but module buffers and the random state. Collective.

        ``gradients``: by parameter name, this rank's shard of the mean gradient over the ranks. It is the 1-d part in
        this rank's slice, in the parameter's memory order; often empty. Under ``"ddp"`` and ``"zero1"`` it is the whole
        gradient. ``parameter.grad`` is replaced by the same memory: ``clip_grad_norm_`` there clips what is returned.
        With ``aux``, the first element is ``(loss, aux)``.
        """
        compiled, outputs = self._run("gradient", self._state, batch, named)
        gradients: dict[str, torch.Tensor] = {}
        for buffer in self.plan.buffers:
            port = Port("out", "gradient", buffer.key)
            if port in outputs:
                for slot in buffer.slots:
                    part = self.plan.part(buffer, slot, self._mesh.shard_rank, self.plan.placement.gradient)
                    gradients[slot.name] = part.of(outputs[port])
        flats = {port.key: one for port, one in outputs.items() if port.kind == "gradient"}
        self._taken.leave_gradients(flats, compiled.idle)
        return compiled.capture.rebuild(outputs), gradients

    @one_thread
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Runs forward with gathered parameters and no gradients, in the model's train or eval mode. Collective."""
        if self._taken.layout.gathered is not None:
            return self.model(*inputs, **named)
        compiled, outputs = self._run("forward", self._state, inputs, named)
        return compiled.capture.rebuild(outputs)

    @contextmanager
    def gathered(self) -> Iterator[torch.nn.Module]:
        """Gathers all parameters once for many calls: ``with sharded.gathered() as model: model.generate(...)``.

        Inside, the model itself, its methods and ``sharded(*inputs)`` run the model's own code, without gradients,
        compilation or communication, so ranks may make different calls. Training, saving and loading raise an error
        inside; a write to a parameter raises one at the end. Each rank holds the whole model meanwhile. Collective at
        its beginning.
        """
        held = hold(self.model, self._taken.layout, self._gather_all())
        failed = True
        try:
            with torch.no_grad():
                yield self.model
            failed = False
        finally:
            with suppress(RuntimeError) if failed else self._refusing():
                release(self._taken.layout, held)

    @contextmanager
    def join(self) -> Iterator[Joined]:
        """For ranks with uneven numbers of batches, as DDP's ``join``. Collective; needs ``Policy(weigh="rows")``.

        ``with sharded.join(): for batch in loader: sharded.step(*batch)``: a rank that reaches the end of the block
        takes part in the other ranks' steps with weight zero, until all ranks have reached it. So each step covers all
        rows that there are, and no rank waits for one that left. Before each call ranks exchange a few bytes between
        hosts, for which the host waits for the device.

        On a rank that has run out, a scheduler that the loop steps does not advance, and the rank's steps use the
        others' rates. Step it as often as ``shadowed`` says, an attribute of what ``join`` gives.
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
        """The last step's global norm of the gradients that an optimizer used, before clipping: 0-d, float32."""
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
        self._programs.module_buffers.take(self._state.buffers)
        return self._state

    @property
    def program(self) -> Program:
        """The newest program that trains; before there is one, the newest that differentiates or runs forward."""
        return self._programs.newest.program

    @property
    def outer_program(self) -> Program:
        """The program of an exchange between sites of everything at once, under ``Policy.sync_every``."""
        return self._sites().program

    @property
    def outer_parts(self) -> tuple[tuple[Program, ...], ...]:
        """The programs of each part, under `OuterSGD.parts` and ``overlap``: one, or what is sent, and what it does."""
        return tuple(self._sites().parts)

    def _sites(self) -> LocalSteps:
        if self._local is None:
            raise RuntimeError("There is no exchange between sites: Policy.sync_every is None.")
        return self._local

    @property
    def programs(self) -> tuple[Program, ...]:
        """The compiled programs that are kept, oldest first."""
        return tuple(compiled.program for compiled in self._programs.cached)

    @property
    def memory(self) -> Memory:
        """The predicted memory of a rank, between steps and while `program` runs, in bytes."""
        return self._programs.newest.memory

    @property
    def lowered(self) -> str:
        """What `program` became: its pieces, by key, what compiled each, and the calls between them."""
        return self._programs.newest.lowered

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """``with sharded.profile() as profile: sharded.step(*batch)``: measures the calls inside, on this rank.

        Programs that were compiled before the block run with a clock around each call, and without CUDA graphs, so
        make a step first and a few inside. Printed, ``profile`` says what bounds the step and which field of `Policy`
        to try; `Profile.trace` writes it for Perfetto, and `dump(folder, profile)` into ``report.html``. Inside the
        block ``torch.profiler`` names each call by its unit. Each rank may have such a block or none. Raises
        ``RuntimeError`` at its end where nothing was measured.
        """
        with profiling(self.plan, self._programs.cached) as found:
            yield found

    def dump(self, folder: str | Path, profile: Profile | None = None) -> Path:
        """Writes the plan, every stage of `program` with the differences, its memory, what it was lowered to, and
        ``report.html``, with what was measured in ``profile``. Returns the folder.

        Raises ``ValueError`` for a folder that cannot be made or written. What cannot be described is left out, and
        its file says why.
        """
        newest = self._programs.newest
        plan, measured = self.plan, None
        if profile is not None and profile.compiled is newest:
            plan, measured = profile.plan, profile.step
        return dump.write(folder, plan, newest.stages, newest.memory, newest.lowered, measured)

    def explain(self, error: Exception) -> str | None:
        """Names the other rank, if any, that made a collective of the script's own fail with this error: a rank that is
        gone, hangs, or called something else. Errors of this object's own calls name it themselves."""
        return self._calls.reason(error)

    def __reduce__(self) -> Any:
        raise TypeError("A Sharded cannot be copied or pickled: it holds compiled programs and this rank's place.")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Only for what a `Sharded` has not: says whether its model or its optimizer has it."""
            if hasattr(type(self), name):  # a property that failed: with its own error
                return object.__getattribute__(self, name)
            having = [kind for kind in ("model", "optimizer") if hasattr(vars(self).get(kind), name)]
            cure = f" Use {' or '.join(f'sharded.{kind}.{name}' for kind in having)}." if having else ""
            raise AttributeError(f"'Sharded' object has no attribute {name!r}.{cure}")

    def __repr__(self) -> str:
        return f"Sharded({type(self.model).__name__})\n{self.plan}"

    @one_thread
    def _gather_all(self) -> list[torch.Tensor]:
        with self._refusing():
            self._trained("gathered", optimizer=False)
        with self._meeting("gathered"), outside_modes():
            return wholes_of(self.model)

    def _scale(self, name: str) -> torch.Tensor:
        if self.plan.policy.scaling is None:
            raise RuntimeError(
                'The loss is not scaled: Policy.loss_scale is None. For fp16, give Policy(loss_scale="dynamic").'
            )
        return self._state.scale[name]

    def _shadow(self, call: Announced) -> None:
        """Makes the same call as another rank, on a batch that does not count."""
        batch, named = call.batch(self.plan.device)
        calls = {"accumulate": self.accumulate, "gradient": self.value_and_grad, "forward": self.__call__}
        with call.modes.entered():
            calls.get(call.kind, self.step)(*batch, **named)
