"""Side effects of a model's code, and what happens to each kind when the code is traced once and does not run again.

- *Said*: `print`, `warnings` and loggers. A program leaves these calls out.
- *Kept*: tensors that forward leaves in attributes, containers and variables, ``self.last = y``. They would be fake
  tensors, so each place gets its old value back, and a warning says so. If forward also reads the tensor,
  ``self.h = f(self.h)``, it is state: the program writes its new value to it.
- *Counted*: other Python values that change, ``self.calls += 1``. They get their old value back too, with a warning.
- *Depended on*: side effects that the next call would read, ``if self.calls > 3``, ``if "h" in self.cache``. A program
  would not see them, so the code is refused. A second trace, of the next call, finds out whether it reads them. It
  starts from the side effects of the first, with counters as symbols and grown lists made long. It must give the same
  (`Meaning`).
- *Wrapped*: a submodule under `torch.compile` is traced as the module inside.

The two traces are compared by hashes: each value has one of its operator and of its arguments' hashes, so it is the
same wherever it is computed. The first call may compute a table from no input, which the next one finds: ``if self.mask
is None: self.mask = ...``. It has the same hash in both. Values that are only left on Python objects, and counters, are
not compared.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import hashlib
import logging
import re
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.mutations import PLAIN, Entry, Mutations, leaves, state

log = logging.getLogger("fsdp_compiled")
WRAPPED = re.compile(r"(?<![^.])_orig_mod\.")  # what `torch.compile` puts into the names of a module's tensors
_TOLD: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
SPOKEN = (
    builtins.print, warnings.warn, warnings.warn_explicit, warnings.simplefilter, warnings.filterwarnings,
)  # fmt: skip
LEVELS = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")


def speech() -> set[Callable[..., Any]]:
    """The functions that print, warn or log, those that libraries have put on `logging.Logger` included."""
    added = [value for value in vars(logging.Logger).values() if getattr(value, "__module__", "") != "logging"]
    return {*SPOKEN, *(vars(logging.Logger)[name] for name in LEVELS if name in vars(logging.Logger)),
            *(value for value in added if callable(value))}  # fmt: skip


def inside(module: nn.Module) -> nn.Module:
    """The module itself, or the inner module if `torch.compile` wraps it. Raises `CaptureError` for a wrapper of the
    user's own that has the name of PyTorch's."""
    inner = module._modules.get("_orig_mod")
    if inner is not None and not type(module).__module__.startswith("torch."):
        raise CaptureError(
            f"{type(module).__name__} has a submodule called _orig_mod, the name by which torch.compile's wrappers are "
            "known and passed over. Call it something else."
        )
    return inner or module


@contextlib.contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Inside, submodules under `torch.compile` are the modules that they wrap."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and inside(child) is not child
    ]
    for parent, name, child in places:
        parent._modules[name] = inside(child)
    try:
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


class SideEffects:
    """The changes that a trace made to Python objects that outlive it, and what happens to them.

    ``state``: the new values of tensors that the code reads and replaces, by name. ``symbolic``: the sources of
    integers that it reads and changes; a second trace treats them as symbols.
    """

    def __init__(self, mutations: Mutations, closed: Mapping[int, str], results: Collection[int]) -> None:
        self.entries = mutations.entries()
        self.state, self.rest = state(self.entries, closed, results)
        self.symbolic = [entry.source for entry in self.rest if entry.counts and entry.source in mutations.guards]

    @property
    def doubtful(self) -> bool:
        """Whether the next call might compute something else, as far as one can tell without a trace of it."""
        return bool(self.state) or any(entry.read for entry in self.rest)

    def check(self, closed: Mapping[int, str], again: Sequence[Entry], tables: Container[int]) -> None:
        """Raises `CaptureError` if a second trace, of the next call, reads side effects of this one.

        ``closed``: the tensors that the second trace reads. ``again``: its changes. ``tables``: the tensors that are
        computed from no input.
        """
        left = {id(leaf) for leaf in leaves(self.entries)}
        for key, name in closed.items():
            if key in left and key not in tables and id(self.state.get(name)) != key:
                raise CaptureError(self.refusal(f"reads {name}, which it leaves there itself,"))
        for entry in again:
            plain = all(isinstance(leaf, PLAIN) for leaf in pytree.tree_leaves((entry.old, entry.new)))
            if entry.read and plain and entry.source not in self.symbolic and type(entry.old) is type(entry.new):
                if not isinstance(entry.old, list | tuple) or len(entry.old) == len(entry.new):
                    raise CaptureError(self.refusal(f"reads and changes {entry}"))

    def refusal(self, what: str = "") -> str:
        """The text of the refusal: why the code cannot be captured, and the cure."""
        names = [str(entry) for entry in self.rest if entry.read] or list(self.state)
        what = what or f"reads and changes {some(names)}"
        return (
            f"Forward {what} and so may compute something else at the next call. A program is traced once: its Python "
            "code does not run again. Make what changes from call to call a buffer (register_buffer) and compute with "
            "it in tensors, or pass it with the batch; what is kept for one forward alone, clear where forward begins."
        )

    def lost(self, tables: Collection[int]) -> list[Entry]:
        """The changed objects that hold tensors, except tables that the program computes from no input."""
        return [entry for entry in self.rest if entry.keeps_tensors and not _all_in(entry, tables)]

    def tell(self, model: nn.Module, tables: Collection[int]) -> None:
        """Logs which changes are not kept, once for each model, except tables that are computed from no input."""
        if lost := [entry.name for entry in self.lost(tables)]:
            _say(
                model,
                f"forward keeps tensors in {', '.join(lost)}, which hold their old values again: return them as aux to "
                "see them, or make them buffers to use them in the next step",
            )
        if counted := [str(entry) for entry in self.rest if not entry.keeps_tensors]:
            _say(
                model,
                f"forward changes {', '.join(counted)}, which a program does not: it holds its old value again. What "
                "must count steps is a buffer",
            )


def tell_batch(model: nn.Module, changed: Sequence[str]) -> None:
    """Names the containers of the batch that the code changes, once for each model."""
    _say(
        model,
        f"forward changes {some(changed)} of the batch, which a program does not: your own list or dictionary holds "
        "what it held. Change it before the call, or a copy of it in forward; return as aux what is to be seen",
    )


def is_made_anew(entry: Entry, code: Iterable[types.CodeType]) -> bool:
    """Whether a tensor replaced one like it for forward itself, which reads it: `weight_norm`'s and pruning's hooks set
    a layer's weight so before each call. ``code``: the traced code. Scalars do not count: they may be a loss."""
    old, new = entry.old, entry.new
    both = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    alike = both and old.dim() > 0 and old.shape == new.shape and old.dtype == new.dtype
    return alike and re.findall(r"\w+", entry.name)[-1] in _loaded(code)


def _loaded(code: Iterable[types.CodeType]) -> set[Any]:
    """The names of attributes that this code reads, or may read by a text."""
    calls = [one for each in code for one in dis.get_instructions(each)]
    read = {one.argval for one in calls if one.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")}
    return read | {one for each in code for one in each.co_consts if isinstance(one, str)}


def unread_results(names: Sequence[str]) -> str:
    """The text of the refusal if forward leaves tensors in these places for the user's own training loop."""
    return (
        f"Forward leaves tensors in {some(names)}, where your loop would find what was there before: a program gives "
        "what forward returns. Return them, as (output, losses); or, without gradients, call the model inside of "
        "`with model.gathered():`, where its own code runs."
    )


def _say(model: nn.Module, text: str) -> None:
    told = _TOLD.setdefault(model, set())
    if text not in told:
        told.add(text)
        log.warning("%s", text)


def _all_in(entry: Entry, tables: Collection[int]) -> bool:
    return all(id(leaf) in tables or isinstance(leaf, PLAIN) for leaf in pytree.tree_leaves(entry.new))


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


RANDOM = re.compile(r"rand|dropout|normal_|^normal$|bernoulli|multinomial|poisson|uniform|exponential|cauchy|gumbel")


class Meaning:
    """The wanted results and the in-place writes of one graph. ``inputs``: the name of each placeholder.

    ``known``: placeholders whose value was computed from no input, with its hash.
    """

    def __init__(
        self,
        module: nn.Module,
        wanted: Iterable[tuple[str, fx.Node]],
        inputs: Mapping[fx.Node, str],
        known: Mapping[fx.Node, str] | None = None,
    ) -> None:
        self._modules = dict(module.named_modules())
        self._names: dict[fx.Node, str] = {}
        self._roots: dict[fx.Node, set[fx.Node]] = {}  # the inputs and new tensors whose memory a value may be in
        self.constant: dict[fx.Node, str] = {}  # values computed from nothing
        self._writes: list[str] = []
        self._drawn = 0
        known = known or {}
        for node in module.graph.nodes:  # type: ignore[union-attr]
            if node.op == "placeholder":
                self._names[node] = known.get(node, inputs.get(node, node.name))
                self._roots[node] = {node}
                if node in known:
                    self.constant[node] = known[node]
            elif node.op != "output":
                self._add(node)
        self.results = {name: self._names[node] for name, node in wanted}

    def same(self, other: Meaning) -> bool:
        return self.results == other.results and self._writes == other._writes

    def _add(self, node: fx.Node) -> None:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", str(node.target))
        if node.op in ("get_attr", "call_module"):
            inner = self._modules.get(str(node.target))
            target = _body(inner) if isinstance(inner, fx.GraphModule) else target
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda source: self._names[source])
        random = RANDOM.search(target) is not None
        self._drawn += random
        name = _hash(node.op, target, arguments, self._drawn if random else "")
        sources = node.all_input_nodes
        self._names[node] = name
        self._roots[node] = set().union(*(self._roots[source] for source in sources)) or {node}
        if not random and node.op != "get_attr" and all(source in self.constant for source in sources):
            self.constant[node] = name
        if sources and _writes(node):
            self._write(sources[0], name)

    def _write(self, target: fx.Node, how: str) -> None:
        """From here on, every value that may share memory with the target has a new hash."""
        if target not in self.constant:
            self._writes.append(how)
        for node, roots in self._roots.items():
            if roots & self._roots[target]:
                self._names[node] = _hash(self._names[node], how)
                if node in self.constant:
                    self.constant[node] = self._names[node]


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _body(inner: fx.GraphModule) -> str:
    """The body of a checkpointed region, or of another operator that has one."""
    values = inner.graph.output_node().all_input_nodes
    places = {node: f"input {index}" for index, node in enumerate(inner.graph.find_nodes(op="placeholder"))}
    found = Meaning(inner, ((str(index), node) for index, node in enumerate(values)), places)
    return _hash(found.results, found._writes)


def _writes(node: fx.Node) -> bool:
    """Whether the node may write a tensor in place: ``add_``, ``x[0] = y``, ``out=``."""
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "__setitem__") or "out" in node.kwargs
    )
