"""Random numbers: what a program's random operators draw from.

    one rank         PyTorch's default generator itself: the numbers of eager PyTorch, between the user's own draws
    several ranks    128 bits of the default generator, mixed with the rank  ->  this call's numbers on this rank

So a script that is repeatable under plain PyTorch (`torch.manual_seed`, whenever it is called) is repeatable here. On
several ranks the numbers are mixed by a hash. So the draws of the user, of another `Sharded`, and of two ranks with the
same seed have nothing in common. Each call that draws takes 128 new bits, as a `DataLoader` takes its base seed, so
ranks with one seed stay in step with each other whatever they draw.

Under tensor parallelism each rank also has a second stream, mixed with its place among the ranks that have their own
batches. Ranks along the tp axis draw the same numbers from it if they drew the same 128 bits, which they compare
(`drawn`).

No number is handed out twice, whatever other threads draw meanwhile: calls draw from the default generator and never
reset it. On a CPU with several ranks, a call's operators get the `Sharded`'s own generator (`bound`). On a GPU some
operators take no generator, so the default generator uses that generator's state during the call; the user's state is
not touched.

Random numbers are part of a `State`: see `DefaultState`.

Programs in the user's own loop draw like this under tensor parallelism:

    draws of what all ranks along tp have    PyTorch's default generator: the numbers of FSDP2 with the same plan. Ranks
                                             along tp are to be seeded alike, which is compared
    draws of parts                           a generator of the call's own, seeded with 128 bits of the default one and
                                             the rank: other numbers on each

FSDP2 draws both from the default generator. Ranks along tp must be seeded alike for the first kind, so they have the
same mask on each of their parts: heads or hidden units that lie on two ranks are dropped together. Without a tp axis,
programs of a loop draw from the default generator, and none of this is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.ir.nodes import is_random
from fsdp_compiled.ir.program import SAME_PARTS, Program

aten = torch.ops.aten
CPU = torch.device("cpu")
ODD = 0x2545F4914F6CDD1D
ENTROPY = 2  # int64 numbers that a call draws from the user's stream
WORDS = slice(24, 24 + 8 * 624)  # bytes of a CPU generator's state: 624 words of 32 bits, each in an int64


class DefaultState:
    """The state of PyTorch's default generator, as the tensor ``State.random``.

    Reading updates the tensor, so it saves the state. Writing into the tensor restores it: what was written since the
    last reading is copied to the generator before anything is drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensor: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """The state now, uint8 on the CPU; the same tensor in every call."""
        self.carry()
        with torch.inference_mode(False):
            now = default_generator(self._device).get_state()
            if self._tensor is None:
                self._tensor = now.clone()
            self._tensor.copy_(now)
            self._seen = now
        return self._tensor

    def carry(self) -> None:
        """Sets the generator to what was written into the tensor, if anything was."""
        if self._tensor is not None and self._seen is not None and not torch.equal(self._tensor, self._seen):
            default_generator(self._device).set_state(self._tensor)
            self._seen = self._tensor.clone()


class RandomNumbers:
    """The generators that the programs of one `Sharded` draw from on this rank."""

    def __init__(self, device: torch.device, rank: int, world: int, row: int | None = None) -> None:
        """``row``: this rank's place among the ranks that have their own batches; None without a tp axis."""
        self.state = DefaultState(device if world == 1 else CPU)
        self._device, self._rank, self._world, self._row = device, rank, world, row
        self._own: torch.Generator | None = None
        self._shared: torch.Generator | None = None
        # What operators draw from. The second is for those that draw the same along tp. None: PyTorch's default one.
        self._now: tuple[torch.Generator, torch.Generator] | None = None
        self.drawn = torch.zeros(2, dtype=torch.float64, device=device)  # 128 bits of this call, as numbers below 2**20

    @contextmanager
    def drawing(self, state: DefaultState | torch.Tensor, shared: bool = False) -> Iterator[None]:
        """Inside, random operators draw from ``state``, and advance it.

        A tensor is a state by value: the same one gives the same numbers again, and no other generator moves.
        ``shared``: a GPU has one stream in a call; use the one that all ranks along the tp axis have in common.
        """
        if isinstance(state, DefaultState):
            state.carry()
            if self._world == 1:
                yield
                return
        if self._own is None:
            self._own = torch.Generator(self._device)
        if self._world == 1:
            assert isinstance(state, torch.Tensor)
            self._own.set_state(state)
            with self._from(self._own):
                try:
                    yield
                finally:
                    state.copy_(self._own.get_state())
        else:
            numbers = start(self._own, self._rank, state)
            if self._row is None:
                with self._from(self._own):
                    yield
                return
            if self._shared is None:
                self._shared = torch.Generator(self._device)
            seed(self._shared, f"fsdp_compiled along tp {self._row} {numbers}")
            for place, number in enumerate(numbers):
                self.drawn[place].fill_(float(number * ODD >> 24 & 0xFFFFF))
            one = self._shared if shared and self._device.type == "cuda" else self._own
            with self._from(one, self._shared):
                yield

    @contextmanager
    def repeated(self, state: DefaultState | torch.Tensor) -> Iterator[None]:
        """Inside, PyTorch's default generator gives the numbers that `drawing` will give a program. At the end its
        state is restored. Nothing advances."""
        value = (state.read() if isinstance(state, DefaultState) else state).clone()
        default = default_generator(self._device)
        before = default.get_state()
        if self._world == 1:
            default.set_state(value)
        else:
            start(default, self._rank, value)
        try:
            yield
        finally:
            default.set_state(before)

    @contextmanager
    def _from(self, generator: torch.Generator, shared: torch.Generator | None = None) -> Iterator[None]:
        if self._device.type != "cuda":
            self._now = generator, shared or generator
            try:
                yield
            finally:
                self._now = None
            return
        # Pointers are exchanged, not states: a thread that draws now takes numbers that nobody else gets.
        default = default_generator(self._device)
        users = default.graphsafe_get_state()
        default.graphsafe_set_state(generator.graphsafe_get_state())
        try:
            yield
        finally:
            default.graphsafe_set_state(users)

    def bound(self, operator: Callable[..., Any], shared: bool = False) -> Callable[..., Any]:
        """The random operator with the generator that `drawing` sets when it runs; itself on a GPU, or if it takes
        none.

        ``shared``: it draws the same on all ranks along the tp axis.
        """
        if self._device.type != "cpu" or (given := given_generator(operator)) is None:
            return operator

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._now is None:
                return operator(*args, **kwargs)
            return given(*args, **kwargs, generator=self._now[shared])

        call.__name__ = call.__qualname__ = f"drawn_{str(operator).replace('.', '_')}"
        return call


def default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


def start(generator: torch.Generator, rank: int, state: DefaultState | torch.Tensor) -> list[int]:
    """Seeds the generator with the start of a rank's numbers for one call, and advances ``state`` by that draw.

    ``state``: that of the default CPU generator, or a CPU generator's by value. Returns what was drawn.
    """
    source = torch.default_generator
    if isinstance(state, torch.Tensor):
        source = torch.Generator().set_state(state)
    drawn = torch.empty(ENTROPY, dtype=torch.int64, device=CPU).random_(generator=source)
    if isinstance(state, torch.Tensor):
        state.copy_(source.get_state())
    numbers = drawn.tolist()
    seed(generator, f"fsdp_compiled {rank} {numbers}")
    return numbers


def seed(generator: torch.Generator, text: str) -> None:
    """Seeds with a hash of the text: all of a CPU generator's state, since `manual_seed` uses 32 bits of its seed."""
    digest = hashlib.shake_256(text.encode()).digest(4 * 624)
    generator.manual_seed(int.from_bytes(digest[:8], "little"))
    if generator.device.type == "cpu":
        state = generator.get_state()
        words = torch.frombuffer(bytearray(digest), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
        state[WORDS].view(torch.int64).copy_(words)
        generator.set_state(state)


def given_generator(operator: Callable[..., Any]) -> Callable[..., Any] | None:
    """The same operator with a ``generator`` argument; the same state gives the same numbers. None if there is none.

    A custom operator has none, and draws from wherever its code says.
    """
    if operator in WRITTEN_OUT:
        return WRITTEN_OUT[operator]
    schema = getattr(operator, "_schema", None)
    if schema is not None and any(argument.name == "generator" for argument in schema.arguments):
        return operator
    return None


def _dropout(x: torch.Tensor, p: float, train: bool | None, *, generator: torch.Generator) -> Any:
    """As PyTorch's kernel on CPUs does it (`native_dropout_cpu`)."""
    if x.numel() == 0 or train is False:
        return aten.native_dropout.default(x, p, train)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return mask.to(x.dtype).mul_(0.0 if p == 1 else 1 / (1 - p)).mul_(x), mask


def _uniform(*args: Any, generator: torch.Generator, **kwargs: Any) -> torch.Tensor:
    return aten.empty_like.default(*args, **kwargs).uniform_(generator=generator)


def _normal(*args: Any, generator: torch.Generator, **kwargs: Any) -> torch.Tensor:
    return aten.empty_like.default(*args, **kwargs).normal_(generator=generator)


def _below(x: torch.Tensor, high: Any, *, generator: torch.Generator, **kwargs: Any) -> torch.Tensor:
    return aten.empty_like.default(x, **kwargs).random_(0, int(high), generator=generator)


def _between(x: torch.Tensor, low: int, high: int, *, generator: torch.Generator, **kwargs: Any) -> torch.Tensor:
    return aten.empty_like.default(x, **kwargs).random_(low, high, generator=generator)


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _dropout,
    aten.rand.default: aten.rand.generator,
    aten.randn.default: aten.randn.generator,
    aten.randint.default: aten.randint.generator,
    aten.randint.low: aten.randint.low_generator,
    aten.randperm.default: aten.randperm.generator,
    aten.rand_like.default: _uniform,
    aten.randn_like.default: _normal,
    aten.randint_like.default: _below,
    aten.randint_like.Tensor: _below,
    aten.randint_like.low_dtype: _between,
}


class LoopRandom:
    """The generators that the programs of one module draw from on this rank."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._parts: torch.Generator | None = None
        self._now: torch.Generator | None = None  # while a program runs that draws for parts
        self.drawn = torch.zeros(SAME_PARTS, dtype=torch.float64, device=device)  # numbers below 2**20, to compare

    @contextmanager
    def drawing(self, shared: bool, parts: bool) -> Iterator[None]:
        """The context of a program's run; ``shared``, ``parts``: which of the two kinds it draws."""
        if shared:
            state = default_generator(self._device).get_state()
            digest = hashlib.sha256(state.numpy().tobytes()).digest()
            for place in range(SAME_PARTS):
                self.drawn[place].fill_(float(int.from_bytes(digest[4 * place : 4 * place + 4], "little") & 0xFFFFF))
        if not parts:
            yield
            return
        self._parts = self._parts or torch.Generator(self._device)
        start(self._parts, self._rank, DefaultState(self._device))
        self._now = self._parts
        try:
            yield
        finally:
            self._now = None

    def bound(self, operator: Callable[..., Any], shared: bool = False) -> Callable[..., Any]:
        """The random operator as a program calls it; ``shared``: it draws the same on all ranks along tp."""
        if shared:
            return operator
        given = given_generator(operator)
        assert given is not None  # `check_random`

        def call(*args: Any, **kwargs: Any) -> Any:
            assert self._now is not None
            return given(*args, **kwargs, generator=self._now)

        call.__name__ = call.__qualname__ = f"drawn_{str(operator).replace('.', '_')}"
        return call


def check_random(program: Program, device: torch.device) -> None:
    """Raises `CaptureError` if draws of a program that was just captured and marked could be wrong."""
    for node in program.graph.nodes:
        if node.op != "call_function" or not is_random(node):
            continue
        if node.meta["phase"] == "backward":
            raise CaptureError(
                f"Backward draws random numbers ({node.target}), which is not supported under tensor parallelism in a "
                "loop of your own. Draw in forward, or use compile_sharded."
            )
        if node.meta.get("shared"):
            continue
        if device.type != "cpu" or given_generator(node.target) is None:  # type: ignore[arg-type]
            raise CaptureError(
                f"The model draws random numbers ({node.target}, dropout for one) for what each rank along the tp axis "
                f"has a part of, which needs a generator of its own, and on {device.type} that operator takes none. "
                "Set dropout to 0 inside of attention and feed-forward, or use compile_sharded."
            )
