"""A call ends in the exception that the user's code raises, as in eager PyTorch: ``except Stop`` catches it.

If the code raises while it is traced, Dynamo raises an error of its own, and may not even be able to construct the
exception. So if a trace ends at a ``raise`` or an ``assert`` of the user's, or where Dynamo saw Python raise (a key
that is missing, ``1 / 0``), Python itself runs the same call once more, on the fake tensors of the trace. If this run
raises at that line, the call raises the user's exception. Its changes to Python objects stay, as in eager PyTorch.

The trace's refusal is raised instead if a fake tensor would be left anywhere, also in the exception, or if eager
PyTorch would have written to a tensor or drawn random numbers before it raised.
"""

from __future__ import annotations

import ast
import gc
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.capture.captured import Objective, Tensors, batch_tensors
from fsdp_compiled.capture.dynamo_run import Trace
from fsdp_compiled.capture.global_modes import GlobalModes
from fsdp_compiled.capture.model_tensors import in_place, places_of, put_back
from fsdp_compiled.capture.side_effects import inside, unwrapped
from fsdp_compiled.capture.source_lines import is_users


def own_exception(
    refusal: BaseException,
    model: nn.Module,
    loss: Callable[..., Any] | None,
    tensors: Tensors,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    gradient: bool,
    modes: GlobalModes | None = None,
) -> Exception | None:
    """The user's exception to raise after `dynamo.trace_whole` ended in ``refusal``; None if the refusal stands."""
    seen = _seen(refusal)
    lines = {line for frame in _frames(refusal.__cause__) if (line := _statement(*frame, seen))}
    batch = batch_tensors(args, kwargs)
    fakes = [one for group in (tensors.parameters, tensors.plain, tensors.buffers, batch) for one in group.values()]
    if not lines:
        return None
    objective = Objective(inside(model), loss)
    outer = sys.exc_info()[1]  # what the caller of the model is about to handle
    known, held = _alive(), [(one._version, sys.getrefcount(one)) for one in fakes]
    with ExitStack() as stack:
        for around in (put_back(objective.model), unwrapped(objective), torch.set_grad_enabled(gradient)):
            stack.enter_context(around)
        trace = Trace(tensors, batch, list(places_of(objective.model)))
        if modes is not None:
            stack.enter_context(modes.entered())
        for mode in [one.fake_mode for one in fakes if isinstance(one, FakeTensor)][:1]:
            stack.enter_context(mode)
        draws = stack.enter_context(_Draws())
        stack.enter_context(in_place(trace.places, trace.tensors))
        try:
            objective(*args, **kwargs)
            return None
        except Exception as error:
            raised = error
        replaced = any(place.table.get(place.key) is not trace.tensors[place.name] for place in trace.places)
    del trace
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(raised.__traceback__)]
    # Python may raise below the user's line, as `nn.Module.__getattr__` does.
    place = next(filter(lambda place: is_users(place[0]), reversed(places)), places[-1]) if seen else places[-1]
    raises = _statement(*place, "") is not None or type(raised).__name__ in seen
    if _statement(*place, seen) not in lines or not raises:
        return None
    for one in _chain(raised, outer):
        traceback.clear_frames(one.__traceback__)
    gc.collect()
    if replaced or draws.seen or held != [(one._version, sys.getrefcount(one)) for one in fakes]:
        return None
    return None if _alive().keys() - known else raised


class _Draws(TorchDispatchMode):
    """Whether operators drew random numbers."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _alive() -> dict[int, FakeTensor]:
    """All living fake tensors, by identity. They stay alive in the result, so no other object gets their identity."""
    return {id(one): one for one in gc.get_objects() if issubclass(type(one), FakeTensor)}


def _chain(error: BaseException | None, end: BaseException | None) -> Iterator[BaseException]:
    """The error, and all errors in its chain of causes and contexts, up to ``end``."""
    if error is not None and error is not end:
        yield error
        yield from _chain(error.__cause__, end)
        yield from _chain(error.__context__ if error.__context__ is not error.__cause__ else None, end)


def _frames(error: BaseException | None) -> Iterator[tuple[str, int]]:
    """The file and line of each call of the traced code that Dynamo was in."""
    if error is not None:
        yield from ((frame.filename, frame.lineno or 0) for frame in getattr(error, "real_stack", None) or ())
        yield from ((file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', str(error)))


def _seen(refusal: BaseException) -> str:
    """The name of Dynamo's class for the exception that it saw Python raise, ``ObservedKeyError``; empty if none."""
    name = type(getattr(refusal.__cause__, "__cause__", None)).__name__
    return name if name.startswith("Observed") else ""


def _statement(file: str, line: int, seen: str) -> tuple[str, int] | None:
    """The innermost statement of the user's that contains this line, by its file and first line. It is a ``raise`` or
    an ``assert``, unless Dynamo saw (``seen``) an exception."""
    kinds: Any = ast.stmt if seen else ast.Raise | ast.Assert
    spans = _spans(file, kinds) if is_users(file) else []
    first = max((first for first, last in spans if first <= line <= last), default=None)
    return None if first is None else (file, first)


@lru_cache(64)
def _spans(file: str, kinds: Any) -> list[tuple[int, int]]:
    """The first and the last line of each statement of these kinds in a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [(node.lineno, node.end_lineno or node.lineno) for node in ast.walk(tree) if isinstance(node, kinds)]
