"""The order of files: those that take longest first, so that no process is left alone with one at the end."""

from __future__ import annotations

import pytest

# More than half a minute of processor time each, the longest first.
LONG = (
    "test_parity", "test_kernels_interpreted", "test_third_party_optimizers", "test_memory", "test_failed_calls",
    "test_cli_train", "test_lowering", "test_ranks", "test_transformers", "test_aot_cache", "test_api", "test_meaning",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
