"""The order of files: those that take longest first, so that no process is left alone with one at the end."""

from __future__ import annotations

import gc

import pytest

# More than half a minute of processor time each, the longest first.
LONG = (
    "test_memory", "test_parity", "test_meaning", "test_cli_train", "test_ranks", "test_aot_cache", "test_fuzz",
    "test_failed_calls", "test_lowering", "test_shape", "test_compute_copies", "test_third_party_optimizers",
    "test_api", "test_transformers", "test_guards", "test_direct_gradients", "test_modes", "test_combinations",
    "test_loss_scale", "test_cuda_graph", "test_examples", "test_cli_bench", "test_kernels_interpreted",
    "test_partition",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage needs to look through it, half a second each."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)
