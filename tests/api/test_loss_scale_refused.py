"""A loss scale, or clipping, that makes no sense is refused; the defaults are those of the `GradScaler`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp_compiled import LossScale, Policy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_scale": "static"}, 'Policy.loss_scale is .static.; expected None, "dynamic"'),
        ({"loss_scale": 0}, "Policy.loss_scale is 0"),
        ({"loss_scale": True}, "Policy.loss_scale is True"),
        ({"loss_scale": float("inf")}, "Policy.loss_scale is inf"),
        ({"clip_value": -1.0}, "Policy.clip_value is -1.0; expected a positive number"),
        ({"clip": 1.0, "clip_value": 1.0}, "both given; which comes first changes the result"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"init": 0.0},
        {"init": "big"},
        {"growth": 0.5},
        {"backoff": 2.0},
        {"backoff": 0},
        {"interval": 0},
        {"interval": 1.5},
    ],
)
def test_a_loss_scale_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"LossScale.{name} is"):
        replace(LossScale(), **given)


def test_the_defaults_are_those_of_the_grad_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")
    theirs = (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    scaling = Policy(loss_scale="dynamic").scaling
    assert scaling is not None
    assert (scaling.init, scaling.growth, scaling.backoff, scaling.interval) == theirs
