"""An object that a trace reached by two names stays one object.

    STATE.factor                 a global          guards: STATE.factor == 2.0
    self.layers[0].state         the same object   guards: none, in Dynamo; here: self.layers[0].state is STATE

Dynamo knows the object when it comes to it again, and looks at nothing that the second name leads to. Where both begin
at arguments, or both at globals, it notes that they are one (DUPLICATE_INPUT); where one does and the other does not,
it notes nothing, and of a closure's cell that it knows it never does: another object that is put there later is not
seen. Here it notes it of all of them; what is there under either name may be another object, as long as it is one.
Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from fsdp_compiled.torch_private.dynamo import (
    ClosureSource,
    GetItemSource,
    GuardBuilder,
    Source,
    UserFunctionVariable,
    install_guard,
)
from fsdp_compiled.torch_private.names import attribute, uses


@contextlib.contextmanager
def asked_again() -> Iterator[None]:
    """Inside, what this thread's trace reaches by two names is asked of the second as well."""
    if not uses("one object"):
        yield
        return
    builder, name = attribute("torch._dynamo.variables.builder.make_dupe_guard")
    dupe, bind, thread = getattr(builder, name), UserFunctionVariable.bind_args, threading.get_ident()

    def make_dupe_guard(source: Source, known: Source | None) -> Any:
        guard = dupe(source, known)
        if threading.get_ident() != thread or guard is not None or known is None or known == source:
            return guard
        return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=known)

    def bind_args(self: Any, parent: Any, *given: Any) -> Any:
        source = self.get_source() if threading.get_ident() == thread else None
        for place, cell in enumerate(self.fn.__closure__ or ()) if source is not None else ():
            if cell in parent.output.side_effects:
                of_cell = GetItemSource(ClosureSource(source), place)
                guard = make_dupe_guard(of_cell, parent.output.side_effects[cell].source)
                if guard is not None:
                    install_guard(of_cell.make_guard(guard))
        return bind(self, parent, *given)

    setattr(builder, name, make_dupe_guard)
    UserFunctionVariable.bind_args = bind_args
    try:
        yield
    finally:
        UserFunctionVariable.bind_args = bind
        setattr(builder, name, dupe)
