"""Dynamo builds its guards once, where it is told which of them to keep, and does not time them.

    Dynamo:  all guards -> built -> which are kept? -> those built again
    here:    all guards ----------> which are kept? -> those built

Asked which guards are kept, Dynamo builds all of them first, since a filter may ask what they were derived to. Ours
(`guards.Recorder`) asks for what is there before any is built: names, kinds, and the values that they look at, which
Dynamo reads by their sources. The guard on sizes is built both times, kept or not: to build it can raise an error.

Dynamo then measures for its log how long the guards take, after it has emptied the processor's caches: 25 ms of a small
model's 280.

Written for torch 2.11 to 2.14, where the first building alone is not given the filter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from fsdp_compiled.torch_private.dynamo import CheckFunctionManager, guard_building

FIRST = ("SHAPE_ENV",)  # what may raise


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """Inside, guards of what this thread traces are built when it is known which of them are kept, and not timed."""
    before, thread = CheckFunctionManager.build_guards, threading.get_ident()
    measure = guard_building.profile_guard_manager

    def build_guards(self: Any, guards: Any, *rest: Any, **named: Any) -> Any:
        if threading.get_ident() == thread and "guard_filter_fn" not in named:
            guards = [guard for guard in guards if guard.create_fn_name() in FIRST]
        return before(self, guards, *rest, **named)

    def latency(*given: Any) -> float:
        return 0.0 if threading.get_ident() == thread else measure(*given)

    CheckFunctionManager.build_guards = build_guards
    guard_building.profile_guard_manager = latency
    try:
        yield
    finally:
        CheckFunctionManager.build_guards = before
        guard_building.profile_guard_manager = measure
