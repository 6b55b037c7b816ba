"""Writes into Dynamo's graph, of a block, what a walk through it would: see `repeated_calls`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fsdp_compiled.capture.blocks.block_calls import BlockCall, modes
from fsdp_compiled.capture.blocks.walked_blocks import WRITTEN, WalkedBlock, another
from fsdp_compiled.torch_private.dynamo import (
    ConstantVariable,
    Guard,
    Source,
    TensorVariable,
    TupleVariable,
    VariableBuilder,
    set_example_value,
    wrap_fx_proxy,
)


class RepeatError(Exception):
    """What was begun cannot be ended: trace again, walking through every block."""


def write(walked: WalkedBlock, call: BlockCall, values: Sequence[Any]) -> Any:
    """What Dynamo has for what the called block returns. ``values``: the block's own tensors."""
    _write_guards(walked, call)
    mine = _write_inputs(walked, call, values) | _given(walked, call)
    _write_calls(walked, call, mine)
    for name, count in walked.visits.items():
        call.tx.num_calls[walked.path(name, call)] = count
    if modes(call.tx) != call.modes:
        raise RepeatError("modes are left changed")
    return _returned(walked.result, mine, call.tx)


def _write_guards(walked: WalkedBlock, call: BlockCall) -> None:
    for guard, _, others in walked.guards:
        create = guard.create_fn
        if others:
            assert isinstance(create, functools.partial)
            named = create.keywords.items()
            create = functools.partial(
                create.func,
                **{name: walked.there(one, call) if isinstance(one, Source) else one for name, one in named},
            )
        call.output.guards.add(Guard(walked.there(guard.originating_source, call), create))


def _given(walked: WalkedBlock, call: BlockCall) -> dict[fx.Node, Any]:
    """What the block is called with."""
    tracer = call.output.current_tracer
    return {one: fx.Proxy(two, tracer) for one, two in zip(walked.call.tensors, call.tensors, strict=True)}


def _write_inputs(walked: WalkedBlock, call: BlockCall, values: Sequence[Any]) -> dict[fx.Node, Any]:
    mine: dict[fx.Node, Any] = {}
    modules = _modules(walked, call)
    for node, source, value in zip(walked.inputs, walked.sources, values, strict=True):
        proxy = VariableBuilder(call.tx, walked.there(source, call))(value).as_proxy()
        if proxy.node.op != "placeholder":
            raise RepeatError(source.name)
        mine[node] = proxy
        _mark(proxy.node, node, walked, call, modules)
    return mine


def _write_calls(walked: WalkedBlock, call: BlockCall, mine: dict[fx.Node, Any]) -> None:
    output, tracer = call.output, call.output.current_tracer
    modules = _modules(walked, call)
    for node in walked.nodes:
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda one: mine[one] if one in mine else fx.Proxy(one, tracer)
        )
        proxy = mine[node] = output.create_proxy(node.op, node.target, tuple(args), dict(kwargs))
        made = proxy.node
        made.meta |= {key: value for key, value in node.meta.items() if key not in WRITTEN}
        made.meta["source_fn_stack"] = [(made.name, node.meta["source_fn_stack"][-1][1])]
        _mark(made, node, walked, call, modules)
        value = node.meta["example_value"]  # which nothing can reach but what is returned, and is not changed
        set_example_value(made, another(value) if node in walked.results else value)


def _modules(walked: WalkedBlock, call: BlockCall) -> dict[str, str]:
    """The modules of the called block by those of the walked one, as `nn_module_stack` has them."""
    pairs = zip(walked.call.module.modules(), call.module.modules(), strict=True)
    return {str(id(one)): str(id(two)) for one, two in pairs}


def _mark(made: fx.Node, node: fx.Node, walked: WalkedBlock, call: BlockCall, modules: Mapping[str, str]) -> None:
    """Where the node came from: the modules, and the user's lines."""
    made.meta["stack_trace"] = call.trace + node.meta["stack_trace"].removeprefix(walked.call.trace)
    made.meta["nn_module_stack"] = {
        "@".join([modules.get(key.split("@")[0], key.split("@")[0]), *key.split("@")[1:]]): (
            walked.path(path, call), kind
        )
        for key, (path, kind) in node.meta["nn_module_stack"].items()
    }  # fmt: skip


def _returned(result: Any, mine: Mapping[fx.Node, Any], tx: Any) -> Any:
    if type(result) is TensorVariable:
        proxy = mine[result.as_proxy().node]
        return wrap_fx_proxy(tx, proxy, example_value=proxy.node.meta.pop("example_value"))
    if type(result) is TupleVariable:
        return TupleVariable([_returned(one, mine, tx) for one in result.items])
    return ConstantVariable.create(result.value)
