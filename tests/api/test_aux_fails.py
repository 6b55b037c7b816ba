"""Two real ranks: where a result cannot be put together on one of them, its call was made all the same.

The user's class of aux raises when the program has run. That rank alone raises, its state is what it would have been,
and the ranks stay in step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import results_of

WORKER = Path(__file__).parents[1] / "workers" / "aux_fails.py"
CALLS = ("step", "apply", "accumulate", "value_and_grad", "__call__")
results = results_of(WORKER, 2, *CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_that_rank_alone_raises_and_all_go_on_as_if_it_had_not(results: dict[str, Any], name: str) -> None:
    for rank, answer in enumerate(answer["result"] for answer in results[name]):
        failed, control = answer["failed"], answer["control"]
        assert failed["errors"] == (["LookupError: cannot be put together"] if rank else [])
        assert failed["made"] == (2 if rank else 3) and (control["errors"], control["made"]) == ([], 3)
        for what in ("weights", "state", "step"):
            assert failed[what] == control[what]
    assert results[name][0]["result"]["control"]["weights"]
