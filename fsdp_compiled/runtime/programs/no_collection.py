"""Stops Python's garbage collector while many long-lived objects are made.

    compile_sharded   takes a model over      tens of objects a parameter
    the first call    makes a program         a million

Searching them for garbage again and again takes a tenth of that time. Afterwards all of them count as old at once,
where Python would look at each first. Garbage among them waits for a full collection.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_grown = {"program": -1, "model": -1}  # for each, the number of full collections when its objects were last made old


@contextmanager
def no_collection(of: str = "program") -> Iterator[None]:
    """A context without garbage collection."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _grow_old(of)
            gc.enable()


def _grow_old(of: str) -> None:
    """Makes objects old, once between two full collections: at most one program's and one model's garbage waits."""
    collections = gc.get_stats()[-1]["collections"]
    if collections != _grown[of]:
        _grown[of] = collections
        if not gc.get_freeze_count():  # objects that the user froze stay frozen; a million take a tenth of a second
            gc.freeze()
            gc.unfreeze()
