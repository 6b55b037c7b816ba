"""Two ranks over gloo: each sends the other's half, once, out of the memory where it is and into that where it goes.

    gather, rank 0     shard -> rank 1            full = [shard | rank 1's]
    reduce, rank 0     flat  = [own | other's] -> rank 1          total = rank 1's + own

gloo gathers into a copy of the result, and has no reduce-scatter: PyTorch all-reduces a copy of the buffer and keeps a
slice. Between two ranks both are one message each way, which copies nothing. Two numbers have one sum, so that values
are gloo's, bit for bit. The sum is made where the wait is.

Where parameters are set apart (`plan.owners`), slices end in padding, of zeros. Both ranks know where, and do not send
it: `filled`.

A gather is an ``all_to_all`` with one half to send, a reduction two messages with a tag, so that a gather of one rank
and a reduction of the other never meet: where a rank leaves out a call, it would take the other's gradient for weights.

Relies on ``torch._C._distributed_c10d._register_work``, in torch 2.11 to 2.14, for works that `wait_tensor` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work

REDUCE = 0x72656475  # a tag; a script's own messages have 0 where it gives none
_waited_for: set[_Sum] = set()  # what PyTorch's table of works alone may not keep alive


def gather(tensor: Tensor, group: str, filled: Sequence[int] = (), full: Tensor | None = None) -> Tensor:
    """``[n]`` on each of two ranks -> ``full``, ``[2 * n]``, which is to be waited for.

    ``filled``: by rank, how many of its n elements there are; the others are zero, and are not sent.
    """
    full = tensor.new_empty(2 * len(tensor)) if full is None else full
    ranks = dist.distributed_c10d._resolve_process_group(group)
    own, other = _halves(full, ranks)
    own.copy_(tensor)
    mine = theirs = len(tensor)
    if filled:
        mine, theirs = _lengths(ranks, filled)
        other[theirs:].zero_()
        other, tensor = other[:theirs], tensor[:mine]
    got, sent = ([0, theirs], [0, mine]) if ranks.rank() == 0 else ([theirs, 0], [mine, 0])
    _register_work(full, ranks.alltoall_base(other, tensor, got, sent, dist.AllToAllOptions()))
    return full


def reduce(flat: Tensor, how: str, group: str, filled: Sequence[int] = ()) -> Tensor:
    """``[2 * n]`` on each of two ranks -> ``[n]``, the sum or the mean of what both have for this one; zeros in the
    padding."""
    ranks = dist.distributed_c10d._resolve_process_group(group)
    own, other = _halves(flat, ranks)
    total, there = torch.empty_like(own), 1 - ranks.rank()
    got = total
    if filled:
        mine, theirs = _lengths(ranks, filled)
        total[mine:].zero_()
        own, got, other = own[:mine], total[:mine], other[:theirs]
    work = _Sum([ranks.send([other], there, REDUCE), ranks.recv([got], there, REDUCE)], total, got, own, how)
    _waited_for.add(work)
    _register_work(total, work)
    return total


def _halves(whole: Tensor, ranks: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """This one's of two ranks, and the other's."""
    first, second = whole.chunk(2)
    return (first, second) if ranks.rank() == 0 else (second, first)


def _lengths(ranks: dist.ProcessGroup, filled: Sequence[int]) -> tuple[int, int]:
    """Of this rank's part and the other's, as far as there is anything in it."""
    first, second = filled
    return (first, second) if ranks.rank() == 0 else (second, first)


class _Sum(dist._Work):
    """Over when what the other rank has sent is there, and what is here is added to it."""

    def __init__(self, works: list[dist.Work], total: Tensor, got: Tensor, own: Tensor, how: str) -> None:
        super().__init__()
        self._left: tuple[list[dist.Work], Tensor, Tensor, Tensor, str] | None = (works, total, got, own, how)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._left is None:
            return True
        (works, total, got, own, how), self._left = self._left, None
        _waited_for.discard(self)
        for work in reversed(works):
            work.wait()
        got.add_(own)
        if how == "avg":
            total.div_(2)
        return True
