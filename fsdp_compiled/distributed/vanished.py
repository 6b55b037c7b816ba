"""Which rank it is whose connection broke.

Ranks that make the same call tell the board the same, and one that is killed in it says no last word. Gloo's error has
the address at the other end of the connection that broke, and each rank's addresses are on the board. Where an error
has none (NCCL), the ranks are asked for signs of life: a process that ended gives no other one.
"""

from __future__ import annotations

import re
import time

from fsdp_compiled.distributed import watchdog
from fsdp_compiled.distributed.call_store import Board
from fsdp_compiled.distributed.connections import read

ADDRESS = re.compile(r"\[([^\[\]\s]+)\]:(\d+)")


def vanished(board: Board, error: str) -> list[int]:
    """The ranks that are gone, as far as it can be found out; takes up to some seconds."""
    others = [rank for rank in range(board.world) if rank != board.rank]
    peers = {(host.removeprefix("::ffff:"), int(port)) for host, port in ADDRESS.findall(error)}
    found = []
    for rank in others if peers else []:
        ends = read(board.get(f"{rank}/connections") or "[]")
        if any((here.removeprefix("::ffff:"), port) in peers for here, port, _, _ in ends):
            found.append(rank)
    return found or _still(board, others)


def _still(board: Board, ranks: list[int]) -> list[int]:
    """Those who give no sign of life for longer than they should."""
    before = {rank: pulse for rank in ranks if (pulse := board.pulse(rank)) is not None}
    if before:
        time.sleep(1.5 * watchdog.BEAT + 1)
    return [rank for rank, pulse in before.items() if board.pulse(rank) == pulse]
