"""A CPU in the place of a GPU that captures graphs.

What it captures is a list of operators with the places of their operands. To capture has no effect: whatever was
written is put back, and what was made holds NaN. A launch runs the list on the very memory that it was captured on:

- results of operators live in memory that the graph keeps (its pool), written in place on each launch;
- tensors from outside are held weakly, and must be alive and where they were: a caller that passes other tensors, or
  frees those that it captured with, is an error, as it would be garbage on a GPU;
- an operator that reads a number on the host is an error while a graph is captured.

The package's operators run in the form that they have on a GPU, so a run to compare with goes inside `AsOnGpu` too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fsdp_compiled.kernels.aten_operators import TENSOR_FORMS
from fsdp_compiled.lower.cuda_graph import Replays

aten = torch.ops.aten
COLLECTIVES = ("_c10d_functional", "c10d")
READS = (aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.equal.default)


class CaptureError(RuntimeError):
    """What may not happen while a graph is captured."""


class AsOnGpu(TorchDispatchMode):
    """The package's operators in the form that reads no number on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("fsdp_compiled::")
        if func.namespace == "fsdp_compiled" and name in TENSOR_FORMS:
            with self:
                return TENSOR_FORMS[name](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class StandIn:
    """`fsdp_compiled.lower.cuda_device.CudaGraphs` on a CPU; ``log`` says what was asked of it, in order."""

    capturable = frozenset({"gloo"})

    def __init__(self, refuse: str = "", fail: str = "") -> None:
        self.refuse, self.fail = refuse, fail
        self.log: list[str] = []
        self.graphs: list[Recorded] = []
        self.rooms = 0  # how often room was made
        self.released: list[int] = []  # how much of the log there was when memory was given back

    def obstacle(self, collectives: bool) -> str:
        return self.refuse

    def warm(self, run: Callable[[], Any]) -> Any:
        self.log.append("warm")
        with AsOnGpu():
            return run()

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Recorded]:
        self.log.append("capture")
        graph = Recorded(self.log)
        state = torch.get_rng_state()  # of the default generator; others are put back with the tensors
        try:
            with graph.recorder, AsOnGpu():
                results = run()
            if self.fail:
                raise CaptureError(self.fail)
        finally:
            torch.set_rng_state(state)
            graph.recorder.undo()
        graph.finish()
        self.graphs.append(graph)
        return results, graph

    def make_room(self) -> None:
        self.rooms += 1

    def release(self) -> None:
        self.released.append(len(self.log))

    def random_state(self) -> Callable[[], None]:
        state = torch.get_rng_state()
        drawn = {generator for graph in self.graphs for generator in graph.recorder.drawn}
        others = [(generator, generator.get_state()) for generator in drawn]

        def put_back() -> None:
            torch.set_rng_state(state)
            for generator, before in others:
                generator.set_state(before)

        return put_back


class Slot:
    """A tensor of the graph: from outside (``weak``), kept in the graph's memory, or a view made anew each time."""

    def __init__(self, tensor: torch.Tensor, outside: bool) -> None:
        self.address = tensor.data_ptr()
        self.outside = weakref.ref(tensor) if outside else None
        self.kept: torch.Tensor | None = None


class Recorder(TorchDispatchMode):
    """Writes down what runs, and undoes it."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[Slot] = []
        self.calls: list[tuple[Any, Any, Any, list[tuple[int | None, bool]]]] = []
        self._places: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # so that no identity is used twice while recording
        self._made: set[int] = set()  # storages
        self._known: set[int] = set()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.drawn: dict[torch.Generator, torch.Tensor] = {}  # the states of generators before the graph drew

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise CaptureError(f"{func} reads a number on the host while a graph is captured")
        places = pytree.tree_map_only(torch.Tensor, self._place, (args, kwargs))
        self._save_written(func, args, kwargs)
        if (generator := kwargs.get("generator")) is not None:
            self.drawn.setdefault(generator, generator.get_state())
        result = func(*args, **kwargs)
        self.calls.append((func, *places, [self._result(value) for value in pytree.tree_leaves(result)]))
        return result

    def _place(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._places:
            self._new(tensor, outside=True)
        return _Place(self._places[id(tensor)])

    def _new(self, tensor: torch.Tensor, outside: bool) -> int:
        self._places[id(tensor)] = len(self.slots)
        self.slots.append(Slot(tensor, outside))
        self._alive.append(tensor)
        self._known.add(tensor.untyped_storage()._cdata)
        return self._places[id(tensor)]

    def _result(self, value: Any) -> tuple[int | None, bool]:
        """The slot of a result, and whether its memory is new."""
        if not isinstance(value, torch.Tensor):
            return None, False
        if id(value) in self._places:
            return self._places[id(value)], False
        storage = value.untyped_storage()._cdata
        shared = storage in self._known
        index = self._new(value, outside=False)
        if shared or value.device.type != "cpu":
            return index, False
        self.slots[index].kept = value
        self._made.add(storage)
        return index, True

    def _save_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = kwargs.get(argument.name, args[index] if index < len(args) else None)
                for tensor in (leaf for leaf in pytree.tree_leaves(given) if leaf is not None):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self._made and storage._cdata not in self._before:
                        whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
                        self._before[storage._cdata] = whole, whole.clone()

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()
        for generator, state in self.drawn.items():
            generator.set_state(state)
        for slot in self.slots:
            if slot.kept is not None:
                slot.kept.fill_(float("nan") if slot.kept.is_floating_point() else 85)
        self._alive.clear()


class _Place(int):
    """The number of a slot, where a tensor was."""


class Recorded:
    """`torch.cuda.CUDAGraph` on a CPU: a list of operators, run again on the same memory."""

    def __init__(self, log: list[str]) -> None:
        self.recorder = Recorder()
        self.log = log
        self.alive = True

    def finish(self) -> None:
        self.calls, self.slots = self.recorder.calls, self.recorder.slots

    @property
    def operators(self) -> list[str]:
        return [str(func) for func, *_ in self.calls]

    def reset(self) -> None:
        self.log.append("reset" if not dist.is_initialized() else "reset in a process group")
        self.alive = False
        self.calls, self.slots = [], []

    def replay(self) -> None:
        assert self.alive, "launched after it was destroyed"
        self.log.append("launch")
        values: dict[int, torch.Tensor] = {}
        with _disable_current_modes():
            for index, slot in enumerate(self.slots):
                tensor = slot.outside() if slot.outside is not None else slot.kept
                if slot.outside is not None:
                    assert tensor is not None, "a tensor that the graph reads or writes was freed"
                if tensor is not None:
                    assert tensor.data_ptr() == slot.address, "a tensor of the graph moved"
                    values[index] = tensor
            for func, args, kwargs, results in self.calls:
                self._call(func, *pytree.tree_map_only(_Place, values.__getitem__, (args, kwargs)), results, values)

    @staticmethod
    def _call(func: Any, args: Any, kwargs: Any, results: Any, values: dict[int, torch.Tensor]) -> None:
        found = pytree.tree_leaves(func(*args, **kwargs))
        for value, (index, fresh) in zip(found, results, strict=True):
            if index is None:
                if hasattr(value, "wait"):
                    value.wait()
            elif fresh:
                if func.namespace in COLLECTIVES:
                    value = torch.ops._c10d_functional.wait_tensor(value)
                values[index].copy_(value)
            elif index not in values:
                values[index] = value


class Seen(TorchDispatchMode):
    """The operators that run outside of a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


class Plain(Replays):
    """Runs programs as they are, in the form that they have on a GPU: what graphs are compared with."""

    def __init__(self) -> None:
        super().__init__(StandIn(), "auto")

    def wrap(self, runner: Any, *_: Any) -> Any:
        def run(*inputs: torch.Tensor) -> Any:
            with AsOnGpu():
                return runner(*inputs)

        return run
