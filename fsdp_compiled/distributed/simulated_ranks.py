"""A process group of any number of simulated ranks in one process, which sends nothing: programs are built on it.

The one file that knows PyTorch's ``fake`` backend (torch 2.11 to 2.14: ``torch.testing._internal.distributed.fake_pg``,
which registers it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def simulated_ranks(shape: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Inside, this process is rank 0 of a CPU mesh with these axes. What collectives bring is undefined.

    Raises ``ValueError`` where a process group runs already, whose place it would take.
    """
    if dist.is_initialized():
        raise ValueError(
            "A process group is running in this process, and simulated ranks need one of their own. Simulate in a "
            "process that was not started by torchrun, or before init_process_group."
        )
    store = None
    with suppress(ImportError):  # where it is gone, `torch.distributed` knows the backend by itself
        import torch.testing._internal.distributed.fake_pg  # noqa: F401

        store = dist.HashStore()
    dist.init_process_group("fake", rank=0, world_size=math.prod(shape.values()), store=store)
    try:
        yield init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    finally:
        dist.destroy_process_group()
