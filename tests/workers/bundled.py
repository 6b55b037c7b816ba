"""A training script of two layers, run as any is: what it compiled, and with how many calls of the C++ compiler.

python bundled.py RESULT STEPS
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

compilations: list[str] = []
_start = subprocess.Popen.__init__


def counted(self: Any, args: Any, *others: Any, **named: Any) -> None:
    said = args if isinstance(args, str) else " ".join(map(str, args))
    if any(source in said for source in (".cpp", ".hpp", " -o ")):
        compilations.append(said)
    _start(self, args, *others, **named)


subprocess.Popen.__init__ = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    from fsdp_compiled import compile_sharded

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).square().mean())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses, expected = [], []
    for step in range(int(sys.argv[2])):
        x = torch.arange(16.0).view(2, 8) / (16 + step)
        losses.append(float(sharded.step(x)))
        theirs.zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        theirs.step()
        expected.append(float(loss))
    found = {
        "losses": losses,
        "expected": expected,
        "compilations": compilations,
        "pieces": sharded.lowered.count("from the cache on disk"),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
