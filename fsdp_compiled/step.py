"""Sharded: what a person holds and calls.

A step is a pure function of a `State` and a batch. The state's tensors are written in place (donated, as `jax.jit`
says): `Sharded.apply` consumes the state it is given, and `Sharded.step` keeps one state and applies to it.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch.optim import Optimizer

from fsdp_compiled import dump
from fsdp_compiled.binding import flatten, modes, trainable
from fsdp_compiled.board import different
from fsdp_compiled.build import Compiled, Kind, build, check_devices, counting, label_of, plain, rows_of
from fsdp_compiled.calls import Calls
from fsdp_compiled.capture import batch_tensors
from fsdp_compiled.dynamic import Sizes, layout, sizes_of, traced_with, unfit
from fsdp_compiled.home import settle
from fsdp_compiled.inductor import Call, cache_place, compile_all, share
from fsdp_compiled.join import Announced, Joined
from fsdp_compiled.lower import Lowering, Runner, below_autograd
from fsdp_compiled.memory import Memory
from fsdp_compiled.mesh import Mesh, RankError, agree, among, backends, exchange
from fsdp_compiled.optim import Rule, make_rules
from fsdp_compiled.plan import Plan
from fsdp_compiled.program import DISAGREE, NORM, Port, Program
from fsdp_compiled.random import Generator
from fsdp_compiled.rates import Rates
from fsdp_compiled.replay import Replays, make_device
from fsdp_compiled.state import State, optimizer_state
from fsdp_compiled.takeover import Taken, full_state_dict

T = TypeVar("T")
Signature = tuple[Any, ...]
COUNT = Port("in", "count", "updates")  # the number of updates, which is no part of the program
log = logging.getLogger("fsdp_compiled")


class Sharded:
    """A sharded model, its optimizer, and the compiled programs that train it; made by `compile_sharded`."""

    def __init__(
        self,
        taken: Taken,
        optimizer: Optimizer | None,
        loss: Callable[..., Any] | None,
        plan: Plan,
        mesh: Mesh,
        state: State,
        rules: Sequence[Rule],
    ) -> None:
        self.plan = plan
        self.model = taken.model
        self.optimizer = optimizer
        self._taken, self._loss, self._mesh, self._rules = taken, loss, mesh, tuple(rules)
        self._state = state
        self._modules = list(taken.model.modules())
        self._parameters = list(taken.model.parameters())
        self._compiled: dict[Signature, Compiled] = {}
        self._rates = Rates(optimizer, plan.device)
        self._revision = 0  # of the rules
        self._rank = torch.tensor([mesh.shard_rank], device=plan.device)
        graphs = plan.policy.cuda_graph if not plan.policy.offload else False
        self._replays = Replays(make_device(plan.device, graphs), graphs)
        # Numbers that the host sets from call to call, and the tensors that hold them and keep their places.
        self._numbers = {"call": 0.0, "rows": 0.0}
        self._tensors = {name: torch.zeros((), dtype=torch.float64, device=plan.device) for name in self._numbers}
        self._norm: torch.Tensor | None = None
        self._calls = Calls(mesh)
        self._calls_summed = 0  # the numbers of the microbatches' programs, compared at the next step
        self._trainable = trainable(self._parameters)
        self._idle: set[str] = set()  # parameters that were said not to be reached by the loss
        self._evicted = 0
        self._joined: Joined | None = None  # inside `join`
        self.captures = 0

    # What a person calls.

    def step(self, *batch: Any, **named: Any) -> Any:
        """One optimizer step on this rank's batch.

        Returns the loss averaged over the ranks, a 0-d tensor of the loss's dtype; with ``aux``, ``(loss, aux)``,
        where ``aux`` is this rank's own. Collective: every rank calls it with a batch of the same shapes.
        """
        self._need_optimizer("step")
        result, self._state = self._run_step(self._state, batch, named)
        return result

    def accumulate(self, *batch: Any, **named: Any) -> Any:
        """Adds one microbatch's gradient, without an update; the next `step` uses the mean over all of them.

        With a loss that is a mean over the batch, n - 1 calls and a `step` on equal parts are one step on the whole.
        Returns this rank's own loss, not averaged over ranks; the next `step` returns the mean over microbatches and
        ranks. ``Policy.accumulate`` says what is held in between. Collective.
        """
        self._need_optimizer("accumulate")
        compiled = self._program("accumulate", batch, named)
        if not self._state.sums:
            self._state.sums.update(compiled.zeros())
        result = compiled.capture.rebuild(self._run(compiled, self._state, batch, named))
        self._calls_summed += compiled.number
        return result

    def apply(self, state: State, *batch: Any, **named: Any) -> tuple[State, Any]:
        """The functional form of `step`: ``(state, loss)``; consumes the state it is given. Collective."""
        self._need_optimizer("apply")
        result, new = self._run_step(state, batch, named)
        if state is self._state:
            self._state = new
        settle(self.plan)
        return new, result

    def value_and_grad(self, *batch: Any, **named: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """``(loss, gradients)``, and nothing is updated but module buffers and the random state. Collective.

        ``gradients``: by parameter name, this rank's shard of the gradient's mean over the ranks: the 1-d part, in
        the parameter's memory order, that lies in this rank's slice; often empty. Under ``"ddp"`` and ``"zero1"``,
        the whole. With ``aux``, the first element is ``(loss, aux)``.
        """
        compiled = self._program("gradient", batch, named)
        outputs = self._run(compiled, self._state, batch, named)
        gradients: dict[str, torch.Tensor] = {}
        for buffer in self.plan.buffers:
            port = Port("out", "gradient", buffer.key)
            if port in outputs:
                size = outputs[port].numel()
                start = self._mesh.shard_rank * size if self.plan.placement.gradient else 0
                for slot in buffer.slots:
                    first, last = slot.within(start, start + size)
                    gradients[slot.name] = outputs[port][first - start : last - start]
        return compiled.capture.rebuild(outputs), gradients

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Forward with gathered parameters and without gradient, in train or eval mode as the model is. Collective."""
        compiled = self._program("forward", inputs, named)
        return compiled.capture.rebuild(self._run(compiled, self._state, inputs, named))

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
        if self._joined is not None:
            raise RuntimeError("join inside join: one block is for all the calls in it.")
        self._joined = Joined(self._mesh)
        try:
            yield self._joined
            self._joined.shadow(self._shadow)
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
    def replays(self) -> int:
        """How many calls were one launch of a CUDA graph."""
        return self._replays.launches

    def close(self) -> None:
        """Destroys the CUDA graphs; calls after it warm up and capture again. On every rank, or on none.

        A script that ends, or ends its process group with ``dist.destroy_process_group``, has this done for it.
        """
        self._replays.close()

    @property
    def state(self) -> State:
        """This rank's state, to be handed to `apply`."""
        settle(self.plan)
        return self._state

    def full_state_dict(self) -> dict[str, Any]:
        """The ordinary ``model.state_dict()``, on the CPU of rank 0; empty on the other ranks. Collective."""
        state = self._state
        if self._joined is not None:
            raise RuntimeError("full_state_dict inside join: the other ranks may still train. Call it after the block.")
        self._meet("full_state_dict")
        return full_state_dict(self.model, self.plan, self._mesh, state.parameters, state.buffers)

    @property
    def program(self) -> Program:
        """The newest program that trains; before there is one, the newest that differentiates or runs forward."""
        return self._newest().program

    @property
    def programs(self) -> tuple[Program, ...]:
        """The compiled programs that are kept, oldest first."""
        by_age = sorted(self._compiled.values(), key=lambda compiled: compiled.number)
        return tuple(compiled.program for compiled in by_age)

    @property
    def memory(self) -> Memory:
        """What a rank holds between steps and while `program` runs, predicted, in bytes."""
        return self._newest().memory

    def dump(self, folder: str | Path) -> Path:
        """Writes the plan, every stage of `program` with the differences, and its memory. Returns the folder."""
        newest = self._newest()
        root = dump.write(folder, self.plan, newest.stages)
        (root / "memory.txt").write_text(newest.memory.text() + "\n")
        return root

    def __reduce__(self) -> Any:
        raise TypeError("A Sharded cannot be copied or pickled: it holds compiled programs and this rank's place.")

    def __repr__(self) -> str:
        return f"Sharded({type(self.model).__name__})\n{self.plan}"

    # How it is done.

    def _newest(self) -> Compiled:
        for kind in get_args(Kind):
            if found := [compiled for key, compiled in self._compiled.items() if key[0] == kind]:
                return max(found, key=lambda compiled: compiled.number)
        raise RuntimeError("Nothing was compiled yet. The first call captures: sharded.step(*batch).")

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

    def _run_step(self, state: State, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, State]:
        with self._refusing():
            self._read_rates()
        if self._joined is not None and self._joined.shadows is not None:
            self._rates.adopt(self._joined.shadows.rates)
        compiled = self._program("last" if state.sums else "step", batch, named)
        outputs = self._run(compiled, state, batch, named, self._calls_summed)
        self._calls_summed = 0
        self._norm = outputs.get(NORM)
        return compiled.capture.rebuild(outputs), state.consume()

    def _run(
        self, compiled: Compiled, state: State, batch: tuple[Any, ...], named: dict[str, Any], before: int = 0
    ) -> dict[Port, torch.Tensor]:
        leaves, _ = flatten(batch, named)
        self._set_number("call", (compiled.number + before) % 256 * 4096 + self._rates.digest)
        if self.plan.policy.weigh == "rows":
            self._set_number("rows", self._weight(batch, named))
        given = compiled.binding.inputs(leaves, state.held, lambda: self._holders(compiled, state))
        if compiled.updates:
            given.append(state.step)
        try:
            with (
                torch.no_grad(),
                below_autograd(),
                Generator(state.random, self.plan.device) if compiled.random else nullcontext(),
            ):
                outputs = compiled.runner(*given)
        except RuntimeError as error:
            raise self._explain(compiled, error) from error
        finally:
            self._calls.returned()
        return dict(zip(compiled.outputs, outputs, strict=True))

    def _holders(self, compiled: Compiled, state: State) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Who holds a program's inputs, by kind, but for the batch.

        ``call`` is what ranks compare in the reduction of the loss: program, microbatches' programs, and scheduled
        rates; below 2**20, so that its square, summed over thousands of ranks, is exact in float64.
        """
        return {
            "shard": state.parameters,
            "buffer": state.buffers,
            "state": state.optimizer,
            "constant": compiled.constants(state),
            "hyper": self._rates.tensors,
            "rank": {"shard": self._rank},
            "sum": state.sums,
            "scale": state.scale,
            "call": {"number": self._tensors["call"]},
            "weight": {"rows": self._tensors["rows"]},
        }

    def _set_number(self, name: str, value: float) -> None:
        if value != self._numbers[name]:
            self._tensors[name].fill_(float(value))  # filled, not copied to a GPU, which makes the host wait
            self._numbers[name] = value

    def _weight(self, batch: tuple[Any, ...], named: dict[str, Any]) -> int:
        """How many rows this rank's batch counts for."""
        shadows = self._joined is not None and self._joined.shadows is not None
        return 0 if shadows else rows_of(batch_tensors(batch, named))

    def _explain(self, compiled: Compiled, error: RuntimeError) -> RuntimeError:
        """The error of another rank, where that is why this one's collective failed."""
        if DISAGREE in str(error):  # all ranks are here: each found it in the same reduction
            return RankError(different(exchange(f"{compiled.label}{self._rates}", self._mesh)))
        reason = self._calls.reason(error)
        return RankError(reason) if reason is not None else error

    def _read_rates(self) -> None:
        """Writes rates that changed to the device; a change of any other hyperparameter traces new rules."""
        if not self._rates.unchanged():
            if self._rates.outdated():
                self._retrace()
            self._rates.write(self._rules)

    def _shadow(self, call: Announced) -> None:
        """Makes another rank's call, on a batch that counts nothing."""
        batch, named = call.batch(self.plan.device)
        calls = {"accumulate": self.accumulate, "gradient": self.value_and_grad, "forward": self.__call__}
        calls.get(call.kind, self.step)(*batch, **named)

    def _retrace(self) -> None:
        log.warning("A hyperparameter other than the scheduled ones changed: the step is compiled again.")
        assert self.optimizer is not None
        self._rules = make_rules(self.optimizer)
        self._rates.traced()
        self._revision += 1
        for name, value in optimizer_state(self.plan, self._rules, {}).items():
            self._state.optimizer.setdefault(name, value)  # that the new values ask for, momentum for one
        self._compiled = {key: value for key, value in self._compiled.items() if key[0] not in ("step", "last")}

    def _signature(self, kind: Kind, batch: tuple[Any, ...], named: dict[str, Any], sizes: Sizes) -> Signature:
        leaves, spec = flatten(batch, named)
        described = tuple(layout(leaf, sizes) if isinstance(leaf, torch.Tensor) else plain(leaf) for leaf in leaves)
        if trainable(self._parameters) != self._trainable:
            raise ValueError(self._changed())
        return (kind, described, spec, modes(self._modules))

    def _program(self, kind: Kind, batch: tuple[Any, ...], named: dict[str, Any]) -> Compiled:
        tensors = batch_tensors(batch, named) if self.plan.policy.moving else {}
        sizes = sizes_of(self.plan.policy.moving, tensors.values())
        with self._refusing():
            key = self._signature(kind, batch, named, sizes)
            if self.plan.policy.weigh == "rows":
                rows_of(batch_tensors(batch, named))
        why: list[str] = []
        while (compiled := self._compiled.get((*key, len(why)))) and sizes:
            if (reason := self._unfit(compiled, sizes, tensors)) is None:
                break
            why.append(reason)
        key = (*key, len(why))
        compiled = self._compiled.get(key)
        label = compiled.label if compiled is not None else self._label(kind, batch, named, sizes, why)
        if self._joined is not None:
            self._joined.announce(kind, label, (batch, named), self._rates.values)
        self._compiled.pop(key, None)
        if compiled is None:
            if why and self._mesh.rank == 0:
                log.warning("Policy.dynamic: the model or the loss asks for certain sizes; compiling %s", label)
            with _no_collection():
                compiled = self._compile(kind, batch, named, sizes, label)
        else:
            self._calls.post(compiled.label, compiled.wire)
        self._compiled[key] = compiled  # the last is the one used last
        return compiled

    def _unfit(self, compiled: Compiled, sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Why this program is not for a batch of these sizes."""
        now = tuple(sizes.values())
        if now in compiled.fitting:
            return None
        reason = unfit(compiled.program, tensors)
        if reason is None:
            compiled.fitting.add(now)
        return reason

    def _check_fit(self, compiled: Compiled, sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> None:
        """After lowering, which may have asked about sizes as well."""
        if (reason := self._unfit(compiled, sizes, tensors)) is not None:
            raise ValueError(
                f"The model or the loss asks for certain sizes: the program, traced with rank 0's, is for {reason} on "
                f"rank {self._mesh.rank}. Give all ranks sizes that agree in it, or leave Policy.dynamic out."
            )

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """A call that this rank refuses is an error on every rank: the others may be on their way into a collective."""
        try:
            yield
        except ValueError as error:
            if self._joined is not None:
                self._joined.refuse(str(error))
            self._calls.refuse(str(error), self._labels())
            raise

    def _changed(self) -> str:
        """What became of requires_grad, and the cure."""
        named = {id(parameter): name for name, parameter in self.model.named_parameters()}
        lines = [
            f"{named[id(parameter)]}, which was {'trainable' if before else 'frozen'}"
            for parameter, before in zip(self._parameters, self._trainable, strict=True)
            if parameter.requires_grad != before
        ]
        rest = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        return (
            f"requires_grad was changed after compile_sharded, of {', '.join(lines[:3])}{rest}. Shards and optimizer "
            "state are laid out by it. Set it back; or load sharded.full_state_dict() into a new model, set "
            "requires_grad there, and call compile_sharded on that."
        )

    def _labels(self) -> set[str]:
        return {compiled.label for compiled in self._compiled.values()}

    def _label(
        self, kind: Kind, batch: tuple[Any, ...], named: dict[str, Any], sizes: Sizes, why: Sequence[str]
    ) -> str:
        label = label_of(kind, batch, named, sizes) + self._version(batch, named)
        return label + "".join(f", instead of {reason}" for reason in why)

    def _compile(self, kind: Kind, batch: tuple[Any, ...], named: dict[str, Any], sizes: Sizes, label: str) -> Compiled:
        """Compiling is a collective: every rank builds the program, all compare it, and every rank lowers it."""
        begun = time.perf_counter()
        self._meet(label)
        # Ranks may have other sizes; all trace with rank 0's.
        hints = traced_with(exchange(sizes, self._mesh)[0]) if sizes else {}
        compiled = self._together(
            lambda: self._build(kind, batch, named, label, sizes, hints), lambda made: made.program.text()
        )
        replayed = self._can_replay(compiled)
        self._make_room(label)
        compiled.runner = self._lower(compiled.program)
        if sizes:
            self._together(lambda: self._check_fit(compiled, sizes, batch_tensors(batch, named)))
        if compiled.updates:
            compiled.runner = counting(compiled.runner, compiled.outputs)
        if replayed:
            ports = (*compiled.inputs, *[COUNT] * compiled.updates)
            compiled.runner = self._replays.wrap(compiled.runner, ports, label, self._all_say(label))
        self.captures += 1
        self._say_idle(compiled)
        log.info("compiled %s in %.1f s (program %d)", label, time.perf_counter() - begun, self.captures)
        return compiled

    def _lower(self, program: Program) -> Runner:
        """Each distinct piece is compiled by one rank; the others wait, and then find it in the cache on disk."""
        groups, how = self._mesh.groups, self.plan.policy.lower
        lowering = self._together(lambda: Lowering(program, groups, how, self.plan.blocks))
        made: dict[str, Call] = {}
        if lowering.pieces and self._mesh.world > 1:
            place, count = among(cache_place(), self._mesh)
            made = self._together(lambda: compile_all(share(lowering.pieces, count)[place]))
        made |= self._together(lambda: compile_all(lowering.pieces))
        return lowering.runner(made)

    def _can_replay(self, compiled: Compiled) -> bool:
        """Whether every rank can launch this program as a graph; if not, rank 0 says why."""
        if self._replays.device is None or compiled.kind not in ("step", "last", "accumulate"):
            return False
        program, device = compiled.program, self.plan.device
        found = self._together(lambda: self._replays.obstacles(program, device, backends(self._mesh)))
        reason = next(filter(None, exchange(found, self._mesh)), "")
        if reason and self._mesh.rank == 0:
            log.warning("%s runs without a CUDA graph:\n%s", compiled.label, reason)
        return not reason

    def _all_say(self, label: str) -> Callable[[str], list[str]]:
        """What each rank has to say about a call that all of them make, by rank."""

        def exchange_texts(text: str) -> list[str]:
            self._calls.meet(label, self._labels())
            return exchange(text, self._mesh)

        return exchange_texts

    def _make_room(self, label: str) -> None:
        """Drops the program that rank 0 used the longest time ago, if `Policy.programs` are kept already."""
        if len(self._compiled) < self.plan.policy.programs:
            return
        # Ranks that had a failed call in between may have another order of use, but they have the same programs.
        number = exchange(next(iter(self._compiled.values())).number, self._mesh)[0]
        key = next(key for key, compiled in self._compiled.items() if compiled.number == number)
        evicted = self._compiled.pop(key)
        self._evicted += 1
        if self._mesh.rank == 0:
            log.warning("%s", _full(self.plan.policy.programs, label, evicted.label, self._labels(), self._evicted))

    def _say_idle(self, compiled: Compiled) -> None:
        """Names the parameters that the loss does not reach, each once."""
        found = [name for name in compiled.idle if name not in self._idle]
        self._idle.update(found)
        if found and self._mesh.rank == 0:
            log.warning("the loss does not reach %s: no gradient, and no update, for them", ", ".join(found))

    def _together(self, make: Callable[[], T], text: Callable[[T], str] = lambda made: "") -> T:
        """What ``make`` makes, if every rank could make it and all made the same; else an error on every rank."""
        made: list[T] = []
        failure: Exception | None = None
        try:
            made.append(make())
        except Exception as error:
            failure = error
        agree(self._mesh, "The program", text(made[0]) if made else "", failure)
        return made[0]

    def _build(
        self, kind: Kind, batch: tuple[Any, ...], named: dict[str, Any], label: str, sizes: Sizes, hints: Sizes
    ) -> Compiled:
        check_devices(batch, named, self.plan.device)
        with self._taken.open() as model:
            return build(
                kind, model, self._loss, self.plan, self._rules, self._state.buffers, batch, named, label,
                number=self.captures + 1, sizes=sizes, hints=hints,
            )  # fmt: skip

    def _version(self, batch: tuple[Any, ...], named: dict[str, Any]) -> str:
        """What else a program depends on and ranks may differ in: strides, train or eval, and the rules."""
        modes = "".join("01"[module.training] for module in self._modules)
        tensors = batch_tensors(batch, named).items()
        strides = [f", {name} has strides {t.stride()}" for name, t in tensors if not t.is_contiguous()]
        training = "" if self.model.training else ", eval mode"
        detail = "" if len(set(modes)) == 1 else f" of some modules ({hashlib.sha256(modes.encode()).hexdigest()[:8]})"
        changed = f", hyperparameters changed {self._revision} times" if self._revision else ""
        return "".join(strides) + training + detail + changed

    def _meet(self, label: str) -> None:
        """What is rare and collective (to compile, to collect the model): all ranks do it, or none."""
        self._calls.post(label)
        self._calls.meet(label, self._labels())


@contextmanager
def _no_collection() -> Iterator[None]:
    """Compiling makes a million objects that stay: to look through them for garbage, again and again, takes a tenth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _full(limit: int, new: str, evicted: str, kept: Collection[str], count: int) -> str:
    """What is said when a program is dropped for another; the cures once."""
    text = f"compiling {new}: {limit} programs are kept (Policy.programs), so that of {evicted} was dropped"
    if count > 1:
        return f"{text} ({count} so far)"
    shapes = "".join(f"\n  {label}" for label in kept)
    return (
        f"{text}. Compiling takes seconds; a call with these shapes would compile again. Kept are{shapes}\n"
        "Give batches few shapes: drop the last short batch (drop_last=True), pad, or sort lengths into buckets; or "
        "raise Policy.programs."
    )
