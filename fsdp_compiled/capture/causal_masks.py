"""Masks that are given to `nn.Transformer`, its encoder and its decoder.

Where ``is_causal`` is left out, PyTorch compares the mask with the causal one, and reads the answer, which a program
cannot. In a trace the answer is no: the mask is then used as it is, and the result differs by rounding at most.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_compiled.torch_private.names import find, uses

NAME = "torch.nn.modules.transformer._detect_is_causal_mask"


_substituted: list[Any] = []


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def substitute() -> None:
    """From now on Dynamo traces this in the place of PyTorch's function. Runs once a process."""
    if uses("causal masks") and not _substituted:
        _substituted.append(torch.compiler.substitute_in_graph(find(NAME), skip_signature_check=True)(_is_causal))
