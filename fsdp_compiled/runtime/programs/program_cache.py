"""The programs of a sharded model. A call finds its program by what the call looks like, or all ranks compile one.

    step (float32[8, 6])          program 1, compiled
    step (float32[8, 6])          program 1, found
    accumulate (float32[8, 6])    program 2, compiled
    step (float32[3, 6])          program 3, compiled; when `Policy.programs` are kept, the one used the longest time
                                  ago goes

Each rank finds programs by itself. Compiling is collective: every rank builds the program, all compare its text, and
every rank lowers it; if one rank fails, all do. In a loop of the user's that holds for the first program. A rank
compiles later ones by itself, and ranks compare what they communicate.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any, get_args

import torch

from fsdp_compiled.capture import global_modes
from fsdp_compiled.capture.captured import batch_tensors
from fsdp_compiled.capture.dynamic_shapes import layout, sizes_of, traceable
from fsdp_compiled.capture.refusals import check_attributes
from fsdp_compiled.capture.source_lines import words
from fsdp_compiled.distributed.mesh import from_first
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.runtime.module_buffers import ModuleBuffers
from fsdp_compiled.runtime.param_step_counts import Names
from fsdp_compiled.runtime.programs.compile import (
    Compiled,
    Constants,
    Kind,
    label_of,
    plain,
    rows_of,
)  # fmt: skip
from fsdp_compiled.runtime.programs.input_binding import flatten, replaced, same_tensors
from fsdp_compiled.runtime.programs.no_collection import no_collection
from fsdp_compiled.runtime.programs.program_maker import ProgramMaker
from fsdp_compiled.runtime.programs.request import (
    CALLS,
    ONE_OF,
    Changed,
    MovingSizes,
    Request,
    differentiable,
    full,
    mismatch,
)
from fsdp_compiled.runtime.shared_memory import check_written

log = logging.getLogger("fsdp_compiled")
needs_gradient = attrgetter("requires_grad")
LIBRARIES = (__name__.split(".")[0], "torch", "torchvision")  # tensor subclasses of these compute as their values do


class Programs:
    """The compiled programs of one model that are kept."""

    def __init__(self, maker: ProgramMaker, rules: Sequence[Rule], note: str = "") -> None:
        """``rules``: the optimizer's. ``note``: text that labels contain, too."""
        self.rules = tuple(rules)
        self.replays = maker.replays
        self.plan, self.mesh, self.calls = maker.plan, maker.mesh, maker.calls
        self._model, self.loss = maker.model, maker.loss
        self._called, self._note = maker.called, note
        self.maker = maker
        self.module_buffers = ModuleBuffers(maker.model, maker.plan.device)
        self._cached: dict[int, Compiled] = {}  # by number; the last is the one used last
        self._variants: dict[tuple[Any, ...], list[Compiled]] = {}  # of calls that look the same; the first, used last
        self._asked: set[str] = set()  # attributes unknown to PyTorch that programs read from tensors
        self._written: dict[str, torch.Tensor] = {}  # closed-over tensors that programs write, as they were last seen
        self._moving = MovingSizes() if self.plan.policy.learns_sizes and self.mesh.tp == 1 else None
        self._options = ""  # the optimizer's options that have changed, as text
        self._evicted = 0

    @property
    def captures(self) -> int:
        """How many programs were compiled."""
        return self.maker.captures

    @property
    def cached(self) -> list[Compiled]:
        """The kept programs, the oldest first."""
        return sorted(self._cached.values(), key=lambda compiled: compiled.number)

    @property
    def labels(self) -> set[str]:
        return {compiled.label for compiled in self._cached.values()}

    @property
    def newest(self) -> Compiled:
        """The newest program that trains; if there is none, the newest that differentiates or runs forward."""
        for kind in get_args(Kind):
            if found := [compiled for compiled in self.cached if compiled.kind == kind]:
                return found[-1]
        raise RuntimeError("Nothing was compiled yet. The first call captures: sharded.step(*batch).")

    def retrace(self, options: str) -> None:
        """Drops the programs that update, as the optimizer's rules have changed. ``options``: how the optimizer differs
        from the beginning, which ranks compare."""
        self._options = options
        for compiled in self.cached:
            if compiled.updates:
                self.forget(compiled)

    def find(self, kind: Kind, batch: tuple[Any, ...], named: dict[str, Any], added: Names = frozenset()) -> Request:
        """The call, with its program if it is kept. Raises ``ValueError`` for a call that cannot have a program."""
        policy = self.plan.policy
        seen = policy.lower == "eager" and self.replays.device is None
        global_modes.check(CALLS[kind], kind != "forward", seen, saves=self._called is not None)
        around = global_modes.now()
        leaves, _ = flatten(batch, named)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if {*map(type, tensors)} - {torch.Tensor} or any(map(vars, tensors)):
            self._check_classes(batch, named)
        if self._called is None and kind != "forward" and any(map(needs_gradient, tensors)):
            raise ValueError(differentiable(batch_tensors(batch, named)))
        self.module_buffers.look()

        def look(dims: tuple[int, ...], compared: bool = False) -> Request:
            return self._look(Request(kind, batch, named, leaves, around, added, compared=compared), dims)

        request = look(policy.moving)
        if request.compiled is not None:
            return request
        if self._moving is not None:
            compared = self._called is None  # in the user's loop, ranks may have different lengths, as under FSDP2
            for dims in self._moving.known(request):
                if (found := look(dims, compared)).compiled is not None:
                    return found
            if dims := self._moving.changed(request):
                request = replace(look(dims, compared), instead=self._incomplete(request))
        return self._incomplete(request)

    def _look(self, request: Request, dims: tuple[int, ...]) -> Request:
        """The request where these dims may have any size, with the program that is kept for it, if there is one."""
        batch, named = request.batch, request.named
        leaves, spec = flatten(batch, named)
        tensors = request.tensors
        sizes = sizes_of(dims, tensors)
        read = [traceable(tensor, sizes) for tensor in tensors]
        if not all(map(is_, read, tensors)):
            batch, named = replaced(batch, named, dict(zip(map(id, tensors), read, strict=True)))
            leaves, spec = flatten(batch, named)
        described = tuple(layout(leaf, sizes) if isinstance(leaf, torch.Tensor) else plain(leaf) for leaf in leaves)
        structure = spec, same_tensors(tensors), tuple(map(needs_gradient, tensors))
        request.batch, request.named, request.leaves, request.sizes = batch, named, leaves, sizes
        request.rows = rows_of(tensors) if self.plan.policy.weigh == "rows" else 0
        request.key = (request.kind, described, structure, request.modes, self.module_buffers.layout)
        for compiled in self._variants.get(request.key, ()):
            if request.added & compiled.unreached != compiled.added:
                continue
            if compiled.capture.guards.hold() and not (sizes and mismatch(compiled, request)):
                closed = compiled.capture.guards.closed.moved()
                if closed is not None:
                    if written := compiled.capture.written:
                        others = {name: tensor.detach() for name, tensor in closed.items()}  # may be a buffer itself
                        held = {**compiled.capture.constants, **others, **self.module_buffers.tensors()}
                        check_written(written, held, tensors)
                    request.compiled, request.label, request.closed = compiled, compiled.label, closed
                    break
        return request

    def has_other_floats(self, request: Request) -> bool:
        """Whether there are programs for calls that differ from this one only in Python floats."""
        alike = _but_floats(request.key)
        return any(key != request.key and _but_floats(key) == alike for key in self._variants)

    def _incomplete(self, request: Request) -> Request:
        """The request for a program that has to be made, with the reasons why none of the kept programs fits."""
        self.module_buffers.scan()
        request.key = (*request.key[:-1], self.module_buffers.layout)
        request.changed = [self._change(compiled, request) for compiled in self._oldest_first(request.key)]
        request.label = self._label(request)
        return request

    def get(self, request: Request, buffers: Mapping[str, torch.Tensor]) -> Compiled:
        """The program that was found, or one that is compiled now. ``buffers``: the model's, as the state holds them.

        Collective: the other ranks are told which.
        """
        compiled = request.compiled
        if compiled is None:
            several = bool(request.sizes)
            if request.changed and self.mesh.rank == 0:
                change = request.changed[-1]
                log.log(
                    logging.INFO if change.quiet else logging.WARNING, "%s; compiling %s", change.reason, request.label
                )
            with no_collection(), global_modes.outside_modes():
                room = lambda: self._make_room(request.label)  # noqa: E731
                if self._called is not None:
                    compiled = self.maker.compile_in_loop(request, buffers, self.rules, room)
                else:
                    self.maker.meet(request.said(request.label))
                    compiled = self.maker.compile(request, buffers, self.rules, room)
            self._asked |= compiled.capture.asked
            if self._moving is not None:
                self._moving.made(request, compiled.program, several)
        else:
            post = self.calls.post if self._called is None else self.calls.begin
            post(request.said(compiled.label), compiled.wire)
            del self._cached[compiled.number]
        self._cached[compiled.number] = compiled
        variants = self._variants.setdefault(request.key, [])
        if not variants or variants[0] is not compiled:
            variants[:] = [compiled, *(other for other in variants if other is not compiled)]
        return compiled

    def forget(self, compiled: Compiled) -> None:
        """Drops a program, if it is kept: the next such call makes another."""
        if compiled.number in self._cached:
            self._drop(compiled.number)

    def running(self, label: str, wire: str) -> Compiled | None:
        """The program of a call that another rank has posted; None if it is not kept here."""
        label = label.rpartition(ONE_OF)[2]
        return next((one for one in self._cached.values() if (one.label, one.wire) == (label, wire)), None)

    def read_closed(self, compiled: Compiled, request: Request, state: Constants) -> None:
        """Makes the tensors that replaced closed-over ones the program's inputs from now on."""
        if not request.closed and request.compiled is not None:
            return
        compiled.read_closed(request.closed)
        now = compiled.capture.guards.closed.tensors
        for name in compiled.capture.written_constants:
            if name in now and self._written.get(name) is not now[name]:
                if name in self._written:
                    state.constants[name] = now[name].detach()
                elif name in state.constants:  # it was loaded before there was a program
                    state.constants[name] = _restored(name, now[name].detach(), state.constants[name])
                self._written[name] = now[name]

    # Which program it is.

    def _oldest_first(self, key: tuple[Any, ...]) -> list[Compiled]:
        """The programs of calls that look like this one, in the same order on every rank."""
        return sorted(self._variants.get(key, ()), key=lambda compiled: compiled.number)

    def _check_classes(self, batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raises ``ValueError`` for a tensor of the user's class, or with an attribute that a program asked for."""
        tensors = batch_tensors(batch, named)
        for place, tensor in tensors.items():
            if type(tensor).__module__.split(".")[0] not in LIBRARIES:
                raise ValueError(
                    f"batch {place} is a {type(tensor).__qualname__}, a subclass of torch.Tensor, and a program knows "
                    "nothing of what its class makes of operators. Pass its values: tensor.as_subclass(torch.Tensor)."
                )
        check_attributes(tensors, self._asked)

    def _change(self, compiled: Compiled, request: Request) -> Changed:
        """The reason why this program does not fit this call."""
        guards = compiled.capture.guards
        if (broken := guards.broken()) is not None:
            what, reason = broken
            return Changed(
                f", after {what} changed", f"{compiled.label} relies on {reason}", what.endswith(".training")
            )
        if (odd := guards.closed.odd()) is not None:
            what, reason = (words(one, guards.scope) for one in odd)
            return Changed(f", after {what} changed", f"{compiled.label} relies on {reason}")
        if request.added & compiled.unreached != compiled.added:
            what = "the microbatches before it reached"
            return Changed(
                f", where {what} others", f"{compiled.label} is for other parameters that {what}", quiet=True
            )
        reason = mismatch(compiled, request) or "its sizes"
        why = "Policy.dynamic: the model or the loss asks for certain sizes"
        return Changed(f", instead of {reason}", why, self._moving is not None)

    def _label(self, request: Request) -> str:
        kind, batch, named = request.kind, request.batch, request.named
        label = label_of(kind, batch, named, request.sizes) + self._version(batch, named)
        label += f"{request.modes}{self._note}"
        if self._called is not None:
            label = f"{kind} {type(self._model).__name__} {label.removeprefix(kind).strip()}"
        label += "".join(dict.fromkeys(change.label for change in request.changed))
        return f"{label} ({self.captures + 1})" if label in self.labels else label

    def _version(self, batch: tuple[Any, ...], named: dict[str, Any]) -> str:
        """What else a program depends on that may differ between ranks: strides, train or eval mode, and the rules."""
        modes = "".join("01"[module.training] for module in self._model.modules())
        tensors = batch_tensors(batch, named)
        strides = [f", {name} has strides {t.stride()}" for name, t in tensors.items() if not t.is_contiguous()]
        strides += [f", {name} requires a gradient" for name, t in tensors.items() if t.requires_grad]
        first: dict[int, str] = {}
        same = [f", {name} is {first[id(t)]}" for name, t in tensors.items() if first.setdefault(id(t), name) != name]
        training = "" if self._model.training else ", eval mode"
        detail = "" if len(set(modes)) == 1 else f" of some modules ({hashlib.sha256(modes.encode()).hexdigest()[:8]})"
        changed = f", with {self._options}" if self._options else ""
        buffers = self.module_buffers.layout
        other = f", with buffers of other shapes ({buffers})" if buffers != self.module_buffers.first else ""
        return "".join(strides) + "".join(same) + training + detail + changed + other

    def _make_room(self, label: str) -> None:
        """Drops the program that rank 0 has not used for the longest time, if `Policy.programs` are kept already."""
        if len(self._cached) < self.plan.policy.programs:
            return
        # Ranks whose calls failed in between may have used programs in another order, but they have the same programs.
        evicted = self._drop(from_first(next(iter(self._cached)), self.maker.ranks))
        self._evicted += 1
        if self.mesh.rank == 0:
            log.warning("%s", full(self.plan.policy.programs, label, evicted.label, self.labels, self._evicted))

    def _drop(self, number: int) -> Compiled:
        dropped = self._cached.pop(number)
        for key, variants in list(self._variants.items()):
            self._variants[key] = [compiled for compiled in variants if compiled is not dropped]
            if not self._variants[key]:
                del self._variants[key]
        return dropped


def _restored(name: str, tensor: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """The closed-over tensor, filled with its values from a checkpoint."""
    if (tensor.shape, tensor.dtype) != (saved.shape, saved.dtype):
        raise ValueError(
            f"{name} is {tensor.dtype}{list(tensor.shape)}, and {saved.dtype}{list(saved.shape)} in the checkpoint "
            "that was loaded. Make it as it was saved."
        )
    with torch.no_grad():
        return tensor.copy_(saved)


def _but_floats(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """`Request.key` without the values of Python floats."""
    return key[0], tuple(one[:1] if one[0] is float else one for one in key[1]), *key[2:]
