"""``FakeTensor``, in torch 2.11 to 2.13: one of any layout, in a third of the time of its constructor.

Relied on: that all that its constructor sets besides the tensor are attributes, the same for all of a device but for
the mode, and nothing that a tensor learns later; the guard that `no_dispatch` holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsdp_compiled.torch_private.core import C
from fsdp_compiled.torch_private.parameters import make_subclass

META = torch.device("meta")
_KNOWN: dict[torch.device, dict[str, Any]] = {}


def fake_of(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """``FakeTensor(mode, meta, device)``, of a new tensor on "meta" without gradient."""
    if (known := _KNOWN.get(device)) is None:
        made = FakeTensor(mode, meta, device)
        if made.fake_device == device:  # "cuda" is another one from time to time
            _KNOWN[device] = {name: value for name, value in vars(made).items() if name != "fake_mode"}
        return made
    fake: Any = make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    if mode._allow_unsafe_data_ptr_access:
        C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        C._set_throw_on_mutable_data_ptr(fake)
    attributes = vars(fake)
    attributes.update(known)
    attributes["fake_mode"] = mode
    return fake


def new_fake(
    mode: FakeTensorMode, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """One of this description, whatever modes are active: what they would have to find out is given."""
    guard = C._DisableTorchDispatch()
    try:
        empty = torch.empty_strided(shape, stride, dtype=dtype, device=META)
    finally:
        del guard
    return fake_of(mode, empty, device)
