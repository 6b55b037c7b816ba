"""An object that a trace reached by two names stays one object.

    STATE.factor                 a global          guards: STATE.factor == 2.0
    self.layers[0].state         the same object   guards: none, in Dynamo; here: self.layers[0].state is that object

Dynamo knows the object when it comes to it again, and looks at nothing that the second name leads to. Where both begin
at arguments, or both at globals, it notes that they are one (DUPLICATE_INPUT); where one does and the other does not,
it notes nothing, and another object that is put there later is not seen. Written for torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from fsdp_compiled.torch_private.dynamo import GuardBuilder, Source, variable_builder


@contextlib.contextmanager
def asked_again() -> Iterator[None]:
    """Inside, what this thread's trace reaches by an argument's name and by a global's is asked of the second."""
    before, thread = variable_builder.make_dupe_guard, threading.get_ident()

    def make_dupe_guard(source: Source, known: Source | None) -> Any:
        guard = before(source, known)
        if threading.get_ident() != thread or guard is not None or known is None or known == source:
            return guard
        return GuardBuilder.ID_MATCH

    variable_builder.make_dupe_guard = make_dupe_guard
    try:
        yield
    finally:
        variable_builder.make_dupe_guard = before
