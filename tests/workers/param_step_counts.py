"""Two tasks in turns, and rows of both, on two ranks: the update is that of one process on all rows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from fsdp_compiled import Policy, compile_sharded
from tests.chosen import examples
from tests.launch import answer
from tests.two_tasks import Heads, loss_of, optimizer_of

ROWS = ((False,), (True,), (True, False), (False, True), (False, False), (True,))


def trained_alike(shard: str, accumulate: str, rows: tuple[tuple[bool, ...], ...]) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Heads()
    model = copy.deepcopy(plain)
    theirs, mine = (optimizer_of("AdamW", one, True) for one in (plain, model))
    policy = Policy(lower="eager", shard=shard, accumulate=accumulate)
    sharded = compile_sharded(model, mine, loss=loss_of, policy=policy)
    for row in rows:
        batches = [(torch.randn(6, 4), both) for both in row]
        theirs.zero_grad()
        for x, both in batches:
            (loss_of(plain, x, both) / len(batches)).backward()
        theirs.step()
        own = [(x[3 * rank : 3 * rank + 3], both) for x, both in batches]
        for batch in own[:-1]:
            sharded.accumulate(*batch)
        sharded.step(*own[-1])
    for name, value in sharded.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-7, msg=f"{policy} {name}")


def refused_by_all() -> None:
    torch.manual_seed(0)
    model = Heads()
    sharded = compile_sharded(model, optimizer_of("AdamW", model, False), loss=loss_of, policy=Policy(lower="eager"))
    sharded.step(torch.randn(3, 4), False)
    with pytest.raises(ValueError, match="for the first time"):
        sharded.step(torch.randn(3, 4), True)
    sharded.step(torch.randn(3, 4), False)


def main() -> bool:
    ways = [("zero3", "shards"), ("ddp", "full"), ("zero3", "full"), ("ddp", "shards")]
    for shard, accumulate in ways[: examples(2, 4)]:
        whole = accumulate == "full" and examples(True, False)  # it shows in rows of two alone
        trained_alike(shard, accumulate, ROWS[2:4] if whole else ROWS)
    refused_by_all()
    return True


if __name__ == "__main__":
    answer(main)
