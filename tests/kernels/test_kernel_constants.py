"""What decides of a compiled kernel stands in the text that Triton keeps it under."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("triton")

from fsdp_compiled.kernels import flatten, update
from fsdp_compiled.kernels.launch import Launch, group_constants
from fsdp_compiled.kernels.layout import Group
from tests.kernel_cases import ADAM


def launches() -> list[Launch]:
    shards = [torch.zeros(1037), torch.zeros(8)]
    scalars = torch.zeros((), dtype=torch.float64), torch.zeros(())
    gradients = [torch.zeros(64, 48).t(), torch.zeros(48)]
    return [
        *flatten.launches(torch.zeros(4096), gradients, [0, 3072]),
        *update.adam_launches(shards, shards, shards, shards, [], [], *scalars, **ADAM),
    ]


def test_constants_are_tuples_names_and_numbers_that_hooks_can_write_as_json() -> None:
    """`triton.runtime.jit.serialize_specialization_data` is what `jit_cache_hook` is given."""
    for launch in launches():
        for name in ("GROUPS", "OPTIONS"):
            if name in launch.given:
                assert json.loads(json.dumps(launch.given[name]))
                assert "object at 0x" not in str(launch.given[name])


@pytest.mark.parametrize(("name", "value"), [("places", (7, 7)), ("outer", (9,)), ("wide", True)])
def test_what_is_worked_out_is_a_part_of_the_key(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edited package runs its own kernels, not those of another day."""
    before = [str(launch.given) for launch in launches()]
    monkeypatch.setattr(Group, name, property(lambda _: value))
    group_constants.cache_clear()  # the edited package runs in another process
    after = [str(launch.given) for launch in launches()]
    group_constants.cache_clear()
    assert before != after


def test_every_property_that_a_kernel_may_ask_for_is_there() -> None:
    assert {name for name, value in vars(Group).items() if isinstance(value, property)} == set(Group.DERIVED)
    options = dict(launches()[-1].given["OPTIONS"])
    assert options["fresh1"] == 1 - 0.9 and options["log_beta2"] == math.log(0.999)
