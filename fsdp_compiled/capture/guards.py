"""Guards: what a trace assumed about Python objects. Every call checks again that it still holds.

    trace                                at each call

    model.temp read: 1.0                 model.temp == 1.0?               else the call is captured again
    weights read: a tensor               weights, as it is now            its values are an input of the program

A program is valid as long as everything that its trace read is unchanged: attributes, globals, closures, entries of
dictionaries and lists, train and eval, classes and structure of modules, functions, hooks. Dynamo makes guards for all
of it. This file keeps these guards, except those that the package checks in another way:

- *The tensors and the structure of the batch* (``args``, ``kwargs``) and *sizes* (SHAPE_ENV): the key of a program
  covers them, and `capture.dynamic_shapes`.
- *Tensors* (TENSOR_MATCH): parameters live in shards that keep their layout. `runtime.programs.program_cache` checks
  module buffers by identity, and `closure_values` checks other tensors, read or not. Guards that two names lead to one
  of these other tensors (DUPLICATE_INPUT, ID_MATCH) are kept.
  `closure_values` checks a size or number (SHAPE_ENV) that was read out of a tensor, ``if step.item() > 3``.
- *Modes* (GLOBAL_STATE, GRAD_MODE, DETERMINISTIC_ALGORITHMS, TORCH_FUNCTION_STATE, DEFAULT_DEVICE,
  AUTOGRAD_SAVED_TENSORS_HOOKS): a capture sets its own modes around the trace. The key of a program has the caller's
  modes that matter.
- *Empty dictionaries of hooks* (EMPTY_NN_MODULE_HOOKS_DICT): six a module, whose check would take longer than all the
  rest. `looked_up_names.Hooks` checks them only after PyTorch has counted a new hook.
- *Tables of parameters* (``module._parameters``) of a model that was taken over: `runtime.managed_model` compares every
  entry of them at every call, and refuses any change. They have half of all guards.
- *Functions of this package*, which the trace passes through, and *modules of Python's and PyTorch's own library* that
  have two names (DUPLICATE_INPUT, ID_MATCH): the user changes neither.

Dynamo has no guards for the following, so this package checks them itself: the methods of classes that the trace went
through, and global hooks of modules (`looked_up_names`); an object that both an argument and a global lead to, the
order of an `OrderedDict`, and which of two equal values it was, 0.0 or -0.0 (`object_identity`); that names which the
trace did not find, or for which it called `__getattr__`, are still absent (`AbsentNames`); and what the trace asked of
two objects, of caches, loggers and the interpreter (`python_answers`).

Written for torch 2.11 to 2.14, where guards, the filter for them and the manager that checks them have the same form.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fsdp_compiled.capture.closure_values import Closed
from fsdp_compiled.capture.layers_across_ranks import SequenceAttention
from fsdp_compiled.capture.looked_up_names import HOOKS, AbsentNames, Hooks, Methods, is_empty, is_ours
from fsdp_compiled.capture.model_tensors import is_wrapped
from fsdp_compiled.capture.object_identity import (
    EqualValues,
    check_text,
    has_equals,
    has_text,
    makes_texts,
)
from fsdp_compiled.capture.python_answers import SIGNATURE, Answers, Asked
from fsdp_compiled.capture.side_effects import unwrapped
from fsdp_compiled.capture.source_lines import plain_names, words
from fsdp_compiled.torch_private.dynamo import cache_entries, closure_vars

ELSEWHERE = {
    "TENSOR_MATCH", "SHAPE_ENV", "GLOBAL_STATE", "GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "TORCH_FUNCTION_STATE",
    "DEFAULT_DEVICE", "AUTOGRAD_SAVED_TENSORS_HOOKS", "EMPTY_NN_MODULE_HOOKS_DICT",
}  # fmt: skip
ONE_OBJECT = ("DUPLICATE_INPUT", "ID_MATCH")
NOTHING = contextlib.nullcontext()
READ = attrgetter("read")
# How the hooks of a module are called; fixed when one is registered.
WAYS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
LONG = 60  # characters of a value, as a message shows it
# ``module._parameters`` of the model, and what is in it, as Dynamo names them; and its tensors.
MODEL = r"L\['objective'\]\._modules\['model'\](\._modules\['[^']+'\])*"
PARAMETERS = re.compile(MODEL + r"\._parameters(\['[^']+'\])?$")
INSIDE = re.compile(MODEL + r"\._parameters\['[^']+'\]")
OWN = re.compile(MODEL + r"\._(parameters|buffers)\['[^']+'\]$")


class Recorder:
    """Takes Dynamo's guards while it traces, and makes `Guards` of them.

    ``root``: the model, whose own hooks are taken off while it is traced. ``wrapped``: whether submodules are under
    `torch.compile`, so that the trace has the inner modules in their place. ``taken``: whether the model was taken
    over, so that no table of parameters changes.
    """

    def __init__(self, root: nn.Module, wrapped: bool, taken: bool, failed: set[str], answers: Answers) -> None:
        """``failed``: which kinds of lookup failed (see `failed_lookups`)."""
        self.root, self.wrapped, self.taken, self.failed, self.answers = root, wrapped, taken, failed, answers
        self._met: dict[str, Any] = {}  # further values that guards look at, in blocks that were not walked through
        self.values: dict[str, Any] = {}  # the values that guards look at, by Dynamo's name
        self.empty: list[dict[Any, Any]] = []
        self.kept: list[Any] = []  # Dynamo's own, which have texts when they are built
        self.code: set[types.CodeType] = set()  # that was traced, functions of functions too
        self._alive: list[Any] = []
        self._tensors: list[str] = []  # Dynamo's names of all that it found
        self._equals = EqualValues()

    def repeat(self, kinds: Sequence[tuple[int, str]], values: Sequence[Any], name: Callable[[int], str]) -> None:
        """Notes the guards of a block that repeats a walked one. ``kinds``: for each guard its place and its kind;
        ``values``: what the guards look at, by place; ``name``: Dynamo's name for a place."""
        for place, kind in kinds:
            value = values[place]
            if kind == "EMPTY_NN_MODULE_HOOKS_DICT":
                if type(value).__name__ == "OrderedDict":
                    self.empty.append(value)
                continue
            self._alive.append(_identity(value, kind))
            if self.failed or is_empty("", value) or has_text(value):
                self._met[name(place)] = value
            self._note(name(place), value, kind)

    def _note(self, name: str, value: Any, kind: str) -> None:
        """Notes what a guard of this kind does not see of the value."""
        if has_equals(value, kind):
            self._equals.note(name, value, kind)

    def meet(self, tensors: Iterable[str]) -> None:
        """Tensors of such a block, by Dynamo's names."""
        self._tensors.extend(tensors)

    def select(self, entries: Sequence[Any]) -> list[bool]:
        """``guard_filter_fn``: which guards are kept."""
        self.values = {entry.orig_guard.name: entry.value for entry in entries if entry.has_value}
        own = {id(hooks) for hooks in (getattr(self.root, name) for name in HOOKS) if all(map(is_ours, hooks.values()))}
        own |= {id(getattr(self.root, name)) for name in WAYS}
        self.empty = [entry.value for entry in entries
                      if entry.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT" and id(entry.value) not in own
                      and type(entry.value).__name__ == "OrderedDict"]  # fmt: skip
        kept = [self._is_relied_on(entry, own) for entry in entries]
        chosen = [entry for entry, select in zip(entries, kept, strict=True) if select]
        self._alive = [_identity(entry.value, entry.guard_type, entry.has_value) for entry in chosen]
        self.kept = [entry.orig_guard for entry in chosen]
        for guard in self.kept:  # torch 2.11 and 2.12 expect the same object again, which a property makes anew
            guard.obj_weakref = None
        self._tensors = [entry.orig_guard.name for entry in entries if entry.guard_type == "TENSOR_MATCH"]
        self._equals = EqualValues()
        for entry in chosen:
            self._note(entry.orig_guard.name, entry.value, entry.guard_type)
        return kept

    def _is_relied_on(self, entry: Any, own: set[int]) -> bool:
        name = entry.orig_guard.name
        other = getattr(getattr(entry.orig_guard.create_fn, "keywords", {}).get("source_b"), "name", "")
        if entry.guard_type in ELSEWHERE or any(given in f"{name} {other}" for given in SIGNATURE):
            return False
        if entry.guard_type in ONE_OBJECT and isinstance(entry.value, types.ModuleType):
            return not _library(entry.value)
        if entry.guard_type in ONE_OBJECT and (OWN.match(name) or OWN.match(other)):
            return False
        if self.taken and PARAMETERS.match(name) and entry.guard_type != "HASATTR":  # what is noted on one may change
            return False
        if "_hooks_with_kwargs" in name or "_hooks_always_called" in name:
            return False
        source = entry.orig_guard.originating_source
        while source is not None:
            value = self.values.get(source.name)
            if is_ours(value) or id(value) in own:
                return False
            if self._is_wrapped(source.name):
                return False  # each call compares what it is made of
            if isinstance(value, nn.SyncBatchNorm | SequenceAttention) and "['forward']" in name:
                return False  # this package's, while it is traced
            source = getattr(source, "base", None)
        return True

    def _is_wrapped(self, name: str) -> bool:
        """Whether this is a parameter that is a tensor subclass (`is_wrapped`), or is inside of one."""
        own = INSIDE.match(name)
        value = self.values.get(own.group()) if own is not None else None
        return isinstance(value, torch.Tensor) and is_wrapped(value)

    def guards(self, code: types.CodeType, scope: dict[str, Any], closed: Mapping[str, tuple[Any, Any]]) -> Guards:
        """The guards of this code's trace. ``closed``: closed-over tensors by our name, each with its source."""
        (entry,) = cache_entries(code)
        hooks, methods = Hooks(self.root, self.empty), Methods(self.values.values(), self.code)
        for name, value in {**self._met, **self.values}.items() if makes_texts(self.code, self.values.values()) else ():
            if has_text(value) and not name.endswith(WAYS):
                check_text(plain_names(name), value)
                self._equals.note(name, value, "")
        unseen = (
            self._equals,
            AbsentNames({**self._met, **self.values}, self.root, self.failed, self.code),
            self.answers.of([*self._met.values(), *self.values.values()], self.code),
        )
        found = Guards(entry, scope, hooks, methods, unseen, self._alive, self.wrapped)
        answered = {source.name for _, source in closed.values()}
        unread = [name for name in self._tensors if name not in answered and not is_own(name)]
        unread = [name for name in unread if not (any(map(name.count, SIGNATURE)) or self._is_wrapped(name))]
        found.closed = Closed(closed, found.scope, unread, found.as_traced)
        self.values, self.kept = {}, []
        return found


def is_own(name: str) -> bool:
    """Whether this is a parameter or a buffer of the model."""
    return OWN.match(name) is not None


def _identity(value: Any, kind: str, there: bool = True) -> Any:
    """The object that a guard knows only by its address. It is kept alive, so that no other object gets the address."""
    if isinstance(value, types.FunctionType):
        return value.__code__
    by_type = not there or isinstance(value, nn.Module) or not kind.endswith("_MATCH")
    return type(value) if by_type or kind == "TYPE_MATCH" else value


def _library(module: types.ModuleType) -> bool:
    name = module.__name__.split(".")[0]
    return name == "torch" or name in sys.stdlib_module_names


class Guards:
    """What a program assumes about Python objects."""

    closed: Closed

    def __init__(
        self,
        entry: Any,
        scope: dict[str, Any],
        hooks: Hooks,
        methods: Methods,
        unseen: tuple[EqualValues, AbsentNames, Asked],
        alive: list[Any],
        wrapped: bool,
    ) -> None:
        self._manager = entry.guard_manager
        self._check = self._manager.root.check
        self._locals = scope
        self._hooks, self._methods, self._alive = hooks, methods, alive
        self._asked: list[EqualValues | AbsentNames | Asked] = [one for one in unseen if one.read]
        # Dynamo names modules in the globals of what it traces, for as long as the code that it made is there.
        self._code = entry.code
        self.scope = {"L": scope, "G": self._manager.global_scope["G"], **closure_vars()}
        self._around = [unwrapped] * wrapped + [hooks.as_traced] * bool(hooks.own)
        if self._around:
            self._check = self._check_around

    def hold(self) -> bool:
        """Whether everything is unchanged; takes some 30 us for 24 layers."""
        return (
            self._check(self._locals)
            and self._hooks.same()
            and self._methods.same()
            and not (any(map(READ, self._asked)) and self._unseen())
        )

    def _unseen(self) -> str | None:
        """The first change that Dynamo's guards do not see, by Dynamo's name."""
        if self._around:
            with self._in_place():
                return next(filter(None, (one.changed(self.scope) for one in self._asked)), None)
        for one in self._asked:  # at every call
            if (name := one.changed(self.scope)) is not None:
                return name
        return None

    def as_traced(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model has the hooks and the inner modules that it had during the trace."""
        return self._in_place() if self._around else NOTHING

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for around in self._around:
                stack.enter_context(around(self._locals["objective"]))
            yield

    def _check_around(self, scope: dict[str, Any]) -> bool:
        with self.as_traced():
            return self._manager.root.check(scope)

    def broken(self) -> tuple[str, str] | None:
        """The first guard that fails, as ``(model.temp, model.temp == 1.0, which is 3.0 now)``; None if all hold."""
        if not self._check(self._locals):
            with self.as_traced():
                parts = list(self._manager.root.check_verbose(self._locals).verbose_code_parts)
            return next(filter(None, map(self._explain, parts)), None) or ("the model", words(parts[0], self.scope))
        if (name := self._unseen()) is not None:
            name = words(name, self.scope)
            return name, f"{name}, which is another now, in another order, or has another name"
        return self._hooks.changed(self._locals["objective"].model) or self._methods.changed()

    def _explain(self, part: str) -> tuple[str, str] | None:
        """The same for one guard of Dynamo; None if it holds, or cannot be explained."""
        text = part.split("  # ")[0].strip()
        text = re.sub(r"^___check_type_id\((.*), \d+\), type=(.*)$", r"___type(\1) is '\2'", text)
        text = re.sub(r"^___check_obj_id\((.*), \d+\), type=.*$", r"\1 is '(another object)'", text)
        with contextlib.suppress(Exception):
            tree = ast.parse(text, mode="eval").body
            if "___type(" not in text and "(another object)" not in text and eval(text, dict(self.scope)):
                return None
            source = next(ast.unparse(node) for node in ast.walk(tree) if _rooted(node))
            name, said = words(source, self.scope), words(text, self.scope)
            if "___type(" in text:
                return f"the class of {name}", f"the class of {name}, which is another"
            if "(another object)" in text:
                return name, f"{name}, which is another object"
            now = ""
            with contextlib.suppress(Exception):
                now = f", which is {_short(eval(source, dict(self.scope)))} now"
            return name, said + now
        return None


def _rooted(node: ast.AST) -> bool:
    """Whether this expression reads something of the user's: ``L[...]...`` or ``G[...]...``."""
    inner = node
    while isinstance(inner, ast.Subscript | ast.Attribute):
        inner = inner.value
    return inner is not node and isinstance(inner, ast.Name) and inner.id in ("L", "G")


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, bool | int | float | complex | str | None) else f"a {type(value).__name__}"
    return text if len(text) <= LONG else text[:LONG] + "..."
