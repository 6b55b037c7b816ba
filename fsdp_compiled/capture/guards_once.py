"""Dynamo builds its guards once, where it is told which of them to keep.

    Dynamo:  all guards -> built -> which are kept? -> those built again
    here:    all guards ----------> which are kept? -> those built

Asked which guards are kept, Dynamo builds all of them first, since a filter may ask what they were derived to. Ours
(`guards.Recorder`) asks for what is there before any is built: names, kinds, and the values that they look at, which
Dynamo reads by their sources. The guard on sizes is built both times, kept or not: to build it can raise an error.

Written for torch 2.11 to 2.13, where the first building alone is not given the filter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from fsdp_compiled.torch_private.dynamo import CheckFunctionManager

FIRST = ("SHAPE_ENV",)  # what may raise


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """Inside, guards of what this thread traces are built when it is known which of them are kept."""
    before, thread = CheckFunctionManager.build_guards, threading.get_ident()

    def build_guards(self: Any, guards: Any, *rest: Any, **named: Any) -> Any:
        if threading.get_ident() == thread and "guard_filter_fn" not in named:
            guards = [guard for guard in guards if guard.create_fn_name() in FIRST]
        return before(self, guards, *rest, **named)

    CheckFunctionManager.build_guards = build_guards
    try:
        yield
    finally:
        CheckFunctionManager.build_guards = before
