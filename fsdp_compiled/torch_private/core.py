"""``torch._C``, in torch 2.11 to 2.13: switches of the process and the thread without a Python function of their own.

Relied on: what is asked of the caller's modes at every call, in the names that ``torch.backends``, ``torch.autocast``
and ``torch.overrides`` are written in (`capture.ambient`); whether oneDNN is on; hooks for saved tensors; whether a
node of backward will run; dispatch below autograd; keys that a dispatch leaves out; and a CUDA allocator's pools
(`lower.cuda_device`).
"""

from typing import Any

import torch

C: Any = torch._C

__all__ = ["C"]
