"""The programs of a sharded model: which one a call runs, found by what the call looks like, or compiled by all ranks.

    step (float32[8, 6])          program 1, compiled
    step (float32[8, 6])          program 1, found
    accumulate (float32[8, 6])    program 2, compiled
    step (float32[3, 6])          program 3, compiled; when `Policy.programs` are kept, the one used the longest time
                                  ago goes

To find a program is each rank's own affair. To compile one is collective: every rank builds it, all compare its text,
and every rank lowers it; where one of them fails, all do. In a loop of the user's that holds for the first program:
later ones a rank compiles by itself, and ranks compare what they communicate.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import nn

from fsdp_compiled.capture import ambient
from fsdp_compiled.capture.across_tp import check_same, differing, digests, mark_random
from fsdp_compiled.capture.ambient import Ambient
from fsdp_compiled.capture.captured import Capture, batch_tensors
from fsdp_compiled.capture.dynamic_shapes import Sizes, layout, sizes_of, traceable, traced_with, unfit
from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.mesh import Mesh, agree, among, backends, exchange, exchange_along_tp
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.trial import use_reference
from fsdp_compiled.lower.backends import Host, decided, this_host
from fsdp_compiled.lower.compiled_piece import Call
from fsdp_compiled.lower.cuda_device import environment
from fsdp_compiled.lower.cuda_graph import Replays, make_device
from fsdp_compiled.lower.halves import whole_gradients
from fsdp_compiled.lower.inductor import cache_place, compile_all, divide
from fsdp_compiled.lower.kernel_trial import calls_kernels, failures
from fsdp_compiled.lower.lowering import Bind, Lowering, Runner
from fsdp_compiled.lower.remainder import Remainder
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.compile import (
    Compiled,
    Constants,
    Job,
    Kind,
    capture,
    check_devices,
    describe,
    fit_to_memory,
    fuse,
    label_of,
    memory_of,
    plain,
    rows_of,
    transform,
)  # fmt: skip
from fsdp_compiled.runtime.input_binding import flatten, replaced, same_tensors
from fsdp_compiled.runtime.loop_random import check_random
from fsdp_compiled.runtime.module_buffers import ModuleBuffers
from fsdp_compiled.runtime.training import Backward, backward_of

T = TypeVar("T")
# What a person called, for messages.
CALLS: dict[Kind, str] = {
    "step": "step", "last": "step", "accumulate": "accumulate", "gradient": "value_and_grad", "training": "forward",
    "forward": "sharded(...)",
}  # fmt: skip
log = logging.getLogger("fsdp_compiled")


class Changed(NamedTuple):
    """Why a program is not for a call."""

    label: str  # in few words that are the same on every rank where the same has changed
    reason: str
    quiet: bool = False  # whether it is what one does all the time


@dataclass
class Request:
    """A call, with what it takes to find its program, and the program if there is one."""

    kind: Kind
    batch: tuple[Any, ...]
    named: dict[str, Any]
    leaves: Sequence[Any]  # of the batch
    sizes: Sizes
    rows: int  # that count, where ranks are weighed by them
    ambient: Ambient  # the modes of the caller
    key: tuple[Any, ...]
    compiled: Compiled | None
    changed: Sequence[Changed]  # why the programs of this shape that there are will not do
    label: str
    closed: Mapping[str, torch.Tensor]  # tensors that the program closes over and that are others now
    buffers: Mapping[str, torch.Tensor | None]  # of the model that are others now
    posted: bool = False  # whether the others know of the call


class Traceable(Protocol):
    """A model, and how it is opened for a trace."""

    model: nn.Module

    def open(self) -> AbstractContextManager[nn.Module]: ...


class Programs:
    """What was compiled for one model, and is kept."""

    def __init__(
        self,
        taken: Traceable,
        loss: Callable[..., Any] | None,
        plan: Plan,
        mesh: Mesh,
        rules: Sequence[Rule],
        calls: Calls,
        bind: Bind | None = None,
        called: Callable[..., Any] | None = None,
        replays: Replays | None = None,
        plain: Mapping[str, torch.Tensor] | None = None,
        note: str = "",
    ) -> None:
        """``bind``: what a random operator becomes; None: itself, which draws from PyTorch's default generator.
        ``called``: of a model in a loop of the user's, what calls it, in the place of ``loss``. ``replays``: the
        graphs, in the place of those of the plan's device. ``plain``: parameters of the model that the plan does not
        have, by name. ``note``: what labels say besides.
        """
        self.rules = tuple(rules)  # of the optimizer
        self.captures = 0
        graphs = plan.policy.cuda_graph if not plan.policy.offload else False
        self.replays = replays or Replays(make_device(plan.device, graphs), graphs)
        self._taken, self._loss, self._plan, self._mesh, self._calls = taken, loss, plan, mesh, calls
        self._bind, self._called, self._plain, self._note = bind, called, plain or {}, note
        self._makers = mesh  # the ranks that make a program together
        self._hosts: list[Host] | None = None  # of all ranks, where that was asked for good
        self._begun = False  # whether all ranks have a program
        self._buffers = ModuleBuffers(taken.model, plan.device)
        self._cached: dict[int, Compiled] = {}  # by number; the last is the one used last
        self._variants: dict[tuple[Any, ...], list[Compiled]] = {}  # of calls that look the same; the first, used last
        self._written: dict[str, torch.Tensor] = {}  # closed-over tensors that programs write, as they were last seen
        self._revision = 0  # of the rules
        self._idle: set[str] = set()  # parameters that were said not to be reached by the loss
        self._evicted = 0

    @property
    def cached(self) -> list[Compiled]:
        """Oldest first."""
        return sorted(self._cached.values(), key=lambda compiled: compiled.number)

    @property
    def labels(self) -> set[str]:
        return {compiled.label for compiled in self._cached.values()}

    @property
    def newest(self) -> Compiled:
        """The newest that trains; before there is one, the newest that differentiates or runs forward."""
        for kind in get_args(Kind):
            if found := [compiled for compiled in self.cached if compiled.kind == kind]:
                return found[-1]
        raise RuntimeError("Nothing was compiled yet. The first call captures: sharded.step(*batch).")

    def retrace(self, rules: Sequence[Rule]) -> None:
        """Drops the programs that update: the optimizer has other rules."""
        self.rules = tuple(rules)
        self._revision += 1
        for compiled in self.cached:
            if compiled.updates:
                self._drop(compiled.number)

    def find(self, kind: Kind, batch: tuple[Any, ...], named: dict[str, Any]) -> Request:
        """The call and its program, if it is kept; raises ``ValueError`` for a call that no program can be made for."""
        policy = self._plan.policy
        seen = policy.lower == "eager" and self.replays.device is None
        ambient.check(CALLS[kind], kind != "forward", seen, saves=self._called is not None)
        around = ambient.now()
        leaves, spec = flatten(batch, named)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        sizes = sizes_of(policy.moving, tensors)
        read = [traceable(tensor, sizes) for tensor in tensors]
        if not all(map(is_, read, tensors)):
            batch, named = replaced(batch, named, dict(zip(map(id, tensors), read, strict=True)))
            leaves, spec = flatten(batch, named)
        described = tuple(layout(leaf, sizes) if isinstance(leaf, torch.Tensor) else plain(leaf) for leaf in leaves)
        differentiable = tuple(tensor.requires_grad for tensor in tensors)
        if self._called is None and kind != "forward" and any(differentiable):
            raise ValueError(_differentiable(batch_tensors(batch, named)))
        rows = rows_of(tensors) if policy.weigh == "rows" else 0
        buffers = self._buffers.replaced()
        key = (kind, described, spec, same_tensors(tensors), differentiable, around, self._buffers.layout)
        for compiled in self._variants.get(key, ()):
            if compiled.capture.guards.hold() and not (sizes and self._unfit(compiled, batch, named, sizes)):
                closed = compiled.capture.guards.closed.moved()
                if closed is not None:
                    found = (compiled, (), compiled.label, closed, buffers)
                    return Request(kind, batch, named, leaves, sizes, rows, around, key, *found)
        buffers = {**buffers, **self._buffers.scan()}
        key = (*key[:-1], self._buffers.layout)
        changed = [self._change(compiled, batch, named, sizes) for compiled in self._oldest_first(key)]
        label = self._label(kind, batch, named, sizes, changed, around)
        return Request(kind, batch, named, leaves, sizes, rows, around, key, None, changed, label, {}, buffers)

    def replaced_buffers(self) -> Mapping[str, torch.Tensor | None]:
        """The model's buffers that are other tensors than at the last call."""
        return self._buffers.replaced()

    def get(self, request: Request, buffers: Mapping[str, torch.Tensor]) -> Compiled:
        """The program that was found, or one that is compiled now; ``buffers`` are the model's, as the state has them.

        Collective: the other ranks are told which.
        """
        compiled = request.compiled
        if compiled is None:
            if request.changed and self._mesh.rank == 0:
                change = request.changed[-1]
                log.log(
                    logging.INFO if change.quiet else logging.WARNING, "%s; compiling %s", change.reason, request.label
                )
            with _no_collection(), ambient.outside_modes():
                if self._called is not None:
                    compiled = self._compile_in_loop(request, buffers)
                else:
                    self.meet(request.label)
                    compiled = self._compile(request, buffers)
        else:
            self._calls.post(compiled.label, compiled.wire)
            del self._cached[compiled.number]
        self._cached[compiled.number] = compiled
        variants = self._variants.setdefault(request.key, [])
        if not variants or variants[0] is not compiled:
            variants[:] = [compiled, *(other for other in variants if other is not compiled)]
        return compiled

    def running(self, label: str, wire: str) -> Compiled | None:
        """The program of a call that another rank has posted."""
        return next((one for one in self._cached.values() if (one.label, one.wire) == (label, wire)), None)

    def read_closed(self, compiled: Compiled, request: Request, state: Constants) -> None:
        """Closed-over tensors that have taken others' places are the program's inputs from now on."""
        if not request.closed and request.compiled is not None:
            return
        compiled.read_closed(request.closed)
        now = compiled.capture.guards.closed.tensors
        for name in compiled.capture.written_constants:
            if name in now and self._written.get(name) is not now[name]:
                if name in self._written:
                    state.constants[name] = now[name].detach()
                elif name in state.constants:  # loaded before there was a program
                    state.constants[name] = _restored(name, now[name].detach(), state.constants[name])
                self._written[name] = now[name]

    def meet(self, label: str) -> None:
        """What is rare and collective (to compile, to collect the model): all ranks do it, or none."""
        self._calls.post(label)
        self._calls.meet(label)

    # Which program it is.

    def _oldest_first(self, key: tuple[Any, ...]) -> list[Compiled]:
        """The programs of calls that look like this, in the same order on every rank."""
        return sorted(self._variants.get(key, ()), key=lambda compiled: compiled.number)

    def _change(self, compiled: Compiled, batch: tuple[Any, ...], named: dict[str, Any], sizes: Sizes) -> Changed:
        """Why this program is not for this call."""
        guards = compiled.capture.guards
        if (broken := guards.broken()) is not None:
            what, reason = broken
            return Changed(
                f", after {what} changed", f"{compiled.label} relies on {reason}", what.endswith(".training")
            )
        if (name := guards.closed.odd()) is not None:
            reason = f"{compiled.label} relies on the shape, dtype, strides and sharing of {name}, which are others now"
            return Changed(f", after {name} changed", reason)
        reason = self._unfit(compiled, batch, named, sizes) or "its sizes"
        return Changed(f", instead of {reason}", "Policy.dynamic: the model or the loss asks for certain sizes")

    def _unfit(self, compiled: Compiled, batch: tuple[Any, ...], named: dict[str, Any], sizes: Sizes) -> str | None:
        """Why this program is not for a batch of these sizes."""
        now = tuple(sizes.values())
        if now in compiled.fitting:
            return None
        reason = unfit(compiled.program, batch_tensors(batch, named))
        if reason is None:
            compiled.fitting.add(now)
        return reason

    def _label(
        self,
        kind: Kind,
        batch: tuple[Any, ...],
        named: dict[str, Any],
        sizes: Sizes,
        changed: Sequence[Changed],
        around: Ambient,
    ) -> str:
        label = label_of(kind, batch, named, sizes) + self._version(batch, named) + str(around) + self._note
        if self._called is not None:
            label = f"{kind} {type(self._taken.model).__name__} {label.removeprefix(kind).strip()}"
        label += "".join(dict.fromkeys(change.label for change in changed))
        return f"{label} ({self.captures + 1})" if label in self.labels else label

    def _version(self, batch: tuple[Any, ...], named: dict[str, Any]) -> str:
        """What else a program depends on and ranks may differ in: strides, train or eval, and the rules."""
        modes = "".join("01"[module.training] for module in self._taken.model.modules())
        tensors = batch_tensors(batch, named)
        strides = [f", {name} has strides {t.stride()}" for name, t in tensors.items() if not t.is_contiguous()]
        strides += [f", {name} requires a gradient" for name, t in tensors.items() if t.requires_grad]
        first: dict[int, str] = {}
        same = [f", {name} is {first[id(t)]}" for name, t in tensors.items() if first.setdefault(id(t), name) != name]
        training = "" if self._taken.model.training else ", eval mode"
        detail = "" if len(set(modes)) == 1 else f" of some modules ({hashlib.sha256(modes.encode()).hexdigest()[:8]})"
        changed = f", hyperparameters changed {self._revision} times" if self._revision else ""
        buffers = self._buffers.layout
        other = f", with buffers of other shapes ({buffers})" if buffers != self._buffers.first else ""
        return "".join(strides) + "".join(same) + training + detail + changed + other

    # How it is made.

    def _compile(self, request: Request, buffers: Mapping[str, torch.Tensor]) -> Compiled:
        """capture -> passes -> fit to memory -> fusions -> check -> agree -> partition -> compile -> graph"""
        begun = time.perf_counter()
        label = request.label
        job = self._job(request, buffers)

        def trace() -> Capture:
            check_devices(job.batch, job.named, job.plan.device)
            with self._taken.open() as model:
                return capture(model, job)

        captured = self._together(trace)
        if self._mesh.tp > 1:
            self._compare_along_tp(captured)

        def build() -> Compiled:
            stages = transform(captured, job)  # checked after each pass
            predict = memory_of(captured, stages[-1], job)
            stages = fit_to_memory(stages, predict, job)
            stages = fuse(stages, job)  # checked after each fusion
            return describe(captured, stages, predict, job)

        compiled = self._together(build, lambda made: made.program.text(), lambda made: made.program.outline())  # agree
        replayed = self._can_replay(compiled)
        self._make_room(label)
        compiled.runner, compiled.lowered = self._lower(
            compiled.halves.forward if compiled.halves else compiled.program
        )
        if compiled.halves is not None:
            compiled.backward, text = self._lower(compiled.halves.backward, boxed=True)
            compiled.lowered = f"{compiled.lowered}\nbackward, {text}"
        compiled.remainder = Remainder(compiled.runner)
        if request.sizes:
            self._together(lambda: self._check_fit(compiled, request))
        if replayed:  # as a CUDA graph
            compiled.runner = self.replays.wrap(compiled.runner, compiled.inputs, label, self._all_say(label))
        elif compiled.kind in ("gradient", "forward"):
            compiled.runner = self.replays.beside(compiled.runner)
        self.captures += 1
        self._say_idle(compiled)
        log.info("compiled %s in %.1f s (program %d)", label, time.perf_counter() - begun, self.captures)
        return compiled

    def _compile_in_loop(self, request: Request, buffers: Mapping[str, torch.Tensor]) -> Compiled:
        """The first program is made when all ranks make one, by all together where they call alike.

        Later ones a rank makes by itself: others may have theirs, or batches of other lengths. What ranks compare of
        these is what they communicate. Ranks along tp, whose programs are parts of one, make all together.
        """
        if self._mesh.tp > 1:
            self.meet(request.label)
            return self._compile(request, buffers)
        if self._begun:
            if request.posted:
                try:
                    compiled = self._by_itself(request, buffers)
                except BaseException as error:
                    self._calls.abandon(f"It said:\n{type(error).__name__}: {error}")
                    raise
            else:
                with self._calls.refusing():
                    compiled = self._by_itself(request, buffers)
            self._calls.enter(compiled.label, compiled.wire, request.posted)
            return compiled
        self._calls.post(request.label)
        alike = self._calls.meet(request.label, lambda label: label.partition(" (")[0])
        self._hosts = exchange(self._together(this_host), self._mesh)
        if alike:
            compiled = self._compile(request, buffers)
        else:
            compiled = self._together(
                lambda: self._by_itself(request, buffers), lambda made: "\n".join(made.program.collectives)
            )
        self._begun = True
        return compiled

    def _by_itself(self, request: Request, buffers: Mapping[str, torch.Tensor]) -> Compiled:
        with self._alone():
            return self._compile(request, buffers)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, this rank makes a program without the others."""
        self._makers = Mesh(self._mesh.device)
        try:
            yield
        finally:
            self._makers = self._mesh

    def _compare_along_tp(self, captured: Capture) -> None:
        """Ranks along the tp axis trace alike, and what is computed of their parts stays with these."""
        program, plan = captured.program, self._plan
        self._together(lambda: None, outline=lambda _: program.outline())
        found = exchange_along_tp(self._together(lambda: digests(program, captured.constants)), self._mesh)

        def check() -> None:
            different = differing(program, plan, found)
            check_same(program, plan, different, captured.layouts, self._called is not None)
            mark_random(program, plan, different)
            if self._called is not None:
                check_random(program, plan.device)

        self._together(check)

    def _job(self, request: Request, buffers: Mapping[str, torch.Tensor]) -> Job:
        """What is to be compiled, with what ranks must know of each other first."""
        # Ranks may have other sizes; all trace with rank 0's.
        hints = traced_with(exchange(request.sizes, self._makers)[0]) if request.sizes else {}
        hosts = self._hosts or exchange(self._together(this_host), self._mesh)
        return Job(
            request.kind, self._loss, self._plan, self.rules, buffers, batch=request.batch, named=request.named,
            label=request.label, number=self.captures + 1, sizes=request.sizes, hints=hints, ambient=request.ambient,
            backends=decided(hosts, backends(self._mesh)), called=self._called, plain=self._plain,
            tp_mesh=self._mesh.tp_mesh,
        )  # fmt: skip

    def _lower(self, program: Program, boxed: bool = False) -> tuple[Runner, str]:
        """``boxed``: as a function of one list, out of which it takes its inputs."""
        lowering = self._partition(program)
        pieces = self._compile_pieces(lowering)
        return lowering.boxed(pieces) if boxed else lowering.runner(pieces), lowering.text(pieces)

    def whole(self, compiled: Compiled) -> Backward:
        """Its backward without communication, made where it is asked for first, by each rank."""
        if compiled.whole is None:
            assert compiled.halves is not None
            program = whole_gradients(compiled.halves.backward)
            with _no_collection(), ambient.outside_modes(), self._alone():
                compiled.whole = backward_of(program, self._lower(program, boxed=True)[0])
        return compiled.whole

    def _partition(self, program: Program) -> Lowering:
        groups, how = self._mesh.groups, self._plan.policy.lower
        lowering = self._together(lambda: Lowering(program, groups, how, self._plan.blocks, self._bind))
        self._try_kernels(program)
        return lowering

    def _compile_pieces(self, lowering: Lowering) -> dict[str, Call]:
        """Each distinct piece is compiled by one rank of those that share code, for whose cache on disk others wait."""
        made: dict[str, Call] = {}
        if lowering.pieces and self._makers.world > 1:
            place, count = among(self._together(lambda: cache_place(self._plan.device)), self._makers)
            made = self._together(lambda: compile_all(divide(lowering.pieces, count)[place]))
        return made | self._together(lambda: compile_all(lowering.pieces))

    def _try_kernels(self, program: Program) -> None:
        """A kernel that fails or errs on any rank's device is replaced by its reference on all: they round alike."""
        device = self._plan.device
        if not calls_kernels(program):
            return
        found = exchange(self._together(lambda: failures(program, device)), self._makers)
        for rank, said in enumerate(found):
            for name, reason in said.items():
                if use_reference(name, device) and self._mesh.rank == 0:
                    log.warning(
                        "the kernel of %s is not used: on rank %d %s. Plain PyTorch does its work. Please report it, "
                        "with: %s", name, rank, reason, environment(),
                    )  # fmt: skip

    def _check_fit(self, compiled: Compiled, request: Request) -> None:
        """After lowering, which may have asked about sizes as well."""
        if (reason := self._unfit(compiled, request.batch, request.named, request.sizes)) is not None:
            raise ValueError(
                f"The model or the loss asks for certain sizes: the program, traced with rank 0's, is for {reason} on "
                f"rank {self._mesh.rank}. Give all ranks sizes that agree in it, or leave Policy.dynamic out."
            )

    def _can_replay(self, compiled: Compiled) -> bool:
        """Whether every rank can launch this program as a graph; if not, rank 0 says why."""
        if self.replays.device is None or compiled.kind not in ("step", "last", "accumulate"):
            return False
        program, device = compiled.program, self._plan.device
        found = self._together(lambda: self.replays.obstacles(program, device, backends(self._mesh)))
        reason = next(filter(None, exchange(found, self._mesh)), "")
        if reason and self._mesh.rank == 0:
            log.warning("%s runs without a CUDA graph:\n%s", compiled.label, reason)
        return not reason

    def _all_say(self, label: str) -> Callable[[str], list[str]]:
        """What each rank has to say about a call that all of them make, by rank."""

        def exchange_texts(text: str) -> list[str]:
            self._calls.meet(label)
            return exchange(text, self._mesh)

        return exchange_texts

    def _make_room(self, label: str) -> None:
        """Drops the program that rank 0 used the longest time ago, if `Policy.programs` are kept already."""
        if len(self._cached) < self._plan.policy.programs:
            return
        # Ranks that had a failed call in between may have another order of use, but they have the same programs.
        evicted = self._drop(exchange(next(iter(self._cached)), self._makers)[0])
        self._evicted += 1
        if self._mesh.rank == 0:
            log.warning("%s", _full(self._plan.policy.programs, label, evicted.label, self.labels, self._evicted))

    def _drop(self, number: int) -> Compiled:
        dropped = self._cached.pop(number)
        for key, variants in list(self._variants.items()):
            self._variants[key] = [compiled for compiled in variants if compiled is not dropped]
            if not self._variants[key]:
                del self._variants[key]
        return dropped

    def _say_idle(self, compiled: Compiled) -> None:
        """Names the parameters that the loss does not reach, each once."""
        found = [name for name in compiled.idle if name not in self._idle]
        self._idle.update(found)
        if found and self._called is None and self._mesh.rank == 0:
            log.warning("the loss does not reach %s: no gradient, and no update, for them", ", ".join(found))

    def _together(
        self,
        make: Callable[[], T],
        text: Callable[[T], str] = lambda made: "",
        outline: Callable[[T], str] | None = None,
    ) -> T:
        """What ``make`` makes, if every rank could make it and all made the same; else an error on every rank.

        Ranks along the tp axis, whose parts begin in different places, have the outline in common.
        """
        made: list[T] = []
        failure: BaseException | None = None
        try:
            made.append(make())
        except BaseException as error:  # one that interrupts, too, would leave the others waiting
            failure = error
        if outline is None or self._mesh.tp == 1:
            agree(self._makers, "The program", text(made[0]) if made else "", failure)
        else:
            agree(self._mesh, "The program", outline(made[0]) if made else "", failure, lambda: text(made[0]))
        return made[0]


def _differentiable(batch: Mapping[str, torch.Tensor]) -> str:
    name = next(name for name, tensor in batch.items() if tensor.requires_grad)
    return (
        f"batch{name} requires a gradient. A program gives gradients to the model's parameters alone, so what made "
        "this tensor would not be trained: make it part of the model or the loss; or pass tensor.detach(). A loss that "
        "differentiates by its inputs calls requires_grad_() itself."
    )


def _restored(name: str, tensor: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """The closed-over tensor, with the values that a checkpoint has of it."""
    if (tensor.shape, tensor.dtype) != (saved.shape, saved.dtype):
        raise ValueError(
            f"{name} is {tensor.dtype}{list(tensor.shape)}, and {saved.dtype}{list(saved.shape)} in the checkpoint "
            "that was loaded. Make it as it was saved."
        )
    with torch.no_grad():
        return tensor.copy_(saved)


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
