"""Dropout between the layers of RNN, LSTM and GRU, which PyTorch's decomposition of them leaves out.

``torch._decomp.decompositions._rnn_helper`` (torch 2.11 to 2.14) sets its ``dropout`` to 0 before the first layer: it
asks whether ``num_layers < i - 1``, which no layer ``i`` is. While a step is traced, several layers with dropout are
given to it one by one, with `torch.dropout` between them, as the kernels in eager PyTorch have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx

from fsdp_compiled.capture.source_lines import user_line
from fsdp_compiled.torch_private.names import attribute, find, uses

NAME = "torch._decomp.decompositions._rnn_helper"
_PYTORCHS = find(NAME)


def lost_dropout(graph: fx.Graph) -> str | None:
    """Why a trace of this graph would leave out dropout that eager PyTorch has; None where it would not."""
    if uses("dropout of recurrent layers"):
        return None
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            biases_layers_dropout_train = [one for one in node.args if isinstance(one, bool | int | float)]
            _, layers, dropout, train = biases_layers_dropout_train[:4]
            if layers > 1 and dropout and train:
                return (
                    f"{node.target.__name__} has dropout between its {layers} layers, which a trace of PyTorch "
                    f"{torch.__version__} leaves out.\n{user_line(RuntimeError(node.stack_trace))}\n"
                    "  Cure: make each layer a module of its own, with nn.Dropout between them."
                )
    return None


@contextmanager
def dropout_between_layers() -> Iterator[None]:
    """Inside, the decompositions of recurrent layers have their dropout."""
    if not uses("dropout of recurrent layers"):
        yield
        return
    with mock.patch.object(*attribute(NAME), _layers):
        yield


def _layers(
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
    """What `_PYTORCHS` returns: the last layer's output, [time, rows, features] or as ``batch_first`` says, and each
    layer's last hidden state, of both directions."""
    if not (train and dropout and num_layers > 1):
        return _PYTORCHS(
            values, hidden, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, layer_fn
        )
    values = values.transpose(0, 1) if batch_first else values
    last: list[Any] = []
    directions = 2 if bidirectional else 1
    for layer in range(num_layers):
        own = slice(layer * directions, (layer + 1) * directions)
        if layer:
            values = torch.dropout(values, dropout, train=True)
        values, states = _PYTORCHS(
            values, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer_fn
        )
        last += states
    return (values.transpose(0, 1) if batch_first else values), last
