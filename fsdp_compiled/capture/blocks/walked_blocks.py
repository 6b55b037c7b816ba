"""The nodes that Dynamo wrote for a walked block, and whether a walk through another block would write the same.

It would if everything that the walk relied on, which Dynamo records as guards, holds for the other block too. Before
anything is written, `WalkedBlock.check` compares the objects that the guards look at. When Dynamo has built the guards,
`repeated_calls.Repeats.check_guards` compares their texts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import setitem
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_compiled.capture.blocks.block_calls import NEW, BlockCall, Unlike, changes, modes, moved, plain, plain_layout
from fsdp_compiled.capture.blocks.guard_probes import Questions, structure_of
from fsdp_compiled.ir.nodes import fake_tensor
from fsdp_compiled.torch_private.dynamo import (
    ConstantVariable,
    Guard,
    LazyVariableTracker,
    Source,
    TensorVariable,
    TupleVariable,
)
from fsdp_compiled.torch_private.modes import C, enter_autocast, exit_autocast

OWN = "own"  # the metadata key for the tensor of an `own_tensor` node
# The metadata of a node that is written anew for each copy.
WRITTEN = (
    "example_value", "creation_timestamp", "source_fn_stack", "nn_module_stack", "stack_trace", "grapharg", OWN,
)  # fmt: skip


def own_tensor() -> torch.Tensor:
    """Stands in Dynamo's graph for an own tensor of a block that was not walked through (`with_own_tensors`)."""
    raise AssertionError


class Before:
    """The state of the trace before a block is walked through. ``nodes``: those of the graph."""

    def __init__(self, call: BlockCall) -> None:
        output = call.output
        self.nodes = set(output.graph.nodes)
        self._versions = {
            node: value._version
            for node in output.graph.nodes
            if isinstance(value := node.meta.get("example_value"), torch.Tensor)
        }
        self._counts = _counts(call)
        effects = output.side_effects
        # All objects so far, those made in the trace too. The key is the mutation type, which an object's copies share.
        self._objects = {id(one): one for one in (known.mutation_type for known in effects.id_to_variable.values())}
        self._stored = {one: dict(attributes) for one, attributes in effects.store_attr_mutations.items()}

    def check(self, call: BlockCall) -> None:
        """Raises `Unlike` if the walk through this block changed any of this state."""
        changed = changes(call.output.side_effects) != call.changes
        if changed or self._counts != _counts(call) or self._put_into_objects(call):
            raise Unlike("it changes objects")
        if any(node.meta["example_value"]._version != version for node, version in self._versions.items()):
            raise Unlike("it writes tensors in place")

    def _put_into_objects(self, call: BlockCall) -> bool:
        """Whether the block set an attribute of a tensor, or of an object that the trace had made before.

        Other code cannot reach objects that the block made for itself, such as an inner function: the block is given
        and returns only tensors and numbers. Objects from before the trace are covered by `changes`.
        """
        for one, attributes in call.output.side_effects.store_attr_mutations.items():
            kind = one.mutation_type
            if one in self._stored:
                if isinstance(kind, NEW) and attributes != self._stored[one]:
                    return True
            elif isinstance(one, TensorVariable) or not isinstance(kind, NEW) or id(kind) in self._objects:
                return True
        return False


def _counts(call: BlockCall) -> tuple[int, ...]:
    """The lengths of other lists that a walk may add to, which is not repeated."""
    output, effects = call.output, call.output.side_effects
    others = effects.tensor_hooks, effects.save_for_backward
    return tuple(map(len, (output.nn_modules, output.random_calls, output.aotautograd_guards, *others)))


SOURCE = torch.empty((), device="meta").requires_grad_()  # the results of `another` are computed from this


def another(value: FakeTensor) -> Any:
    """A fake tensor like ``value``, in its own memory. It has a ``grad_fn`` if ``value`` requires a gradient."""
    base = value._base if value._is_view() else None
    if base is not None and base.is_contiguous() and value.is_contiguous() and base.dtype == value.dtype:
        if base.numel() == value.numel() and base.requires_grad == value.requires_grad:
            with torch.enable_grad():
                return another(base).view(value.shape)
    made = fake_tensor(value.fake_mode, tuple(value.shape), value.stride(), value.dtype, value.device)
    if not value.requires_grad:
        return made
    with torch.enable_grad():
        return _Computed.apply(SOURCE, [made])


class _Computed(torch.autograd.Function):
    """Tells autograd that a tensor is computed from one that requires a gradient."""

    @staticmethod
    def forward(_ctx: Any, _source: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
        return made[0]


# Calls without a value. They change modes (a block leaves each mode that it enters), or write to the block's results.
VALUELESS = (C._set_grad_enabled, enter_autocast, exit_autocast, setitem)


def is_input(node: fx.Node) -> bool:
    return node.op == "placeholder" or node.target is own_tensor


class WalkedBlock:
    """A block that Dynamo walked through. Raises `Unlike` if the nodes that Dynamo wrote cannot be repeated.

    nodes    the nodes that it wrote, which Dynamo leaves as they are until all blocks are written
    inputs   the nodes of the block's own tensors; ``sources``: where these tensors are
    guards   the block's guards, each with its object now and the other sources that it names; ``kinds``: their kinds
    ordered  the sources of dictionaries whose keys it read in order
    results  the nodes that are returned; ``variables``: for each, a variable of Dynamo's to clone
    visits   how often each of the block's modules was called
    """

    def __init__(self, call: BlockCall, before: Before, result: Any, inside: Iterable[Guard]) -> None:
        """``inside``: guards of blocks in this one that were not walked through."""
        self.call, self.result = call, result
        output = call.output
        new = [node for node in output.graph.nodes if node not in before.nodes]
        self.inputs = [node for node in new if is_input(node)]
        self.nodes = [node for node in new if not is_input(node)]
        before.check(call)
        if modes(call.tx) != call.modes:
            raise Unlike("it leaves modes changed")
        if any(node.meta["example_value"]._version for node in self.inputs):
            raise Unlike("it writes its own tensors in place")
        self.sources = [node.meta[OWN if OWN in node.meta else "grapharg"].source for node in self.inputs]
        if not all(self._own(source) for source in self.sources):
            raise Unlike("it reads what the one before did not")
        self._check_nodes(set(new))
        self.guards = list(self._guards([*output.guards, *inside]))
        self.kinds = [guard.create_fn_name() for guard, _, _ in self.guards]
        self.ordered = [source for source in output.guard_on_key_order if self._own(source)]
        self._questions = Questions(call, self.guards, self.kinds, self.sources)
        self._layouts = [plain_layout(call.value(source)) for source in self.sources]
        self.structure = structure_of(call.module)
        self.visits = {name: count for name, count in call.tx.num_calls.items() if self.inside(name)}
        made = set(self.nodes)
        self.results: list[fx.Node] = []
        self._answer(result, lambda node: node in made)
        self.variables: dict[fx.Node, TensorVariable] = {}
        self._check_results([*self.inputs, *call.tensors])

    def _guards(self, guards: Iterable[Guard]) -> Iterable[tuple[Guard, Any, tuple[Source, ...]]]:
        """The guards of the block. Those from before its call count too: the block may have read the same again."""
        inputs = {source.name for source in self.sources}
        for guard in guards:
            if not self._own(guard.originating_source):  # of what all blocks read
                continue
            create: Any = guard.create_fn
            others: tuple[Source, ...] = ()
            if isinstance(create, functools.partial):
                if create.func.__name__ == "TENSOR_MATCH" and guard.name in inputs:
                    continue  # which comes with the input
                given = [*create.args, *create.keywords.values()]
                others = tuple(one for one in given if isinstance(one, Source))
                if create.args or not all(plain(one) or isinstance(one, Source) for one in given):
                    raise Unlike(f"its guard {create.func.__name__} is of an object")
            yield guard, self.call.value(guard.originating_source), others

    def distinct(self, places: Iterable[int]) -> list[int]:
        """Those of these places whose guard says something new: Dynamo records some guards twice."""
        found: dict[Any, int] = {}
        for place in places:
            guard = self.guards[place][0]
            given = guard.create_fn.keywords if isinstance(guard.create_fn, functools.partial) else {}
            key = (guard.name, self.kinds[place], *given.items())
            found.setdefault(key if all(type(one) is str for one in given.values()) else place, place)
        return list(found.values())

    def _own(self, source: Source) -> bool:
        return self.there(source, self.call) is not source

    def there(self, source: Source, call: BlockCall) -> Source:
        """The source of the same place in the called block; a source outside of the walked block as it is."""
        return moved(source, self.call.source, call.source, call.moved)

    def path(self, path: str, call: BlockCall) -> str:
        return call.path + path.removeprefix(self.call.path) if self.inside(path) else path

    def inside(self, path: str) -> bool:
        return path == self.call.path or path.startswith(self.call.path + ".")

    def _check_nodes(self, new: set[fx.Node]) -> None:
        for node in new:
            if node.target in VALUELESS and not {"stack_trace", "nn_module_stack"} & node.meta.keys():
                continue
            told = node.meta.get("stack_trace", "").startswith(self.call.trace)
            if not told or self.call.path not in [path for path, _ in node.meta["nn_module_stack"].values()]:
                raise Unlike("where its calls come from is not told")
        for node in self.nodes:
            if node.op not in ("call_function", "call_method"):
                raise Unlike("it has a region of its own")
            if "example_value" not in node.meta and node.target not in VALUELESS:
                raise Unlike(f"it calls {getattr(node.target, '__name__', node.target)}, which has no value")
            value = node.meta.get("example_value")
            for one in value if isinstance(value, tuple | list) else [value]:
                if one is not None:
                    plain_layout(one)
            if not all(plain(value) for key, value in node.meta.items() if key not in WRITTEN):
                raise Unlike("its calls are marked")
            for source in node.all_input_nodes:
                if source not in new and source not in self.call.tensors and not is_input(source):
                    raise Unlike(f"it reads {source.name}, which it was not given")

    def _answer(self, result: Any, known: Callable[[fx.Node], bool]) -> None:
        if self.place_given(result) is not None:
            return
        if isinstance(result, LazyVariableTracker):
            raise Unlike("it returns what it found")
        if type(result) is TensorVariable:
            node = result.as_proxy().node
            if not known(node):
                raise Unlike("it returns what it was given as another tensor")
            if node not in self.results:
                self.results.append(node)
        elif type(result) is TupleVariable:
            for one in result.items:
                self._answer(one, known)
        elif not (type(result) is ConstantVariable and plain(result.value)):
            raise Unlike(f"it returns a {type(result).__name__}")

    def place_given(self, result: Any) -> int | None:
        """The place of a result among the block's arguments, if the block returns one of them; else None."""
        return next((place for place, one in enumerate(self.call.given) if one is result), None)

    def _check_results(self, given: Sequence[fx.Node]) -> None:
        """Raises `Unlike` unless each result has its own memory: a later write to it must change no other tensor that
        code can reach."""
        storages = [node.meta["example_value"].untyped_storage()._cdata for node in [*given, *self.results]]
        if len(set(storages[len(given) :]) - set(storages[: len(given)])) < len(self.results):
            raise Unlike("what it returns shares memory")
        for node in self.results:
            value = node.meta["example_value"]
            like = another(value)
            same = plain_layout(value) == plain_layout(like) and value.is_leaf == like.is_leaf
            if not same or value.storage_offset() or value._is_view() != like._is_view():
                raise Unlike("what it returns lies in another way")

    def check(self, call: BlockCall, written: Collection[int]) -> tuple[list[torch.Tensor], list[Any]]:
        """The own tensors of the called block, and the objects that its guards look at.

        Raises `Unlike` if a walk through it might write something else. ``written``: the own tensors of blocks that
        were not walked through, by identity.
        """
        if call.form != self.call.form:
            raise Unlike("its arguments are others")
        if call.modes != self.call.modes or list(call.stack.items()) != list(self.call.stack.items()):
            raise Unlike("it is called elsewhere, or under other modes")
        if call.changes != self.call.changes:
            raise Unlike("objects were changed since the one before was called")
        if structure_of(call.module) != self.structure:
            raise Unlike("its modules are others")
        there, tensors = self._questions.ask(call)
        places = call.output.graph.find_nodes(op="placeholder", sort=False)
        before = {id(node.meta["grapharg"].example) for node in places if "grapharg" in node.meta}
        read = {source.name for source in call.output.input_source_to_var}
        here, other = self.call.source.name, call.source.name
        for source, layout, mine in zip(self.sources, self._layouts, tensors, strict=True):
            if layout != plain_layout(mine):
                raise Unlike("its tensors lie in another way")
            known = id(mine) in before or id(mine) in written or mine in call.output.side_effects
            if known or source.name.replace(here, other) in read:
                raise Unlike("its tensors were read before")
        if len(set(map(id, tensors))) != len(tensors):
            raise Unlike("it has the same tensor twice")
        return tensors, there
