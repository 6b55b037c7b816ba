"""What Dynamo makes along with a trace, that nothing reads here, is left out.

- *Names of parameters*: of each module that it comes to, the table of all tensors inside, and where they are. So a
  tensor is listed as often as there are modules around it. The table is for parameters that a graph holds; here all
  are inputs.
- *Marks on tensors*, that they stay where they are: of each module, on all tensors inside. Those that it comes to are
  marked when it does.
- *Code* of the graph, for a look through it for sizes that are read out of tensors.
- *Guards that differ* between several traces of one function, looked for among all of them: here a function is traced
  once.

Of a model of equal blocks, most of which are not walked through (`blocks`), this is a quarter of what is left of the
trace. Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from fsdp_compiled.torch_private.dynamo import OutputGraph, guard_building, variable_builder

MARKED = ("og_module_named_parameters_fn_ptr", "og_module_named_buffers_fn_ptr")  # by which it knows what it can mark


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Inside, for what this thread traces."""
    thread, builder = threading.get_ident(), variable_builder.VariableBuilder
    wrap, names_of = builder.wrap_module, OutputGraph.add_fqn_info_for_inlined_modules
    compile_graph, recompile = OutputGraph.compile_and_call_fx_graph, fx.GraphModule.recompile
    managers = guard_building.GuardManagerWrapper
    collect = managers.collect_diff_guard_sources
    compiling: list[int] = []

    def wrap_module(self: Any, value: nn.Module) -> Any:
        if threading.get_ident() != thread:
            return wrap(self, value)
        marked = [getattr(variable_builder, name) for name in MARKED]
        for name in MARKED:
            setattr(variable_builder, name, None)
        try:
            return wrap(self, value)
        finally:
            for name, function in zip(MARKED, marked, strict=True):
                setattr(variable_builder, name, function)

    def add_fqn_info_for_inlined_modules(self: Any, *given: Any) -> None:
        if threading.get_ident() != thread:
            names_of(self, *given)

    def compile_and_call_fx_graph(self: Any, *given: Any) -> Any:
        if threading.get_ident() != thread:
            return compile_graph(self, *given)
        compiling.append(thread)
        try:
            return compile_graph(self, *given)
        finally:
            compiling.clear()

    def recompile_unless_compiling(self: Any) -> Any:
        return None if threading.get_ident() in compiling else recompile(self)

    def collect_diff_guard_sources(self: Any) -> Any:
        return self.diff_guard_sources if threading.get_ident() == thread else collect(self)

    instead: list[tuple[Any, str, Any]] = [
        (builder, "wrap_module", wrap_module),
        (OutputGraph, "add_fqn_info_for_inlined_modules", add_fqn_info_for_inlined_modules),
        (OutputGraph, "compile_and_call_fx_graph", compile_and_call_fx_graph),
        (fx.GraphModule, "recompile", recompile_unless_compiling),
        (managers, "collect_diff_guard_sources", collect_diff_guard_sources),
    ]
    before = [(kind, name, getattr(kind, name)) for kind, name, _ in instead]
    for kind, name, function in instead:
        setattr(kind, name, function)
    try:
        yield
    finally:
        for kind, name, function in before:
            setattr(kind, name, function)
