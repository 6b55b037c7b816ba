"""`fsdp-compiled` on ranks that something else has started: ``cli.py RESULT COMMAND...``; the result is, of each rank,
its exit status and what it printed. {rank} in the command is the rank."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from fsdp_compiled.cli import main

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
    try:
        status = main([word.replace("{rank}", str(rank)) for word in sys.argv[2:]])
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.PrefixStore("told", dist.TCPStore(host, port, is_master=False))  # no process group need be left
store.set(str(rank), json.dumps([status, said.getvalue()]))
if rank == 0:
    Path(sys.argv[1]).write_text(json.dumps([json.loads(store.get(str(other))) for other in range(world)]))
    store.set("read", "")
else:
    store.wait(["read"])
