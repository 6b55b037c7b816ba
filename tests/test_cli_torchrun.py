"""`fsdp-compiled train` under torchrun: what rank 0 refuses, every rank says and ends with; none waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_folder_that_cannot_be_written_is_said_by_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--redirects=3"]
    logs = tmp_path / "logs"
    job = ["-m", "fsdp_compiled", "train", "--lower", "eager", "--out", str(tmp_path / "file" / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*run, "--log-dir", str(logs), *job], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode != 0
    first, second = (next(logs.rglob(f"{rank}/stderr.log")).read_text() for rank in range(2))
    for said in (first, second):
        assert "fsdp-compiled train: error:" in said and "cannot be written (Not a directory)" in said
        assert "Traceback" not in said
    assert "rank 0 failed" in second and "rank 0 failed" not in first
