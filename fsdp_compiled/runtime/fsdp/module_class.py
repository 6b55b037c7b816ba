"""The class of a module that `fully_shard` was called on: its own, with FSDP2's methods and a compiled forward.

    class FSDPBlock(FSDPModule, Block)      isinstance(block, Block) and isinstance(block, FSDPModule) hold

`FSDPModule` is a subclass of `torch.distributed.fsdp.FSDPModule`, so that code which checks for that class finds it.
Methods that change numbers or memory do the same here as in FSDP2, or are refused by name. Methods that only tell FSDP2
how to overlap do nothing: `Policy.prefetch` decides that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle

from fsdp_compiled.capture.batch_objects import check_unchanged, opened
from fsdp_compiled.capture.fake_inputs import cast
from fsdp_compiled.plan.plan import Division
from fsdp_compiled.runtime.fsdp.module_call import ModuleCall, shared_calls
from fsdp_compiled.runtime.fsdp.module_state import ModuleState, lay_out, state_of, states_in, traced, tracing
from fsdp_compiled.runtime.fsdp.parameter_group import ParameterGroup

_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _refusing(what: str, cure: str) -> Callable[..., NoReturn]:
    """A method that raises ``NotImplementedError``."""

    def method(self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{what} is not supported by fsdp_compiled.fully_shard. {cure}")

    method.__name__ = what
    return method


class _OwnGathered:
    """What ``torch.distributed.fsdp.register_fsdp_forward_method`` asks for, as the Trainer of transformers calls it.

    Its methods gather the parameters of the module itself around a method, and those that it shares with modules
    inside. These, which ``generate`` calls, for example, gather their own. Backward through what a method computed with
    them is refused (`ParameterGroup.unshard`); our `register_fsdp_forward_method` compiles the method.
    """

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    def _pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        for group in self._groups(module):
            group.unshard()
        return args, kwargs

    def _post_forward(self, module: Any, args: Any, output: Any) -> Any:
        for group in self._groups(module):
            group.reshard()
        return output

    def _groups(self, module: nn.Module) -> list[ParameterGroup]:
        inside = dict.fromkeys(state.group for state in states_in(module))
        return [group for group in inside if group is self._group or group.is_tied_outside]

    def __getattr__(self, name: str) -> NoReturn:
        raise NotImplementedError(
            f"FSDP2's own state ({name}) is not there on modules that fsdp_compiled.fully_shard sharded. Take the "
            "function that asks for it from fsdp_compiled, as fully_shard."
        )


class FSDPModule(TorchFSDPModule):
    """The class that `fully_shard` adds to a module's own class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the original class: ``model[1:]`` is a plain container, as under FSDP2."""
        own = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        return own(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Registers whole parameters with the module, in ``mp_policy.param_dtype``. Not recursive. Collective."""
        _state(self).group.unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Registers the sharded parameters with the module again. Not recursive."""
        _state(self).group.reshard()

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """Gathers all parameters once for many calls: ``with model.gathered(): model.generate(...)``.

        Inside, without gradients, the model, its parts and methods run their own code, not compiled and with no
        communication, so that ranks may make other calls. Writes to parameters are refused at its end, and so is a call
        after the optimizer's step. Each rank holds the whole model meanwhile. Collective at its beginning. FSDP2 has
        nothing of the kind but `unshard`, module by module.
        """
        name = type(self).__name__
        states = states_in(self)
        groups = list(dict.fromkeys(state.group for state in states))
        calls = shared_calls(groups[0].mesh)
        with calls.refusing():
            if any(state.gathered is not None for state in states):
                raise RuntimeError(f"gathered() was called on this {name}, or a part of it, inside of gathered().")
            before = [group.version for group in groups]
            for group in groups:
                group.reshard()
                group.follow()
                if any(flat.tensor.is_meta for flat in group.flats):
                    raise ValueError(
                        f"Parameters of this {name} are on the meta device: call to_empty before gathered()."
                    )
            if [group.version for group in groups] != before:
                lay_out(self)
        failed = True
        try:
            with calls.meeting(f"gathered {name}"):
                for group in groups:
                    group.unshard()
            now = [flat.written for group in groups for flat in group.flats]
            for state in states:
                state.gathered = lambda: _check_gathered(name, groups, now)
            with torch.no_grad():
                yield self
            failed = False
        finally:
            with suppress(RuntimeError) if failed else calls.refusing():
                _release_gathered(states, groups)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. If not, each rank adds up its own until a backward that does."""
        for state in _states(self, recurse):
            state.group.synchronise = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over replicas. If not, each replica adds up its reduced gradients until a
        backward that does."""
        for state in _states(self, recurse):
            state.group.all_reduces = bool(requires_all_reduce) or state.group.mesh.replicate == 1

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed after forward, and gathered again for backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for state in _states(self, recurse):
            state.group.reshard_after_forward = reshard_after_forward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing: each backward waits for its own reductions."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Nothing: parameters are sharded after backward. To keep them in between, gather once with `unshard`."""

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Nothing: ``Policy(prefetch=...)`` says how many units ahead gathers start."""

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Nothing: ``Policy(prefetch=...)`` says how many units ahead gathers start."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing: backward gathers what it reads."""

    def set_post_optim_event(self, event: Any) -> None:
        """Nothing: programs run on the current stream, after what was put there."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Nothing: ``Policy(prefetch=...)`` says how many reductions are on the wire."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Nothing: gathers and reductions share a process group."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Nothing: buffers come from PyTorch's allocator."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Nothing: buffers come from PyTorch's allocator."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets the number that the sum of this module's gradients over the ranks is divided by, instead of the number
        of ranks."""
        _divide(_state(self).group, replace(_state(self).group.division, factor=float(factor)))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The same, by its old name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether this module's gradients are summed in the reduction and divided afterwards."""
        _divide(_state(self).group, replace(_state(self).group.division, sums=bool(enable)))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether a parameter that a forward has gathered, and backward does not reach, gets a gradient of zeros, which
        counts in the mean over ranks. Then the batches of different ranks may reach different parameters of a module.
        If not, such batches raise `RankError` on all ranks."""
        for state in _states(self, recurse):
            state.group.pads = bool(reduce_scatter_unused_params)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], Any], *, stream: Any = None) -> None:
        """Sets a function that each backward calls with this module's reduced gradient, flat, in the reduction dtype.

        It may write to the gradient, for example to reduce it over other jobs too, as fault-tolerant replicas do. With
        replicas in the mesh it is called after their all-reduction. It is called on the current stream after the
        backward program, where FSDP2 calls it on ``stream`` as each module's reduction ends. Set it before forward.
        """
        group = _state(self).group
        if stream is not None and group.mesh.replicate > 1:
            raise ValueError("stream cannot be set when using native HSDP")
        if group.extended:
            kind = type(group.extended[0].local).__name__
            raise NotImplementedError(
                f"A hook is called with a module's flat gradient, and a {kind} of {type(self).__name__} is reduced by "
                "itself. Shard the modules with such weights apart, and set the hook on the others."
            )
        group.all_reduce_hook = hook

    def reset_iter_state(self) -> None:
        """Drops gradients that were held back. A forward that failed leaves no other state."""
        for state in states_in(self):
            for flat in state.group.flats:
                flat.drop()
            for one in state.group.extended:
                one.drop()

    set_custom_all_gather = _refusing("set_custom_all_gather", "Leave it out: programs make their own collectives.")
    set_custom_reduce_scatter = _refusing(
        "set_custom_reduce_scatter", "Leave it out: programs make their own collectives."
    )

    def _get_fsdp_state(self) -> Any:
        return _OwnGathered(_state(self).group)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``to_empty``, ``half`` and similar methods, on sharded parameters."""
        group = _state(self).group
        group.reshard()
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        group.follow()
        lay_out(self)
        return result


def _check_gathered(name: str, groups: list[ParameterGroup], before: list[tuple[int, ...]]) -> None:
    """Raises ``RuntimeError`` for a call with gradients, or after parameters were resharded, moved or written."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} was called with gradients inside of gathered(), where nothing is trained. Train outside of it."
        )
    if any(not group.unsharded for group in groups if group.flats):
        raise RuntimeError(f"Parameters of {name} were resharded or moved inside of gathered(). Do so outside of it.")
    if [flat.written for group in groups for flat in group.flats] != before:
        raise RuntimeError(
            f"Parameters of {name} were written since they were gathered, as optimizer.step() does: this call would "
            "compute with the old ones. End the block before, and begin another after it."
        )


def _release_gathered(states: list[ModuleState], groups: list[ParameterGroup]) -> None:
    for state in states:
        state.gathered = None
    errors: list[RuntimeError] = []
    for group in groups:
        try:
            group.reshard()
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _divide(group: ParameterGroup, division: Division) -> None:
    """Sets how gradients are divided. Raises ``ValueError`` for a factor that is not a positive number, and
    ``NotImplementedError`` where FSDP2 divides twice."""
    factor, mesh = division.factor, group.mesh
    if factor is not None and not 0 < factor < float("inf"):
        raise ValueError(f"The factor to divide gradients by is {factor}; expected a positive number.")
    if factor is not None and mesh.shard == 1 and (mesh.replicate > 1 or division.sums):
        raise NotImplementedError(
            "set_gradient_divide_factor is not supported by fsdp_compiled.fully_shard on replicas that are not "
            "sharded, nor beside set_force_sum_reduction_for_comms on one rank. Multiply the loss by what is wanted."
        )
    group.division = division


def _deepcopy(self: Any, _memo: Any) -> NoReturn:
    raise TypeError(
        f"A {type(self).__name__} cannot be copied: it is sharded over ranks. Build the model again, call fully_shard "
        "on it, and load the state_dict of the first; for an average of weights, lerp_ its parameters with these."
    )


def _state(module: Any) -> ModuleState:
    state = state_of(module)
    assert state is not None
    return state


def _states(module: Any, recurse: bool) -> list[ModuleState]:
    return states_in(module) if recurse else [_state(module)]


def _compiled(name: str, function: Callable[..., Any], kind: type | None = None) -> Callable[..., Any]:
    """A method that runs this function of the model as a program or, in a trace, as a part of one.

    Inputs and outputs are cast as ``mp_policy`` says, as FSDP2's hooks do at every module.
    """

    @functools.wraps(function)
    def method(self: Any, *args: Any, **named: Any) -> Any:
        if not tracing():
            if (check := _state(self).gathered) is not None:
                check()
                with traced():
                    return method(self, *args, **named)
            return _call(self, name, function)(args, named)
        inputs, output = self._fsdp_compiled_casts
        if inputs is not None:
            args, named = cast(args, inputs), cast(named, inputs)
        result = (function if kind is None else getattr(kind, name))(self, *args, **named)  # as the class has it now
        return result if output is None else cast(result, output)

    return method


def _gathered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs this function of the model as it is, without gradients and with all parameters gathered."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **named: Any) -> Any:
        if (check := _state(self).gathered) is not None:
            check()
            with traced():
                return function(self, *args, **named)
        return function(self, *args, **named) if tracing() else _call(self, name, function).eagerly(args, named)

    return method


def _call(module: Any, name: str, function: Callable[..., Any]) -> ModuleCall:
    calls = _state(module).calls
    if name not in calls:
        calls[name] = ModuleCall(module, _calling(name))
    return calls[name]


def _calling(name: str) -> Callable[..., Any]:
    def call(model: Any, *args: Any, **named: Any) -> Any:
        made: list[tuple[Any, list[Any]]] = []
        args, named = opened(args, made), opened(named, made)
        result = getattr(model, name)(*args, **named)
        check_unchanged(made)
        return result

    call.method = name  # type: ignore[attr-defined]  # whose arguments are checked
    return call


def give_class(module: nn.Module, state: ModuleState) -> None:
    """Makes the module an `FSDPModule`, and still one of its own class."""
    kind = type(module)
    if kind not in _classes:
        members = {
            "forward": _compiled("forward", kind.forward, kind),
            "__deepcopy__": _deepcopy,
            "__module__": kind.__module__,
        }
        _classes[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), members)
    precision = state.group.precision
    inputs = precision.param_dtype if precision.cast_forward_inputs else None
    object.__setattr__(module, "_fsdp_compiled", state)
    object.__setattr__(module, "_fsdp_compiled_casts", (inputs, precision.output_dtype))
    module.__class__ = _classes[kind]
    if (own := vars(module).get("forward")) is not None:  # a method set on the instance, as TRL does
        object.__setattr__(module, "forward", _compiled("forward", own.__func__).__get__(module, type(module)))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of the module a program of its own, as ``forward`` is: its parameters are gathered for it.

    A module that `fully_shard` was not called on is left as it is. ``generate`` of transformers and peft cannot be one
    program: it runs as it is, with all parameters gathered once. Raises ``ValueError`` if the module has no such
    method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(type(module), method_name, None)
    if original is None or not inspect.isfunction(original):
        raise ValueError(
            f"{type(module).__name__}.{method_name} is not a method of the class, so it cannot be compiled: define it "
            "in the class."
        )
    wrapped = _gathered if method_name == "generate" and _is_of_transformers(original) else _compiled
    method = wrapped(method_name, original)
    object.__setattr__(module, method_name, method.__get__(module, type(module)))


def _is_of_transformers(function: Callable[..., Any]) -> bool:
    return inspect.unwrap(function).__module__.partition(".")[0] in ("transformers", "peft")


__all__ = ["FSDPModule", "give_class", "register_fsdp_forward_method"]
