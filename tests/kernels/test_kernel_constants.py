"""What decides of a compiled kernel stands in the text that Triton keeps it under."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from fsdp_compiled.kernels import flatten, update
from fsdp_compiled.kernels.launch import Launch, constants, group_constants
from fsdp_compiled.kernels.layout import Group
from fsdp_compiled.kernels.reference import Adam

ADAM = Adam(0.9, 0.999, 1e-8, 0.1, decoupled=True, maximize=False)


def launches() -> list[Launch]:
    shards = [torch.zeros(1037), torch.zeros(8)]
    scalars = torch.zeros((), dtype=torch.float64), torch.zeros(())
    gradients = [torch.zeros(64, 48).t(), torch.zeros(48)]
    return [
        *flatten.launches(torch.zeros(4096), gradients, [0, 3072], None, None),
        *update.adam_launches(shards, shards, shards, shards, [], [], *scalars, options=ADAM),
    ]


def test_constants_are_tuples_names_and_numbers_that_hooks_can_write_as_json() -> None:
    """`triton.runtime.jit.serialize_specialization_data` is what `jit_cache_hook` is given."""
    for launch in launches():
        for name in ("GROUPS", "OPTIONS"):
            if name in launch.given:
                assert json.loads(json.dumps(launch.given[name]))
                assert "object at 0x" not in str(launch.given[name])


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(Group, "places", (7, 7)), (Group, "outer", (9,)), (Group, "wide", True), (Adam, "fresh1", 0.5),
     (Adam, "log_beta2", -2.0)],
)  # fmt: skip
def test_what_is_worked_out_is_a_part_of_the_key(
    kind: type, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edited package runs its own kernels, not those of another day."""
    before = [str(launch.given) for launch in launches()]
    monkeypatch.setattr(kind, name, property(lambda _: value))
    group_constants.cache_clear()  # the edited package runs in another process
    after = [str(launch.given) for launch in launches()]
    group_constants.cache_clear()
    assert before != after


def test_every_property_that_a_kernel_may_ask_for_is_there() -> None:
    for kind in (Group, Adam):
        properties = {name for name, value in vars(kind).items() if isinstance(value, property)}
        assert properties == set(getattr(kind, "DERIVED", ()))
    assert dict(constants(ADAM))["fresh1"] == 1 - 0.9
