"""A call of a module that was sharded with `fully_shard`: its forward is one program, and backward another.

    loss = loss_fn(model(tokens), targets)     forward: gathers and compute; keeps what backward reads
    loss.backward()                            backward: gathers, compute and reductions; leaves ``parameter.grad``

The module that is called is the root: all that was sharded inside it is gathered and reduced by these two programs. The
first call of each kind captures and compiles, on all ranks together.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.ambient import outside_modes, untraced
from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.mesh import Mesh, RankError
from fsdp_compiled.ir.program import Port
from fsdp_compiled.lower.halves import whole_gradients
from fsdp_compiled.lower.lowering import Runner, below_autograd
from fsdp_compiled.plan.hardware import machine_of
from fsdp_compiled.plan.plan import Plan, Slot, Unit
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.autograd_hooks import check_inner_hooks
from fsdp_compiled.runtime.compile import Compiled
from fsdp_compiled.runtime.gradients import Held, leave, parts, reduced
from fsdp_compiled.runtime.module_state import ModuleState, state_of, traced
from fsdp_compiled.runtime.parameter_group import Entry, ParameterGroup
from fsdp_compiled.runtime.program_cache import Programs, Request
from fsdp_compiled.runtime.taken_model import holding, ordinary

# Eager kernels, as FSDP2 runs them, bit for bit, unless the user asks for more.
DEFAULT = Policy(lower="eager", cuda_graph=False)
# What a program depends on by its value; other leaves of a batch are objects that it cannot take.
PLAIN = bool | int | float | complex | str | torch.dtype | torch.device | None
log = logging.getLogger("fsdp_compiled")
_calls: list[tuple[weakref.ref[Any], Calls]] = []


def shared_calls(mesh: Mesh) -> Calls:
    """The calls of this process: one row of them for all modules, since ranks must make all in the same order."""
    world = dist.group.WORLD
    for known, calls in _calls:
        if known() is world:
            return calls
    _calls.clear()
    _calls.append((weakref.ref(world), Calls(mesh)))
    return _calls[0][1]


class UsersGenerator:
    """Random operators draw from PyTorch's default generator, as eager PyTorch's do."""

    @staticmethod
    def bound(operator: Callable[..., Any], shared: bool = False) -> Callable[..., Any]:
        return operator


class Opened:
    """The model as it is traced: with ordinary parameters on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextmanager
    def open(self) -> Iterator[nn.Module]:
        sharded = {id(one): ordinary(one) for one in self.model.parameters() if isinstance(one, DTensor)}
        with traced(), holding(self.model, sharded):
            yield self.model


@dataclass
class Lent:
    """What programs read besides shards and the batch; the same objects as long as the programs live."""

    shards: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    plain: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # that programs write


class ModuleCall:
    """What runs one method of one module."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module = module
        self._function = function  # called with the model, in the trace
        self._tables: list[Any] = []
        self._before: list[Any] = []
        self._held = Held()
        self._groups: list[ParameterGroup] = []
        self._signature: tuple[Any, ...] = ()
        self._said = False  # that further kinds of inputs run eagerly

    @untraced
    def __call__(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self._groups:
            self._begin()
        self._calls.check_open()
        with self._refusing():
            self._follow()
            args, named = self._moved(args, named)
            leaves = [leaf for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
            given = [leaf for leaf in leaves if leaf.requires_grad]
            gradient = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            trains = gradient and bool(self._trained or given)
            request = None
            if trains or not _holds_objects(args, named):
                request = self._programs.find("training" if trains else "forward", args, named)
                for name, tensor in request.buffers.items():
                    self._lent.buffers.pop(name, None) if tensor is None else self._lent.buffers.update({name: tensor})
        if request is None or (not trains and self._is_one_more(request)):
            return self._eagerly(args, named)
        with outside_modes(watched=True):
            compiled = self._programs.get(request, self._lent.buffers)
            self._programs.read_closed(compiled, request, self._lent)
            inputs = compiled.input_binding.inputs(request.leaves, self._lent, lambda: self._holders(compiled))
            if not trains:
                with torch.no_grad():
                    outputs = self._run(compiled.runner, inputs)
                return compiled.capture.rebuild(dict(zip(compiled.outputs, outputs, strict=True)))
            token = torch.zeros((), requires_grad=True)
            run = Run(self, compiled, inputs, request.leaves)
            others, run.differentiable = run.differentiable, ()
            outputs = _Run.apply(run, token, *self._trained, *others)
            return compiled.capture.rebuild(dict(zip(run.results, outputs, strict=True)))

    def _is_one_more(self, request: Request) -> bool:
        """Whether this call without gradients runs eagerly, in the place of one more program where there are many, as
        lengths that grow make them."""
        if request.compiled is not None:
            return False
        made = [one for one in self._programs.cached if one.kind == "forward"]
        if len(made) < self._plan.policy.programs // 2:
            return False
        if not self._said and self._mesh.rank == 0:
            log.warning(
                "%s was called without gradients on %d kinds of inputs: on others it runs eagerly, with all of its "
                "parameters gathered. Policy(programs=...) says how many programs are kept.",
                type(self.module).__name__, len(made),
            )  # fmt: skip
        self._said = True
        return True

    def _eagerly(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The model's own code, with all parameters gathered. Collective."""
        self._calls.post(f"eager {type(self.module).__name__}", self._gathers)
        try:
            for group in self._groups:
                group.unshard()
            with traced():
                return self._function(self.module, *args, **named)
        finally:
            self._calls.returned()
            for group in self._groups:
                group.reshard()

    @property
    def programs(self) -> Programs:
        return self._programs

    @property
    def plan(self) -> Plan:
        return self._plan

    # Before a call.

    def _begin(self) -> None:
        states = [state for module in self.module.modules() if (state := state_of(module)) is not None]
        groups = list(dict.fromkeys(state.group for state in states))
        mesh = groups[0].mesh
        self._mesh, self._calls = mesh, shared_calls(mesh)
        with self._refusing():
            self._policy = _policy(states)
            if odd := next((one for one in groups if one.device_mesh != groups[0].device_mesh), None):
                raise ValueError(
                    f"fully_shard was called with different meshes inside one {type(self.module).__name__}: "
                    f"{groups[0].device_mesh} and {odd.device_mesh}. Give all of them the same."
                )
            dtypes = [(one.precision.param_dtype, one.precision.reduce_dtype) for one in groups]
            if len(set(dtypes)) > 1:
                raise ValueError(
                    "fully_shard was called with different mp_policy inside one "
                    f"{type(self.module).__name__}: (param_dtype, reduce_dtype) are {sorted(set(map(str, dtypes)))}. "
                    "Give all of them the same."
                )
            _adopt_optimizers(groups)

    def _follow(self) -> None:
        """Looks for parameters that are others now; programs are for a plan, and that is for these parameters."""
        if self._unchanged():
            return
        states = [state for module in self.module.modules() if (state := state_of(module)) is not None]
        self._states = states
        self._groups = list(dict.fromkeys(state.group for state in states))
        for group in self._groups:
            group.reshard()
            group.follow()
        self._remember()
        check_inner_hooks(self.module)
        signature = self._now()
        if signature != self._signature:
            self._signature = signature
            self._make()
        self._lent.plain.update(self._plain)

    def _unchanged(self) -> bool:
        """Whether tables, parameters and what is trained are as they were at the last call."""
        try:
            same = self._tables == self._before
        except Exception:  # tensors that were exchanged are compared by their values
            same = False
        return (
            same
            and bool(self._groups)
            and all(group.same() and not group.unsharded for group in self._groups)
            and [one.requires_grad for one in self._flags] == self._trainable
            and [(group.version, group.reshard_after_forward) for group in self._groups] == self._versions
        )

    def _remember(self) -> None:
        modules = list(self.module.modules())
        self._tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._before = [dict(table) for table in self._tables]
        entries = [entry for group in self._groups for entry in group.entries]
        known = {id(entry.parameter) for entry in entries}
        self._plain = {
            name: one for name, one in self.module.named_parameters(remove_duplicate=False) if id(one) not in known
        }
        if sharded := [name for name, one in self._plain.items() if isinstance(one, DTensor)]:
            raise ValueError(
                f"{sharded[0]} is a DTensor that fully_shard does not know. Parameters of other kinds of parallelism "
                "are not supported together with it yet: call fully_shard on plain parameters."
            )
        self._flags = [*(entry.parameter for entry in entries), *dict.fromkeys(self._plain.values())]
        self._trainable = [one.requires_grad for one in self._flags]
        self._trained = [one for one in self._flags if one.requires_grad]
        self._versions = [(group.version, group.reshard_after_forward) for group in self._groups]

    def _now(self) -> tuple[Any, ...]:
        """What a plan depends on."""
        first: dict[int, int] = {}
        plain = [
            (name, tuple(one.shape), one.stride(), one.dtype, one.device, first.setdefault(id(one), place))
            for place, (name, one) in enumerate(self._plain.items())
        ]
        return tuple(map(id, self._groups)), tuple(self._versions), tuple(self._trainable), tuple(plain)

    def _make(self) -> None:
        """A plan of these parameters, and programs for it: none yet."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        paths = {id(module): path for path, module in self.module.named_modules()}
        units, self._flats = [], {}
        for number, group in enumerate(self._groups):
            path = next((paths[id(one)] for one in group.modules if id(one) in paths), f"unit {number}") or "root"
            buffers = []
            for index, flat in enumerate(group.flats):
                if flat.tensor.is_meta:
                    raise ValueError(
                        f"The parameters of {path} are on the meta device. Give them memory and values before the "
                        "first call: model.to_empty(device=...), then reset_parameters() or load_state_dict()."
                    )
                key = path if len(group.flats) == 1 else f"{path}#{index}"
                slots = []
                for place, (entry, slot) in enumerate(zip(flat.entries, flat.buffer.slots, strict=True)):
                    own = tuple(names.get(id(entry.parameter), [f"({key}, {place}, outside)"]))
                    leaf = replace(slot.leaf, names=own, block=path, trainable=entry.parameter.requires_grad)
                    slots.append(Slot(leaf, slot.offset))
                trainable = any(slot.leaf.trainable for slot in slots)
                buffers.append(replace(flat.buffer, key=key, unit=path, slots=tuple(slots), trainable=trainable))
                self._flats[key] = flat
            if buffers:
                units.append(Unit(path, tuple(buffers), group.reshard_after_forward is not False))
        mesh, first = self._mesh, self._groups[0]
        precision = MixedPrecisionPolicy(first.precision.param_dtype, first.precision.reduce_dtype,
                                         cast_forward_inputs=False)  # fmt: skip
        policy = replace(self._policy, precision=precision)
        machine = machine_of(mesh.device, mesh.world, policy.bandwidth_gbps)
        self._plan = Plan(tuple(units), policy, mesh.device, mesh.shard, mesh.replicate, machine)
        self._entries = {
            slot.name: entry
            for buffer in self._plan.buffers
            for slot, entry in zip(buffer.slots, self._flats[buffer.key].entries, strict=True)
        }
        self._lent = Lent(
            shards={key: flat.tensor for key, flat in self._flats.items()},
            buffers={
                f"{path}.{name}".lstrip("."): tensor
                for path, module in self.module.named_modules(remove_duplicate=False)
                for name, tensor in module._buffers.items()
                if tensor is not None
            },
            plain=dict(self._plain),
        )
        self._programs = Programs(
            Opened(self.module), self._function, self._plan, mesh, (), self._calls, UsersGenerator(), loop=True,
            plain=self._lent.plain,
        )  # fmt: skip
        self._whole: dict[int, Runner] = {}
        sizes = [(buffer.key, buffer.numel) for buffer in self._plan.buffers]
        self._gathers = hashlib.sha256(repr(sizes).encode()).hexdigest()[:8]

    def _moved(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch on the device, as FSDP2 moves it."""
        device = self._mesh.device
        if device.type == "cpu":
            return args, named
        return pytree.tree_map_only(
            torch.Tensor, lambda one: one if one.device == device else one.to(device), (args, named)
        )

    def _holders(self, compiled: Compiled) -> Mapping[str, Mapping[str, torch.Tensor]]:
        lent = self._lent
        return {"shard": lent.shards, "buffer": lent.buffers, "plain": lent.plain,
                "constant": compiled.constants(lent)}  # fmt: skip

    # A run.

    def _run(self, runner: Runner, inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Both halves run here; a failure is an error on every rank."""
        try:
            with below_autograd():
                return runner(*inputs)
        except BaseException as error:
            if isinstance(error, RankError):
                raise
            if (lost := self._calls.parting(error)) is not None:
                raise RankError(lost) from error
            if isinstance(error, RuntimeError) and (other := self._calls.reason(error)) is not None:
                raise RankError(other) from error
            if self._mesh.world > 1:
                self._calls.abandon(f"It said:\n{type(error).__name__}: {error}")
            raise
        finally:
            self._calls.returned()

    def drop_held(self) -> None:
        """Drops the gradients that were held back."""
        self._held.take()

    def synchronises(self) -> bool:
        """Whether this backward reduces. Raises ``ValueError`` where parts of the model say different things."""
        wanted = {state.synchronise for state in self._states}
        if len(wanted) > 1:
            raise ValueError(
                "set_requires_gradient_sync was called on a part of the model: its modules say different things. Call "
                "it on the model that is called, which tells all of them."
            )
        return wanted.pop()

    def backward(
        self, run: Run, inputs: Sequence[Any], reached: set[str], everything: bool
    ) -> tuple[dict[Entry, DTensor], Mapping[Port, torch.Tensor]]:
        """Gradients of the sharded parameters, none where they are held back, and those of other inputs.

        ``reached``: the parameters that have gradients, by name. ``everything``: whether it is for ``grad``; else they
        go to who asked for them, and nothing is held back.
        """
        compiled = run.compiled
        assert compiled.halves is not None
        with self._refusing():
            run.check_versions()
            synchronises = self.synchronises() or not everything
        program, runner = compiled.halves.backward, compiled.backward
        whole = not synchronises or (everything and bool(self._held.flats))
        label = f"backward of {compiled.label}" + (" without synchronisation" if not synchronises else "")
        if whole and compiled.number not in self._whole:
            self._whole[compiled.number] = self._programs.lower(whole_gradients(program), f"{label}, compiled")
        if whole:
            program, runner = whole_gradients(program), self._whole[compiled.number]
        wire = f"{program.wire}{'+' if whole and synchronises else ''}"
        self._calls.post(label, wire or "none")
        outputs = dict(zip(program.outputs, self._run(runner, inputs), strict=True))
        flats = {port.name: flat for port, flat in outputs.items() if port.kind == "gradient"}
        if whole:
            own = {port.name: flat for port, flat in outputs.items() if port.kind == "whole gradient"}
            self._held.add(own, reached)
            if synchronises:
                held, reached = self._held.take()
                flats = {
                    buffer.key: reduced(held[buffer.key], buffer, run.plan, self._mesh)
                    for buffer in run.plan.buffers
                    if buffer.key in held
                }
        found: dict[Entry, DTensor] = {}
        for key, flat in flats.items():
            for entry, gradient in parts(flat, self._flats[key]).items():
                found[entry] = gradient
        wanted = {self._entries[name] for name in reached if name in self._entries}
        return {
            entry: gradient for entry, gradient in found.items() if entry in wanted and entry.parameter.requires_grad
        }, outputs

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """What this rank refuses is an error on every rank: the others may be on their way into a collective."""
        try:
            yield
        except Exception as error:
            if (lost := self._calls.parting(error)) is not None:
                raise RankError(lost) from error
            self._calls.refuse(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            raise


class Run:
    """One forward, and what its backwards need."""

    def __init__(self, call: ModuleCall, compiled: Compiled, inputs: Sequence[Any], leaves: Sequence[Any]) -> None:
        self.call, self.compiled, self.inputs, self.plan = call, compiled, inputs, call.plan
        assert compiled.halves is not None
        halves = compiled.halves
        places = {port: place for place, port in enumerate(compiled.inputs)}
        self.results = [port for port in compiled.outputs if port.kind == "result"]
        self.tangents = [port.key for port in halves.backward.inputs if port.kind == "tangent"]
        # Of each thing saved: where it stands among inputs and outputs together.
        self.sources = [
            len(places) + compiled.outputs.index(port) if port.side == "out" else places[port] for port in halves.saved
        ]
        self.late = [port for port in halves.backward.outputs if port.kind == "input gradient"]
        by_name = {port.name: inputs[place] for port, place in places.items() if port.kind in ("batch", "plain")}
        known = {id(parameter) for parameter in call._trained}
        self.names = [port.name for port in self.late if id(by_name[port.name]) not in known]
        self.differentiable: Sequence[torch.Tensor] = [by_name[name] for name in self.names]
        self.shards = {key: (call._flats[key], call._flats[key].written) for key in halves.read}

    def check_versions(self) -> None:
        """Raises ``RuntimeError`` where weights were written since forward, as autograd does."""
        for name, (flat, written) in self.shards.items():
            if flat.written != written or self.call._flats.get(name) is not flat:
                raise RuntimeError(
                    f"A parameter of {name} was modified by an inplace operation between this forward and its "
                    "backward, which needs the old value. Call backward before optimizer.step(), or run forward again."
                )


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, token: torch.Tensor, *given: torch.Tensor) -> Any:
        outputs = run.call._run(run.compiled.runner, run.inputs)
        everything = [*run.inputs, *outputs]
        kept = [everything[source] for source in run.sources]
        ctx.place = [index for index, value in enumerate(kept) if isinstance(value, torch.Tensor)]
        shards = {port.name for port in run.compiled.inputs if port.kind == "shard"}
        own = {id(run.call._lent.shards[name]) for name in shards}
        ctx.save_for_backward(*(value for value in kept if isinstance(value, torch.Tensor) and id(value) not in own))
        ctx.others = [value if not isinstance(value, torch.Tensor) or id(value) in own else None for value in kept]
        run.inputs = ()
        ctx.run = run
        ctx.set_materialize_grads(False)
        results = tuple(outputs[: len(run.results)])
        ctx.shapes = {port.key: result.shape for port, result in zip(run.results, results, strict=True)}
        names = set(run.tangents)
        ctx.mark_non_differentiable(
            *(result for port, result in zip(run.results, results, strict=True) if port.key not in names)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        run: Run = ctx.run
        call = run.call
        if torch.is_grad_enabled():
            with call._refusing():
                raise RuntimeError(
                    f"backward(create_graph=True) through {type(call.module).__name__}, which fully_shard compiled: "
                    "there is no derivative of its backward program. Take the gradient inside of forward, where "
                    "torch.autograd.grad is traced with the model; or use compile_sharded with that loss."
                )
        saved = iter(ctx.saved_tensors)
        kept = [value if value is not None else next(saved) for value in ctx.others]
        by_name = {port.key: tangent for port, tangent in zip(run.results, tangents, strict=True)}
        assert run.compiled.halves is not None
        inputs = run.compiled.halves.backward.inputs
        traced = {port.key: node.meta["val"] for port, node in inputs.items() if port.kind == "tangent"}
        differentiated = {name for name, tangent in by_name.items() if tangent is not None}
        reached = {name for name, results in run.compiled.reached.items() if results & differentiated}
        kept += [_laid_out(by_name[name], traced[name], ctx.shapes[name]) for name in run.tangents]
        # A plain backward() reaches the token. One that asks for some gradients alone, as torch.autograd.grad does, is
        # answered by autograd, and so are hooks.
        everything = torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        with outside_modes(watched=True):
            found, outputs = call.backward(run, kept, reached, everything)
        direct = {
            entry: gradient
            for entry, gradient in found.items()
            if everything and not (entry.parameter._backward_hooks or entry.parameter._post_accumulate_grad_hooks)
        }
        leave(direct)
        rest = {id(entry.parameter): gradient for entry, gradient in found.items() if entry not in direct}
        late = {
            port.name: gradient
            for port, gradient in outputs.items()
            if port.kind == "input gradient" and port.name in reached
        }
        plain = {id(call._plain[name]): gradient for name, gradient in late.items() if name in call._plain}
        own = [rest.get(id(parameter), plain.get(id(parameter))) for parameter in call._trained]
        return (None, None, *own, *(late.get(name) for name in run.names))


def _laid_out(tangent: torch.Tensor | None, traced: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The derivative with the strides that backward was traced for; zeros where there is none."""
    if tangent is None:
        return torch.zeros(tuple(sizes), dtype=traced.dtype, device=traced.device)
    if tangent.stride() == traced.stride() and not tangent.is_neg() and not tangent.is_conj():
        return tangent
    made = torch.empty_strided(tangent.shape, traced.stride(), dtype=tangent.dtype, device=tangent.device)
    return made.copy_(tangent)


def _holds_objects(args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether there is something among the inputs that a program cannot take, as a cache."""
    return any(not isinstance(leaf, torch.Tensor | PLAIN) for leaf in pytree.tree_leaves((args, named)))


def _policy(states: Sequence[ModuleState]) -> Policy:
    given = list(dict.fromkeys(state.policy for state in states if state.policy is not None))
    if len(given) > 1:
        raise ValueError("fully_shard was given different policies inside one model. Give one, to the root's call.")
    return given[0] if given else DEFAULT


def _adopt_optimizers(groups: Sequence[ParameterGroup]) -> None:
    """An optimizer that was made before `fully_shard` holds the plain parameters: it gets those that took their places.

    Raises ``ValueError`` for one that holds state of theirs, which would be of other shapes.
    """
    new = {id(old): made for group in groups for ref, made in group.replaced if (old := ref()) is not None}
    for group in groups:
        group.replaced.clear()
    if not new:
        return
    for optimizer in [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]:
        for group_of in optimizer.param_groups:
            if not any(id(one) in new for one in group_of["params"]):
                continue
            if any(optimizer.state.get(one) for one in group_of["params"] if id(one) in new):
                raise ValueError(
                    f"{type(optimizer).__name__} has state of parameters that fully_shard has sharded since. Make the "
                    "optimizer after fully_shard, and load its state then: "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
                )
            group_of["params"] = [new.get(id(one), one) for one in group_of["params"]]
