"""Lets one thread at a time call a `Sharded`.

A step writes weights in place and hands its state on. If another thread saved or made a step meanwhile, it would read
half-written values. No other rank could know which of two threads came first. So neither waits: the second one gets an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import current_thread
from typing import Any, TypeVar, cast

from fsdp_compiled.capture.global_modes import untraced

F = TypeVar("F", bound=Callable[..., Any])


def one_thread(method: F) -> F:
    """Raises ``RuntimeError`` if another thread is in such a call of the same object. The call is not traced.

    The call holds ``self.calling``, an ``RLock``, so the same thread may make calls inside of calls.
    """

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.calling.acquire(blocking=False):
            raise RuntimeError(
                f"{type(self).__name__}.{method.__name__} was called by the thread {current_thread().name!r} while "
                "another thread is in a call of the same one, which would be read or written half-way. Make all calls "
                "from one thread, in the same order on every rank; save(wait=False) writes in the background."
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self.calling.release()

    return cast(F, untraced(run))
