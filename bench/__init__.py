"""`fsdp-compiled bench`: the same model and batches under this package and under its rivals, in one run.

    options -> start (the launching process) -> measure (each rank) -> result.json -> summary -> table, plot

`presets` says what is trained, `rivals` by whom, `observe` reads one step's profile, `network` makes gloo as slow
as a real wire, and `hosts` gives ranks a real one.

What a clone measures for its own documents is run as a module: `run_all` every result of the table, `tables` the tables
of the documents, `record` a training run; on a GPU, `gpu_step` (its models and
rivals in `gpu_models` and `gpu_rivals`) and `gpu_kernels`, all by ``bench/gpu.sh``. They read and write
``bench/results``.
"""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parent / "results"  # of a clone; no part of an installed package
