"""Masks that are given to `nn.Transformer`, its encoder and its decoder.

Where ``is_causal`` is left out, PyTorch compares the mask with the causal one, and reads the answer, which a program
cannot. In a trace the answer is no: the mask is then used as it is, and the result differs by rounding at most.
"""

from __future__ import annotations

from typing import Any

from fsdp_compiled.torch_private.names import find, substitute, uses

NAME = "torch.nn.modules.transformer._detect_is_causal_mask"


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def use_masks() -> None:
    """From now on Dynamo traces this in the place of PyTorch's function."""
    if uses("causal masks"):
        substitute(find(NAME), _is_causal)
