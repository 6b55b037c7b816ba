"""What a trace took for granted of Python, kept and asked again at every call: Dynamo's guards.

    trace                                at each call

    model.temp read: 1.0                 model.temp == 1.0?               else the call is captured again
    weights read: a tensor               weights, as it is now            its values are an input of the program

A program is right as long as what its trace read is as it was: attributes, globals, closures, entries of dictionaries
and lists, train and eval, classes and structure of modules, functions, hooks. Dynamo notes all of it; here its notes
are kept, less those that this package answers for in another way:

- *The tensors and the structure of the batch* (``args``, ``kwargs``) and *sizes* (SHAPE_ENV): in the key that a program
  is found by, and in `capture.dynamic_shapes`.
- *Tensors* (TENSOR_MATCH): parameters live in shards that keep their layout; module buffers are watched by identity
  (`runtime.program_cache`), and tensors that are closed over by `Closed` here.
  Of a size or number (SHAPE_ENV) that was read out of one, ``if step.item() > 3``, `closed_numbers` asks again.
- *Modes* (GLOBAL_STATE, GRAD_MODE, DETERMINISTIC_ALGORITHMS, TORCH_FUNCTION_STATE, DEFAULT_DEVICE,
  AUTOGRAD_SAVED_TENSORS_HOOKS): capture sets its own around the trace; those of the caller's that mean anything are in
  the key.
- *Empty dictionaries of hooks* (EMPTY_NN_MODULE_HOOKS_DICT): six a module, which would take longer than all the rest.
  `Hooks` looks at them when PyTorch has counted a new hook, and not before.
- *Tables of parameters* (``module._parameters``) of a model that was taken over: `runtime.taken_model` compares all of
  them at every call, entry by entry, and refuses any other. Half of all guards are theirs.
- *Functions of this package*, which the trace passes through, and *modules of Python's and PyTorch's own library* that
  are one and the same under two names (DUPLICATE_INPUT): neither is the user's to change.

What Dynamo does not note is noted here: the methods of classes that the trace went through (`Methods`), and global
hooks of modules.

Written for torch 2.11 to 2.13, where guards, the filter for them and the manager that checks them have the same form.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from fsdp_compiled.capture.ambient import is_tracker
from fsdp_compiled.capture.closed_numbers import Numbers
from fsdp_compiled.capture.sequence_attention import SequenceAttention
from fsdp_compiled.capture.side_effects import unwrapped
from fsdp_compiled.torch_private.dynamo import cache_entries, closure_vars

PACKAGE = __name__.split(".")[0]
ELSEWHERE = {
    "TENSOR_MATCH", "SHAPE_ENV", "GLOBAL_STATE", "GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "TORCH_FUNCTION_STATE",
    "DEFAULT_DEVICE", "AUTOGRAD_SAVED_TENSORS_HOOKS", "EMPTY_NN_MODULE_HOOKS_DICT",
}  # fmt: skip
SIGNATURE = ("L['named']", "L['args']", "L['kwargs']", "L['buffers']")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# How the hooks of a module are called; fixed when one is registered.
WAYS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
GLOBAL_HOOKS = (
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
)  # fmt: skip
LONG = 60  # characters of a value, as a message shows it
# ``module._parameters`` of the model, and what is in it, as Dynamo names them.
PARAMETERS = re.compile(r"L\['objective'\]\._modules\['model'\](\._modules\['[^']+'\])*\._parameters(\['[^']+'\])?$")


class Recorder:
    """Takes Dynamo's guards while it traces, and makes `Guards` of them.

    ``root``: the model, whose own hooks are taken off while it is traced. ``wrapped``: whether parts of it are under
    `torch.compile`, for which those inside stand while it is traced. ``taken``: whether it was taken over, so that no
    table of parameters changes.
    """

    def __init__(self, root: nn.Module, wrapped: bool = False, taken: bool = False) -> None:
        self.root, self.wrapped, self.taken = root, wrapped, taken
        self.values: dict[str, Any] = {}  # what guards look at, by Dynamo's name
        self.empty: list[dict[Any, Any]] = []
        self.code: set[types.CodeType] = set()  # that was traced, functions of functions too
        self._alive: list[Any] = []

    def select(self, entries: Sequence[Any]) -> list[bool]:
        """``guard_filter_fn``: which guards are kept."""
        self.values = {entry.orig_guard.name: entry.value for entry in entries if entry.has_value}
        own = {id(hooks) for hooks in (getattr(self.root, name) for name in HOOKS) if all(map(_ours, hooks.values()))}
        own |= {id(getattr(self.root, name)) for name in WAYS}
        self.empty = [entry.value for entry in entries
                      if entry.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT" and id(entry.value) not in own
                      and type(entry.value).__name__ == "OrderedDict"]  # fmt: skip
        kept = [self._is_relied_on(entry, own) for entry in entries]
        self._alive = [_identity(entry) for entry, select in zip(entries, kept, strict=True) if select]
        return kept

    def _is_relied_on(self, entry: Any, own: set[int]) -> bool:
        name = entry.orig_guard.name
        other = getattr(getattr(entry.orig_guard.create_fn, "keywords", {}).get("source_b"), "name", "")
        if entry.guard_type in ELSEWHERE or any(given in f"{name} {other}" for given in SIGNATURE):
            return False
        if entry.guard_type == "DUPLICATE_INPUT" and isinstance(entry.value, types.ModuleType | torch.Tensor):
            return not _library(entry.value) if isinstance(entry.value, types.ModuleType) else False
        if self.taken and PARAMETERS.match(name) and entry.guard_type != "HASATTR":  # what is noted on one may change
            return False
        if "_hooks_with_kwargs" in name or "_hooks_always_called" in name:
            return False
        source = entry.orig_guard.originating_source
        while source is not None:
            value = self.values.get(source.name)
            if _ours(value) or id(value) in own:
                return False
            if isinstance(value, nn.SyncBatchNorm | SequenceAttention) and "['forward']" in name:
                return False  # this package's, while it is traced
            source = getattr(source, "base", None)
        return True

    def guards(self, code: types.CodeType, scope: dict[str, Any], closed: Mapping[str, tuple[Any, Any]]) -> Guards:
        """What the trace of this code took for granted; ``closed``: tensors by our name, each with its source."""
        (entry,) = cache_entries(code)
        hooks, methods = Hooks(self.root, self.empty), Methods(self.values.values(), self.code)
        found = Guards(entry, scope, hooks, methods, self._alive, self.wrapped)
        found.closed = Closed(closed, found.scope)
        self.values = {}
        return found


def _identity(entry: Any) -> Any:
    """What a guard knows by its address alone: it stays, so that nothing else gets the address."""
    value = entry.value
    if isinstance(value, types.FunctionType):
        return value.__code__
    by_type = not entry.has_value or isinstance(value, nn.Module) or not entry.guard_type.endswith("_MATCH")
    return type(value) if by_type or entry.guard_type == "TYPE_MATCH" else value


def _ours(value: Any) -> bool:
    value = value.func if isinstance(value, functools.partial) else value
    return isinstance(value, types.FunctionType) and value.__module__.split(".")[0] == PACKAGE


def _library(module: types.ModuleType) -> bool:
    name = module.__name__.split(".")[0]
    return name == "torch" or name in sys.stdlib_module_names


class Guards:
    """What a program relies on, of Python."""

    closed: Closed

    def __init__(
        self, entry: Any, scope: dict[str, Any], hooks: Hooks, methods: Methods, alive: list[Any], wrapped: bool
    ) -> None:
        self._manager = entry.guard_manager
        self._check = self._manager.root.check
        self._locals = scope
        self._hooks, self._methods, self._alive = hooks, methods, alive
        # Dynamo names modules in the globals of what it traces, for as long as the code that it made is there.
        self._code = entry.code
        self.scope = {"L": scope, "G": self._manager.global_scope["G"], **closure_vars()}
        self._around = [unwrapped] * wrapped + [hooks.as_traced] * bool(hooks.own)
        if self._around:
            self._check = self._check_around

    def hold(self) -> bool:
        """Whether all of it is as it was; some 30 us for 24 layers."""
        return self._check(self._locals) and self._hooks.same() and self._methods.same()

    def _check_around(self, scope: dict[str, Any]) -> bool:
        """With what is put into the model's place while it is traced."""
        with contextlib.ExitStack() as stack:
            for around in self._around:
                stack.enter_context(around(scope["objective"]))
            return self._manager.root.check(scope)

    def broken(self) -> tuple[str, str] | None:
        """What does not hold, as ``(model.temp, model.temp == 1.0, which is 3.0 now)``; None where all does."""
        if not self._check(self._locals):
            with contextlib.ExitStack() as stack:
                for around in self._around:
                    stack.enter_context(around(self._locals["objective"]))
                parts = list(self._manager.root.check_verbose(self._locals).verbose_code_parts)
            return next(filter(None, map(self._explain, parts)), None) or ("the model", self.words(parts[0]))
        return self._hooks.changed(self._locals["objective"].model) or self._methods.changed()

    def _explain(self, part: str) -> tuple[str, str] | None:
        """The same of one guard of Dynamo's; None where this one holds, or cannot be told."""
        text = part.split("  # ")[0].strip()
        text = re.sub(r"^___check_type_id\((.*), \d+\), type=(.*)$", r"___type(\1) is '\2'", text)
        text = re.sub(r"^___check_obj_id\((.*), \d+\), type=.*$", r"\1 is '(another object)'", text)
        with contextlib.suppress(Exception):
            tree = ast.parse(text, mode="eval").body
            if "___type(" not in text and "(another object)" not in text and eval(text, dict(self.scope)):
                return None
            source = next(ast.unparse(node) for node in ast.walk(tree) if _rooted(node))
            name, said = self.words(source), self.words(text)
            if "___type(" in text:
                return f"the class of {name}", f"the class of {name}, which is another"
            if "(another object)" in text:
                return name, f"{name}, which is another object"
            now = ""
            with contextlib.suppress(Exception):
                now = f", which is {_short(eval(source, dict(self.scope)))} now"
            return name, said + now
        return None

    def words(self, text: str) -> str:
        """Dynamo's names of things as the user would write them."""

        def cell(match: re.Match[str]) -> str:
            with contextlib.suppress(Exception):
                function = eval(match[1], dict(self.scope))
                return f"{function.__name__}'s {function.__code__.co_freevars[int(match[2])]}"
            return match[0]

        text = re.sub(r"([LG]\['\w+'\](?:\.\w+)*)\.__closure__\[(\d+)\]\.cell_contents", cell, text)
        return plain_names(text)


def plain_names(text: str) -> str:
    """``L['objective']._modules['model']._modules['a'].p`` -> ``model.a.p``."""
    text = text.replace("L['objective']", "objective").replace("._modules['model']", ".model")
    text = re.sub(r"\.(?:__dict__\['_modules'\]|_modules|_parameters|_buffers)\['([^']+)'\]", r".\1", text)
    text = re.sub(r"G\['__import_(\w+?)'\]", lambda match: match[1].replace("_dot_", "."), text)
    text = re.sub(r"(?:___)?dict_contains\((.*), (.*)\)", r"\1 in \2", text)
    return text.replace("objective.model.", "model.").replace("objective.model", "model").replace("L['loss']", "loss")


def _rooted(node: ast.AST) -> bool:
    """Whether this expression reads something of the user's: ``L[...]...`` or ``G[...]...``."""
    inner = node
    while isinstance(inner, ast.Subscript | ast.Attribute):
        inner = inner.value
    return inner is not node and isinstance(inner, ast.Name) and inner.id in ("L", "G")


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, bool | int | float | complex | str | None) else f"a {type(value).__name__}"
    return text if len(text) <= LONG else text[:LONG] + "..."


class Hooks:
    """The dictionaries of hooks that were empty, and those of all modules of the process.

    They are looked at when a hook was registered anywhere in the process: each gets a number that PyTorch counts up.
    """

    def __init__(self, root: nn.Module, empty: Iterable[dict[Any, Any]]) -> None:
        self._root = root
        self._empty = list({id(hooks): hooks for hooks in empty}.values())
        self.own = self._users()
        self._traced = [dict(getattr(root, name)) for name in HOOKS] if self.own else []
        self._global = self._globals()
        self._count = -1

    def same(self) -> bool:
        count = RemovableHandle.next_id
        if count == self._count and not self.own and not self._global:
            return True
        if any(self._empty) or self._users() != self.own or self._globals() != self._global:
            return False
        self._count = count
        return True

    def changed(self, model: nn.Module) -> tuple[str, str] | None:
        if self.same():
            return None
        if self._globals() != self._global:
            return "global hooks", "the global hooks of modules, which are others now"
        for path, module in model.named_modules():
            for kind in HOOKS:
                if any(getattr(module, kind) is hooks for hooks in self._empty if hooks):
                    name = f"model.{path}.{kind[1:]}".replace("..", ".")
                    return name, f"{name}, of which there were none"
        return "model's hooks", "the hooks of the model, which are others now"

    @contextlib.contextmanager
    def as_traced(self, _objective: nn.Module) -> Iterator[None]:
        """Inside, the model has this package's hooks that it was traced with, after the user's."""
        now = [(hooks := getattr(self._root, name), dict(hooks)) for name in HOOKS]
        try:
            for (hooks, held), traced in zip(now, self._traced, strict=True):
                hooks.clear()
                hooks |= {key: hook for key, hook in held.items() if not _ours(hook)}
                hooks |= {key: hook for key, hook in traced.items() if _ours(hook)}
            yield
        finally:
            for hooks, held in now:
                hooks.clear()
                hooks |= held

    def _users(self) -> list[Any]:
        """The hooks of the model itself, but for this package's."""
        return [key for name in HOOKS for key, hook in getattr(self._root, name).items() if not _ours(hook)]

    def _globals(self) -> list[Any]:
        places = (getattr(modules, name) for name in GLOBAL_HOOKS)
        return [key for hooks in places for key, hook in hooks.items() if not is_tracker(hook)]


class Methods:
    """The functions of classes that the trace went through, where each was found: ``Block.forward``."""

    def __init__(self, values: Iterable[Any], code: set[types.CodeType]) -> None:
        kinds = {id(kind): kind for value in values for kind in type(value).__mro__ if kind is not object}
        self._found = [
            (kind, name, value)
            for kind in kinds.values()
            for name, value in list(vars(kind).items())
            if _code(value) in code and not _ours(value)
        ]
        self._functions = [value for _, _, value in self._found]  # which compare by identity

    def same(self) -> bool:
        return [kind.__dict__.get(name) for kind, name, _ in self._found] == self._functions

    def changed(self) -> tuple[str, str] | None:
        for kind, name, value in self._found:
            if kind.__dict__.get(name) is not value:
                return f"{kind.__name__}.{name}", f"{kind.__name__}.{name}, which is another function now"
        return None


def _code(value: Any) -> types.CodeType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return getattr(value, "__code__", None) if isinstance(value, types.FunctionType) else None


class Closed:
    """The tensors that a program closes over, read as they are now.

    A tensor that has taken another's place (``weights = weights * 2``, a teacher's new parameter) becomes the program's
    input if it is laid out as the other was and shares memory with the same; else the program is not for it.
    ``numbers``: what it relies on of those whose value was read as a Python number.
    """

    numbers = Numbers()

    def __init__(self, closed: Mapping[str, tuple[torch.Tensor, Any]], scope: Mapping[str, Any]) -> None:
        self.tensors = {name: tensor for name, (tensor, _) in closed.items()}
        self._layouts = {name: _layout(tensor) for name, tensor in self.tensors.items()}
        self._shared = _shared(list(self.tensors.values()))
        text = "".join(f"{_name(source)}, " for _, source in closed.values())
        self._read: Callable[[], tuple[Any, ...]] = eval(f"lambda: ({text})", dict(scope)) if closed else tuple

    def moved(self) -> Mapping[str, torch.Tensor] | None:
        """Those that are other tensors now, by name; None where the program is not for them."""
        try:
            now = self._read()
        except Exception:  # one of the places is gone
            return None
        if not self.numbers.hold():
            return None
        if all(map(is_, now, self.tensors.values())):
            return {}
        return None if self._odd(now) else {
            name: new for new, (name, old) in zip(now, self.tensors.items(), strict=True) if new is not old
        }  # fmt: skip

    def odd(self) -> tuple[str, str] | None:
        """The first that the program is not for, as Dynamo names it, and what the program relies on of it."""
        try:
            name = self._odd(self._read())
        except Exception as error:
            name = f"a tensor that is read from outside ({type(error).__name__})"
        if name is not None:
            return name, f"the shape, dtype, strides and sharing of {name}, which are others now"
        if (asked := self.numbers.broken()) is not None:
            return asked, f"the number in {asked}, which is another now"
        return None

    def _odd(self, now: Sequence[Any]) -> str | None:
        names = list(self.tensors)
        found = [name for name, new in zip(names, now, strict=True) if _layout(new) != self._layouts[name]]
        found += [name for name, one, two in zip(names, _shared(now), self._shared, strict=True) if one != two]
        return found[0] if found else None

    def replace(self, moved: Mapping[str, torch.Tensor]) -> None:
        """These are the tensors from now on."""
        self.tensors.update(moved)


def _name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name


def _layout(tensor: Any) -> tuple[Any, ...]:
    """What a program depends on of a tensor, but for its values."""
    if not isinstance(tensor, torch.Tensor):
        return (type(tensor),)
    return (
        type(tensor), tensor.layout, tensor.shape, tensor.stride() if tensor.layout == torch.strided else None,
        tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _shared(tensors: Sequence[Any]) -> list[int]:
    """For each tensor, the first that shares memory with it."""
    first: dict[int, int] = {}
    return [first.setdefault(_storage(tensor), place) for place, tensor in enumerate(tensors)]


def _storage(tensor: Any) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, AttributeError, NotImplementedError):
        return id(tensor)
