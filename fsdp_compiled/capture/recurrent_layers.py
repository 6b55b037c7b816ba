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
from torch._decomp import decompositions

_PYTORCHS = decompositions._rnn_helper


@contextmanager
def dropout_between_layers() -> Iterator[None]:
    """Inside, the decompositions of recurrent layers have their dropout."""
    with mock.patch.object(decompositions, "_rnn_helper", _layers):
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
