"""Model + loss + batch -> Program: the joint forward-and-backward ATen graph of a pure objective.

    objective(tensors, args, kwargs) = loss(model that holds these tensors, args, kwargs)

`torch.compile` traces the whole objective on fake tensors, so a capture needs no memory for the weights. The program is
AOTAutograd's joint graph, taken before any partitioner. Of loss and ``aux`` only the loss is differentiated (``aux`` is
detached), and its tangent becomes the constant 1.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compiled.capture import object_identity
from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.batch_objects import contents, left
from fsdp_compiled.capture.blocks.repeated_calls import Repeats
from fsdp_compiled.capture.captured import (
    CURE,
    Capture,
    Objective,
    Tensors,
    apart,
    apart_from_others,
    batch_tensors,
    find_loss,
    is_pair,
    own,
)
from fsdp_compiled.capture.dynamo_run import Trace, closed, output_ports
from fsdp_compiled.capture.global_modes import GlobalModes
from fsdp_compiled.capture.guards import Recorder
from fsdp_compiled.capture.looked_up_names import failed_lookups
from fsdp_compiled.capture.mended_layers import recurrent_layers_mended, use_masks
from fsdp_compiled.capture.model_collectives import name_axes, trace_differentiable
from fsdp_compiled.capture.model_tensors import check_parameters, in_place, is_wrapped, places_of, put_back
from fsdp_compiled.capture.python_answers import Answers, noted
from fsdp_compiled.capture.refusals import refused
from fsdp_compiled.capture.side_effects import (
    SideEffects,
    inside,
    is_made_anew,
    speech,
    tell_batch,
    unread_results,
    unwrapped,
)
from fsdp_compiled.capture.source_lines import explanation, reason, user_line
from fsdp_compiled.capture.tensor_parallel import Parts, layout_of, layouts, loss_parallel, whole
from fsdp_compiled.ir.program import LOSS, Port
from fsdp_compiled.torch_private.dynamo import (
    BackendCompilerFailed,
    TorchDynamoException,
    Unsupported,
    UserError,
    config,
)
from fsdp_compiled.torch_private.names import uses

log = logging.getLogger("fsdp_compiled")
LOUD = ("torch._subclasses.fake_tensor", "torch._dynamo.metrics_context")  # of PyTorch's loggers
OUTPUT_CAPTURING = "transformers.utils.output_capturing"


def trace_whole(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    tensors: Tensors,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    gradient: bool,
    results: bool = False,
    modes: GlobalModes | None = None,
    parts: Parts | None = None,
    groups: dict[str, str] | None = None,
) -> Capture:
    """Traces ``loss(model, *args, **kwargs)``. ``gradient``: whether to differentiate it.

    ``results``: ``loss`` returns any structure, not a loss. The program then differentiates each tensor in it, with its
    derivative as an input (``tangent``), and tensors of the batch that require gradients get them. ``tensors`` and the
    tensors of the batch are fake tensors of one mode; their ``requires_grad`` says which parameters get gradients.
    ``modes``: the modes to trace under, if not the current ones. ``parts``: which tensors are shards of DTensors.
    ``groups``: see `name_axes`. Raises `CaptureError` with the user's line and the cure.
    """
    parts = parts or Parts()
    objective = Objective(inside(model), loss)
    wrapped = any(inside(module) is not module for module in objective.modules())
    scalar = gradient and not results

    def function(named: dict[str, torch.Tensor], args: Any, kwargs: Any, buffers: list[Any]) -> Any:
        args, kwargs = apart(args, kwargs)
        before_call = contents(args, kwargs)
        if parts.mesh is None:
            result = objective(*args, **kwargs)
        else:
            result = torch.func.functional_call(objective, parts.joined(named), args, kwargs, tie_weights=False)
        replaced, carried = {}, []
        for name, table, key, before in buffers:
            if table[key] is not before:
                if table[key].requires_grad:
                    carried.append(name)
                replaced[name] = own(table[key])
                table[key] = before
        changes = left(before_call)
        if results:
            result = result, changes
        touched = carried if results else [before_call[number][0] for number, _, _, _ in changes]
        said = [layout_of(leaf) for leaf in pytree.tree_leaves(result)] if results and parts.mesh is not None else []
        if not gradient:
            return own(apart_from_others(result) if results else result), None, False, replaced, said, touched
        if results:
            return apart_from_others(result), None, False, replaced, said, touched
        pair = is_pair(result, loss)
        value, aux = find_loss(result, loss), result[1] if pair else None
        if isinstance(value, torch.Tensor):
            value = whole(value).clone().detach()  # `Trace.program` differentiates what is detached here
        return value, own(aux), pair, replaced, said, touched

    def trace(symbolic: Collection[str] = ()) -> Trace:
        """One run of Dynamo, with the integers at these sources as symbols. The caller must undo its side effects."""
        if not uses("equal blocks") or any(map(is_wrapped, tensors.plain.values())):
            return walk(symbolic)
        repeats = Repeats(objective.model, answers)
        try:
            with repeats.watched():
                return walk(symbolic, repeats)
        except Exception as error:
            if not (repeats.failed or repeats.wrote):
                raise
            log.info("every block is traced, since equal ones could not be repeated: %s", error)
        return walk(symbolic)

    def walk(symbolic: Collection[str], repeats: Repeats | None = None) -> Trace:
        made = Trace(tensors, batch_tensors(args, kwargs), list(places_of(objective.model)), symbolic)
        # Dynamo keeps its cache and counts recompilations by code object, so each trace gets a new one.
        fresh = types.FunctionType(
            function.__code__.replace(), function.__globals__, "objective", None, function.__closure__
        )
        recorder = Recorder(objective.model, wrapped, taken=not results, failed=failed, answers=answers)
        options = {"guard_filter_fn": recorder.select}
        backend = [made.backend]  # emptied after the trace: Dynamo keeps its backend forever, and this holds the model
        compiled = torch.compile(
            fresh, backend=lambda *given: backend[0](*given), fullgraph=True, dynamic=False, options=options
        )
        places = made.places
        cut = {name for names, _ in parts.placements for name in names}
        named = {name: made.tensors[place.name] for place in places if (name := f"model.{place.name}") in cut}
        buffers = [
            (f"model.{place.name}", place.table, place.key, made.tensors[place.name])
            for place in places
            if place.name in tensors.buffers
        ]
        try:
            with torch.compiler.config.patch(unbacked_sources=",".join(symbolic)), in_place(places, made.tensors):
                value, aux, pair, replaced, said, made.touched = compiled(named, args, dict(kwargs), buffers)
                if any("mkldnn.enabled" in guard.name for guard in recorder.kept):  # `_dynamo` sets it
                    raise CaptureError(
                        "Forward or the loss reads torch.backends.mkldnn.enabled, which is False while a model is "
                        "traced.\n  Cure: read it outside, and pass a flag."
                    )
                made.complete()
                if repeats is not None:
                    repeats.tell(recorder)
                    repeats.check_guards(recorder.kept)
                check_parameters(places, made.tensors)
                made.side_effects = SideEffects(made.mutations, made.closed, {id(result) for result in made.results})
            scope = dict(zip(fresh.__code__.co_freevars, (cell.cell_contents for cell in fresh.__closure__ or ())))
            recorder.code = made.code
            made.guards = recorder.guards(fresh.__code__, scope, made.sources)
            made.flat, made.spec = pytree.tree_flatten((value, aux) if gradient and pair else value)
            made.check_numbers()
            made.layouts = layouts(said, parts.mesh)
            before = {name: tensor for name, _, _, tensor in buffers}
            made.outputs = output_ports(made, value, before, replaced, scalar, results)
        except BaseException:
            made.undo()
            raise
        finally:
            backend.clear()
        if scalar and LOSS not in made.outputs.values():
            made.undo()
            raise CaptureError(f"The loss returned a {type(value).__name__} in the place of a scalar. {CURE}")
        return made

    asked: set[str] = set()
    failed: set[str] = set()
    answers = Answers(objective.cached)
    around = modes.entered() if modes is not None else contextlib.nullcontext()
    classes = loss_parallel() if parts.mesh is not None else contextlib.nullcontext()
    with (
        _explained(model, parts.hint),
        around,
        classes,
        torch.set_grad_enabled(gradient),
        _dynamo(asked),
        failed_lookups(failed),
        noted(answers),
        unwrapped(objective),
        put_back(objective.model),  # runs after all undoing, which only knows the trace's fake tensors
    ):
        try:
            made = trace()
        except Exception as error:
            if not _put_hooks(objective.model, error):
                raise
            made = trace()
        try:
            if not made.outputs:
                raise CaptureError(f"{type(model).__name__} returned no tensor. {CURE}")
            if made.side_effects.doubtful:
                _check_next(made, trace)
        finally:
            made.undo()
        tables = made.tables() if made.side_effects.rest else {}
        if results:  # a loop of the user's goes on with what it finds
            if lost := [one.name for one in made.side_effects.lost(tables) if not is_made_anew(one, made.code)]:
                raise CaptureError(unread_results(lost))
        if made.side_effects.rest:
            made.side_effects.tell(model, tables)
        if made.touched and not results:
            tell_batch(model, made.touched)
        program = made.program()
        made.guards.closed.numbers = made.numbers(made.guards.scope)
        name_axes(program, parts.mesh, groups)
    leaves = tuple(made.outputs.get(id(leaf)) or closed(leaf, made) for leaf in made.flat)
    made.results.clear()  # the guards keep Dynamo's code, which holds the function that returned these
    lain = {leaf: one for leaf, one in zip(leaves, made.layouts) if one is not None and isinstance(leaf, Port)}
    carried = {name.removeprefix("model.") for name in made.touched} if results else set()
    carried |= {name for name, new in made.side_effects.state.items() if new.requires_grad}
    return Capture(
        program, made.constants, made.spec, leaves, made.guards, lain, frozenset(asked), frozenset(carried),
        frozenset(made.replaced),
    )  # fmt: skip


def _check_next(made: Trace, trace: Callable[[Collection[str]], Trace]) -> None:
    """Raises `CaptureError` if the next call, which starts from the side effects of this one, would compute something
    else."""
    left = made.side_effects
    made.mutations.go_far()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute")  # Dynamo reads it on the first trace's tensors
            again = trace(left.symbolic)
    except (Unsupported, UserError, TorchDynamoException, RuntimeError, ValueError) as error:
        raise CaptureError(f"{left.refusal()}\n{user_line(error)}\n  Why: {reason(error)}") from error
    again.undo()
    if not again.meaning_after(made).same(made.meaning):
        raise CaptureError(left.refusal())
    left.check(again.closed, again.side_effects.entries, made.tables())


def _put_hooks(model: nn.Module, error: Exception) -> bool:
    """Installs hooks by which models of transformers collect some outputs of their layers (``output_router_logits``,
    ``output_hidden_states``), if the trace failed where they would be installed; returns whether it installed any.

    transformers (5.0 and later) installs them on the first call that wants such outputs, under a lock that Dynamo
    cannot trace.
    """
    transformers = sys.modules.get(OUTPUT_CAPTURING)
    if transformers is None or "_hook_installation_lock" not in str(error):
        return False
    found = [one for one in model.modules() if getattr(one, "_can_record_outputs", None)]
    found = [one for one in found if not getattr(one, "_output_capturing_hooks_installed", False)]
    for one in found:
        transformers.maybe_install_capturing_hooks(one)
    return bool(found)


@contextlib.contextmanager
def _dynamo(asked: set[str]) -> Iterator[None]:
    """Inside, Dynamo has the settings that a capture needs.

    Dynamo traces nn.LSTM and similar modules, which it skips by default, and `torch.autograd.grad` inside the loss. The
    fused CPU operator for nn.LSTM is off, since it cannot be traced with its gradient. If the user's stance or setting
    turns `torch.compile` off, it does not apply here. Two loggers are silent: one writes twenty lines on an operator
    that fails on fake tensors, which the error that follows says too; the other complains in 2.11 that it cannot
    serialize the functions in ``ignore_logging_functions`` for its statistics.
    """
    onednn: Any = torch.backends.mkldnn
    trace_differentiable()
    use_masks()
    before, onednn.enabled = onednn.enabled, False
    loud = [logging.getLogger(name) for name in LOUD]
    disabled = [logger.disabled for logger in loud]
    for logger in loud:
        logger.disabled = logger.disabled or not logger.isEnabledFor(logging.INFO)
    wanted = {"allow_rnn": True, "trace_autograd_ops": True, "ignore_logging_functions": speech(), "disable": False}
    wanted["skip_nnmodule_hook_guards"] = False
    wanted["run_gc_after_compile"] = False  # up to a tenth of a small capture; garbage is collected in its own time
    wanted["use_lamba_guard_for_object_aliasing"] = False  # in C++: Python's guard is slow for a config in 96 layers
    # An unchanged dictionary does not prove that another one still holds the same tensor; torch 2.11 assumed it did.
    wanted["skip_tensor_guards_with_matching_dict_tags"] = wanted["use_recursive_dict_tags_for_guards"] = False
    try:
        with (
            torch.compiler.set_stance("default"),
            config.patch(wanted),
            recurrent_layers_mended(),
            refused(asked),
            object_identity.asked_again(),
            object_identity.asked_of_lists(),
        ):
            yield
    finally:
        onednn.enabled = before
        for logger, off in zip(loud, disabled, strict=True):
            logger.disabled = off


@contextlib.contextmanager
def _explained(model: nn.Module, hint: str = "") -> Iterator[None]:
    """Turns what Dynamo raises into one `CaptureError` with the user's line, the cure, and the hint."""
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, CaptureError):
            raise error.inner_exception from None
        raise
    except (TorchDynamoException, RuntimeError, AssertionError, TypeError, AttributeError, ArithmeticError) as error:
        raise CaptureError(explanation(type(model).__name__, error) + hint) from error
