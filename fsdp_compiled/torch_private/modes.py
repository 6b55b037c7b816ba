"""Stacks of modes and of the default device, in torch 2.11 to 2.13: of ``torch.utils`` and ``torch.overrides``;
and the two calls that stand in a trace for ``torch.autocast``."""

from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils import _device as device
from torch.utils._device import DeviceContext
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = [
    "DeviceContext",
    "device",
    "dispatch_modes",
    "enter_autocast",
    "exit_autocast",
    "function_modes",
    "is_in_torch_dispatch_mode",
    "no_dispatch",
    "without_modes",
]
