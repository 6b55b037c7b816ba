"""Two ranks on two hosts that share one cache folder: who compiles what, where one is slow, dies while it compiles,
and at the start after that.

shared_folder.py RESULT, in a process of its own
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.cpu_vec_isa import pick_vec_isa

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.lower import inductor
from tests.killable_ranks import Forked
from tests.toys import squares

WORLD, LOCAL, VICTIM, LIMIT = 2, 1, 1, 90.0


def build(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(width, width), nn.Tanh())
    model = nn.Sequential(block, nn.Linear(width, 3))
    return model, torch.optim.AdamW(model.parameters())


def batch(width: int, rank: int) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(rank))


def losses(width: int, rank: int, lower: str = "inductor") -> list[float]:
    model, optimizer = build(width)
    policy = Policy(lower=lower, bucket_mb=0)
    sharded = compile_sharded(model, optimizer, loss=squares, policy=policy, units=["0"])
    return [sharded.step(batch(width, rank)).item() for _ in range(2)]


def plain(width: int) -> list[float]:
    """The same in plain PyTorch, on the batches of all ranks."""
    model, optimizer = build(width)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        value = squares(model, torch.cat([batch(width, rank) for rank in range(WORLD)]))
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def work(rank: int, case: str, width: int) -> int:
    """What a rank did, as it prints it. ``slow``: the victim's compiler takes three seconds more; ``killed``: the
    victim dies with half a library written."""
    host = f"host-{rank // LOCAL}"
    own = Path(os.environ["FOLDER"], host)
    own.mkdir(exist_ok=True)
    tempfile.tempdir = str(own)
    os.environ |= {"LOCAL_RANK": str(rank % LOCAL), "LOCAL_WORLD_SIZE": str(LOCAL)}
    socket.gethostname = lambda: host  # type: ignore[assignment]
    done: Counter[str] = Counter()
    call, artifact = CppBuilder.build, inductor._artifact

    def building(self: CppBuilder) -> None:
        place = self.get_target_file_path()
        if place.endswith(".main.so"):
            done["libraries"] += 1
            if rank == VICTIM and case == "slow":
                time.sleep(3)
            if rank == VICTIM and case == "killed":
                Path(place).write_bytes(b"\x7fELF, and no more")
                os.kill(os.getpid(), signal.SIGKILL)
        call(self)

    def compiling(piece: Any) -> Any:
        done["pieces"] += 1
        return artifact(piece)

    CppBuilder.build = building  # type: ignore[method-assign]
    inductor._artifact = compiling
    try:
        dist.init_process_group("gloo")
        print(json.dumps({"losses": losses(width, rank), **done, "plain": plain(width)}), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}", **done}), flush=True)
        return 3
    return 0


def run(case: str, width: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = Forked(WORLD, lambda rank: work(rank, case, width), Path(folder), {"FOLDER": folder})
        others = [rank for rank in range(WORLD) if case != "killed" or rank != VICTIM]
        ended = ranks.wait(LIMIT, lambda codes: all(codes[rank] is not None for rank in others))
        codes = list(ranks.poll())
        ranks.kill()
        # A rank that ends may be told after its own line that nobody goes on; one that is busy is ended by its
        # watchdog, which says why at the end.
        texts = [ranks.said(rank) for rank in range(WORLD)]
        lines = [[line for line in text.splitlines() if line.startswith("{")][-1:] for text in texts]
        said = [mine or [text[text.find("RankError") :]] for mine, text in zip(lines, texts, strict=True)]
        return {"ended": ended, "codes": codes, "said": said}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as shared:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = shared
        pick_vec_isa()  # once, for all forks
        cases = {"slow": 16, "killed": 24, "after": 24}
        Path(sys.argv[1]).write_text(json.dumps({case: run(case, width) for case, width in cases.items()}))
