"""Layers of PyTorch's that a trace would take for others than they are, or could not go through, and what mends them.

Two faults of the decomposition of RNN, LSTM and GRU, ``torch._decomp.decompositions._rnn_helper``:

- It leaves out dropout between layers (torch 2.11 to 2.14): it checks ``num_layers < i - 1``, which is false for every
  layer ``i``. While a step is traced, layers are passed to it one by one, with `torch.dropout` between them, as the
  kernels in eager PyTorch do it.
- It gives the last states of an LSTM one dim too many (torch 2.11 and 2.12): [layers, 1, rows, features]. They are
  viewed in the shape of the given states.

Masks that are given to `nn.Transformer`, its encoder and its decoder: where ``is_causal`` is left out, PyTorch compares
the mask with the causal one, and reads the answer, which a program cannot. In a trace the answer is no: the mask is
then used as it is, and the result differs by rounding at most.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.source_lines import user_line
from fsdp_compiled.torch_private.names import find, replaced, substitute, uses

RECURRENT = "torch._decomp.decompositions._rnn_helper"
CAUSAL = "torch.nn.modules.transformer._detect_is_causal_mask"


def misread_layers(graph: fx.Graph) -> str | None:
    """Why a trace of this graph would compute something else than eager PyTorch; None where it would not."""
    if uses("dropout of recurrent layers"):
        return None
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            biases_layers_dropout_train = [one for one in node.args if isinstance(one, bool | int | float)]
            _, layers, dropout, train = biases_layers_dropout_train[:4]
            if layers > 1 and dropout and train:
                what = f"dropout between its {layers} layers, which a trace of PyTorch {torch.__version__} leaves out"
                cure = "make each layer a module of its own, with nn.Dropout between them"
            elif name == "lstm" and torch.__version__ < "2.13":
                what = f"last states, to which a trace of PyTorch {torch.__version__} gives a dim too many"
                cure = "use PyTorch 2.13 or later, or leave out FSDP_COMPILED_PLAIN=1"
            else:
                continue
            return f"{name} has {what}.\n{user_line(RuntimeError(node.stack_trace))}\n  Cure: {cure}."
    return None


def recurrent_layers_mended() -> AbstractContextManager[None]:
    """Inside, the decompositions of recurrent layers have their dropout."""
    return replaced("dropout of recurrent layers", (RECURRENT, _layers))


def use_masks() -> None:
    """From now on Dynamo traces `_is_causal` in the place of PyTorch's comparison of masks."""
    if uses("causal masks"):
        substitute(find(CAUSAL), _is_causal)


def _layers(
    pytorchs: Callable[..., Any],
    values: torch.Tensor,
    hidden: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer_fn: Any,
) -> tuple[torch.Tensor, list[Any]]:
    """Returns the same as ``pytorchs``: the last layer's output, [time, rows, features] or as ``batch_first`` says, and
    each layer's last hidden states, for each direction."""
    values = values.transpose(0, 1) if batch_first else values
    last: list[Any] = []
    directions = 2 if bidirectional else 1
    for layer in range(num_layers):
        own = slice(layer * directions, (layer + 1) * directions)
        if layer and dropout and train:
            values = torch.dropout(values, dropout, train=True)
        values, states = pytorchs(
            values, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer_fn
        )
        last += pytree.tree_map(_like, states, list(hidden[own]))
    return (values.transpose(0, 1) if batch_first else values), last


def _like(state: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return state if state.shape == given.shape else state.view(given.shape)


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True
