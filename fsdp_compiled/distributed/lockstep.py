"""Runs code with collectives so that a failure of one rank between two of them is an error on every rank.

A rank that failed does not come to the next collective, where the others would wait for it forever. So the code is a
generator that says, before each of its collectives, which one is next:

    def work():
        flat = pack(...)                     may fail here
        yield "broadcast of root"            all ranks are here, or all raise
        dist.broadcast(flat, 0)
        ...                                  and here
        found = yield Exchange("names", own)     what each rank gave, by rank
        return result                        all ranks have come to the end, or all raise
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from fsdp_compiled.distributed.mesh import Mesh, agree, exchange

T = TypeVar("T")


class Exchange(NamedTuple):
    """A collective that `lockstep` makes itself. Each rank gives a picklable value, and gets those of all, by rank."""

    what: str
    value: Any


Work = Generator[str | Exchange, Any, T]


def lockstep(mesh: Mesh, what: str, work: Work[T]) -> T:
    """Returns what ``work`` returns, if every rank comes to its end by the same collectives.

    Otherwise every rank raises at the same place. The rank that failed raises its own exception, the others a
    `RankError` that quotes it. If their next collectives differ, all raise a `RankError`. Each collective costs one
    small reduction, between hosts.
    """
    answer = None
    while True:
        step: str | Exchange = ""
        results, failure = [], None
        try:
            step = work.send(answer)
        except StopIteration as end:
            results, step = [end.value], "the end"
        except BaseException as error:  # one that interrupts, too, would leave the others waiting
            failure = error
        try:
            agree(mesh, what, step.what if isinstance(step, Exchange) else step, failure)
        finally:
            failure = None  # it holds this frame
        if results:
            return results[0]
        answer = exchange(step.value, mesh) if isinstance(step, Exchange) else None
