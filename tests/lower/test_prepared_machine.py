"""What the C++ compiler does once a machine is done when the machine is set up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = "from fsdp_compiled.lower.inductor import prepare_machine; prepare_machine()"
STEPS = """
import torch
from fsdp_compiled import Policy, compile_sharded
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
loss = lambda model, x: model(x).square().mean()
optimizer = torch.optim.SGD(model.parameters())
compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="inductor")).step(torch.ones(2, 8))
"""
COMPILER = """#!/bin/sh
echo "$*" >> {calls}
exec {compiler} "$@"
"""


@pytest.mark.exhaustive
def test_a_machine_that_was_prepared_compiles_kernels_alone(tmp_path: Path) -> None:
    """The control is not prepared: it tries the compiler first, and each of its libraries reads the header."""

    def calls(folder: Path, *programs: str) -> list[str]:
        """What the last of them calls the compiler for."""
        (folder / "temporary").mkdir(parents=True)
        said, compiler = folder / "calls", folder / "g++"
        compiler.write_text(COMPILER.format(calls=said, compiler=shutil.which(os.environ.get("CXX", "g++"))))
        compiler.chmod(0o755)
        places = {"TORCHINDUCTOR_CACHE_DIR": folder / "cache", "TMPDIR": folder / "temporary", "CXX": compiler}
        for program in programs:
            said.write_text("")
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(one) for name, one in places.items()}
            subprocess.run([sys.executable, "-P", "-c", program], env=environment, check=True)
        return [line for line in said.read_text().splitlines() if ".cpp" in line]

    prepared = calls(tmp_path / "prepared", PREPARE, STEPS)
    control = calls(tmp_path / "control", STEPS)
    assert len(prepared) == 1 and "precompiled_headers" in prepared[0]
    assert len(control) > 1 and not any("precompiled_headers" in line for line in control)
