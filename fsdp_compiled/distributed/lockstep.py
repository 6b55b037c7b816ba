"""Code with collectives in it that may fail on one rank, between any two of them.

A rank that failed does not come to the next collective, where the others would wait for it for ever. So the code is a
generator that says, before each of its collectives, which one is next:

    def work():
        flat = pack(...)                     may fail here
        yield "broadcast of root"            all ranks are here, or all raise
        dist.broadcast(flat, 0)
        ...                                  and here
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from fsdp_compiled.distributed.mesh import Mesh, agree

T = TypeVar("T")


def lockstep(mesh: Mesh, what: str, work: Generator[str, None, T]) -> T:
    """What ``work`` returns, if every rank comes to its end by the same collectives.

    Else every rank raises at the same place: the one that failed its own exception, the others a `RankError` that
    quotes it; or all a `RankError`, if their next collectives differ. One small exchange a collective, between hosts.
    """
    while True:
        coming, results, failure = "", [], None
        try:
            coming = next(work)
        except StopIteration as end:
            coming, results = "the end", [end.value]
        except BaseException as error:  # one that interrupts, too, would leave the others waiting
            failure = error
        try:
            agree(mesh, what, coming, failure)
        finally:
            failure = None  # which holds this frame
        if results:
            return results[0]
