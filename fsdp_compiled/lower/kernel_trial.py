"""The kernels that a program calls, tried on this device before the program runs (`fsdp_compiled.kernels.trial`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from fsdp_compiled.ir.nodes import calls
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels import host_copies
from fsdp_compiled.kernels.operators import IMPLEMENTATIONS, KERNELS, RUNS
from fsdp_compiled.kernels.trial import Like, failure

_failure, _copies_failure = cache(failure), cache(host_copies.failure)


def calls_kernels(program: Program) -> bool:
    return bool(calls(program.graph, lambda node: node.target in (*KERNELS, *host_copies.COPIES)))


def failures(program: Program, device: torch.device) -> dict[str, str]:
    """What is wrong with each operator of the program that has a kernel on this device, by the operator's name.

    Waits for the device, so not to be called while a graph is captured. Each form of a kernel is tried once a process.
    """
    found = {}
    for like in dict.fromkeys(map(_like, (node for node in program.graph.nodes if node.target in KERNELS))):
        if RUNS[like.name, device.type] is not IMPLEMENTATIONS[like.name] and (said := _failure(like, device)):
            found[like.name] = said
    copies = any(node.target in host_copies.COPIES for node in program.graph.nodes)
    if copies and device.type not in host_copies.IN_ORDER and (said := _copies_failure(device)):
        found[host_copies.NAME] = said
    return found


def _like(node: fx.Node) -> Like:
    schema = node.target._schema  # type: ignore[union-attr]
    lists: dict[str, list[torch.dtype]] = {}
    scalars: dict[str, torch.dtype] = {}
    numbers: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        given = node.kwargs.get(argument.name, node.args[index] if index < len(node.args) else None)
        if isinstance(given, list | tuple) and any(isinstance(one, fx.Node) for one in given):
            lists[argument.name] = [one.meta["val"].dtype for one in given]  # type: ignore[union-attr]
        elif isinstance(given, fx.Node):
            scalars[argument.name] = given.meta["val"].dtype
        elif argument.kwarg_only or argument.name == "dtype":
            numbers[argument.name] = given
    rows = dict.fromkeys(zip(*lists.values(), strict=True))  # each combination of dtypes once
    dtypes = tuple(zip(lists, zip(*rows, strict=True), strict=True))
    name = schema.name.removeprefix("fsdp_compiled::") + (f".{schema.overload_name}" if schema.overload_name else "")
    return Like(name, dtypes, tuple(scalars.items()), tuple(numbers.items()))
