"""The order of files, those that take longest first, so that no process is left alone with one at the end; when to
leave off; and what files leave as it was."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.forked_ranks import no_latency, seldom_collect

START = time.monotonic()

# More than fourteen seconds of processor time each: first those that start ranks, the longest first, and beside them
# those that wait more than they compute.
LONG = (
    "test_verify", "test_lost_rank", "test_beside_fsdp2", "test_hosts", "test_fully_shard", "test_cli_resume",
    "test_tensor_parallel_models", "test_failed_calls", "test_tensor_parallel", "test_local_steps", "test_plan_search",
    "test_uneven_parts", "test_tensor_parallel_loop", "test_shared_folder",
    "test_parity", "test_disagreements", "test_checkpoint_ranks", "test_memory", "test_fuzz", "test_whole_matrices",
    "test_merged_units", "test_headroom", "test_cli_train", "test_lowering", "test_private_names",
    "test_tensor_parallel_checkpoints", "test_guards", "test_integrations", "test_expert_parallel",
    "test_kernels_compiled", "test_whole_matrices_edges", "test_examples", "test_cli_bench", "test_bundle",
    "test_modes", "test_direct_gradients", "test_dynamic_shapes", "test_cli_check", "test_api",
    "test_third_party_optimizers", "test_kernels_interpreted", "test_repeated_calls", "test_equal_blocks",
    "test_compute_copies", "test_kernels_inserted", "test_sequence_attention", "test_meaning",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-test-after", type=float, metavar="SECONDS", help="skip tests that would begin later")


def pytest_configure() -> None:
    seldom_collect()


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("no_test_after")
    if limit is not None and time.monotonic() - START > limit:
        pytest.skip(f"{limit:.0f} seconds are over")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage needs to look through it, half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """`fully_shard` on one process starts a process group, as FSDP2's does: the files after it start their own."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def the_way_of_captures_is_known() -> None:
    """It is found out once on a machine, by captures that tests would count."""
    from fsdp_compiled.capture.plain_way import trial

    assert trial() == ""
    no_latency()


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Those that write a checkpoint's files wait until it is set."""
    from fsdp_compiled.runtime.checkpoint import data_file

    go = threading.Event()
    write = data_file.write
    monkeypatch.setattr(data_file, "write", lambda *given: (go.wait(60), write(*given))[1])
    return go
