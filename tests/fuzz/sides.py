"""The two that run a case: `Plain`, the loop that everybody writes, and `Ours`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_compiled import CaptureError, Policy, RankError, compile_sharded
from tests.fuzz.cases import SCHEDULES, Case
from tests.fuzz.parts import LATER, OPTIMIZERS, OUT, WIDTH, Absent, Carried, Count, Factor, Losses, Model

REFUSED = (ValueError, CaptureError, RankError)  # what an error by name is


class Differs(AssertionError):
    """The two sides gave other numbers."""


class Side:
    """A model, its optimizer, its losses and what is done to them; the same on both sides."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        self.model = Model(case.layers)
        self.losses = Losses()
        self.optimizer = {**OPTIMIZERS, **LATER}[case.optimizer](self._parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, SCHEDULES[case.schedule])
        self.loss = getattr(self.losses, case.loss)

    def _parameters(self) -> Any:
        if not self.case.groups:
            return self.model.parameters()
        parameters = list(self.model.parameters())
        matrices = [p for p in parameters if p.dim() > 1]
        return [
            {"params": matrices},
            {"params": [p for p in parameters if p.dim() < 2], "lr": 2e-2, "weight_decay": 0.0},
        ]

    def batch(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.case.rows[call % len(self.case.rows)]
        generator = torch.Generator().manual_seed(1000 * self.case.seed + call)
        return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, OUT, generator=generator)

    def modules(self, kind: type[nn.Module]) -> Iterator[Any]:
        return (module for module in self.model.modules() if isinstance(module, kind))

    def act(self, action: str, call: int) -> Any:
        """Does it; what there is to compare of it."""
        batch = self.batch(call)
        autocast = self.case.autocast or action == "autocast step"
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            if action in ("step", "autocast step"):
                return self._step([batch])
            if action == "microbatches":
                return self._step([batch, self.batch(call + 100), batch])
            if action == "gradient":
                return self.gradient(batch)
            if action == "forward":
                return self.forward(batch[0])
            if action == "evaluate":
                self.model.eval()
                result = self.forward(batch[0])
                self.model.train()
                return result
        return getattr(self, action.replace(" ", "_"))(batch)

    def _step(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        result = self.step(batches)
        self.schedule.step()
        return result

    def draw(self, _: Any) -> Any:
        return torch.rand(3)

    def reseed(self, batch: Any) -> None:
        torch.manual_seed(len(batch[0]))

    def rate(self, _: Any) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5

    def decay(self, _: Any) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.02

    def attribute(self, _: Any) -> None:
        for module in self.modules(Factor):
            module.factor += 0.3

    def branch(self, _: Any) -> None:
        for module in self.modules(Factor):
            module.deep = not module.deep

    def probability(self, _: Any) -> None:
        for module in self.modules(nn.Dropout):
            module.p = 0.6

    def rebind(self, _: Any) -> None:
        self.losses.weights = self.losses.weights * 2

    def write_constant(self, _: Any) -> None:
        self.losses.weights.mul_(0.5)

    def power(self, _: Any) -> None:
        self.losses.power = 3 - self.losses.power

    def write_weight(self, _: Any) -> None:
        with torch.no_grad():
            self.model.head.weight.mul_(0.5)

    def write_buffer(self, _: Any) -> None:
        for module in self.modules(nn.BatchNorm1d):
            module.running_mean.add_(0.5)
        for module in self.modules(Count):
            module.seen.zero_()

    def late_name(self, batch: Any) -> None:
        for module in self.modules(Absent):
            module.factor = 0.5 if len(batch[0]) % 2 else 1.5

    def late_key(self, batch: Any) -> None:
        for module in self.modules(Absent):
            module.table["factor"] = 0.5 if len(batch[0]) % 2 else 1.5

    def write_bank(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """Through what the loss returned."""
        result = self.step([batch])
        if self.case.loss == "banks":
            for bank in result[1]["banks"]:
                bank.add_(0.2)
        return result

    def replace_state(self, _: Any) -> None:
        for module in self.modules(Carried):
            module.state = torch.full((2, WIDTH), 0.2)

    def eval_one(self, _: Any) -> None:
        layer = self.model.layers[0]
        layer.train(not layer.training)

    def replace_buffer(self, _: Any) -> None:
        for module in self.modules(nn.BatchNorm1d):
            module.running_mean = torch.full((WIDTH,), 0.3)

    def replace_layer(self, _: Any) -> None:
        for index, layer in enumerate(self.model.layers):
            if isinstance(layer, nn.GELU):
                self.model.layers[index] = nn.Tanh()

    def add_hook(self, _: Any) -> None:
        self.model.layers[-1].register_forward_hook(lambda module, inputs, output: output * 1.1)

    def float64_by_default(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return self.step([batch])
        finally:
            torch.set_default_dtype(torch.float32)

    def failing_loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        if self.case.loss == "weighted":
            self.losses.fails = True
            self.expect_error(lambda: self.step([batch]), KeyError)
            self.losses.fails = False

    def inference_mode(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        with torch.inference_mode():
            self.step_refused(batch)
            return self.forward(batch[0])

    def step_refused(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """A step that one side refuses before it does anything, and the other would break off in the middle."""

    def expect_error(self, call: Callable[[], Any], kind: type[Exception] = Exception) -> None:
        try:
            call()
        except kind:
            self.optimizer.zero_grad()
            return
        raise Differs("a call that cannot be made was made")

    # What the two sides do each in their own way.

    def step(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        raise NotImplementedError

    def gradient(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def wrong_batch(self, batch: Any) -> Any:
        raise NotImplementedError

    def weights(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class Plain(Side):
    """The loop that everybody writes."""

    def step(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        self.optimizer.zero_grad()
        losses, aux = [], None
        for batch in batches:
            loss, aux = self._value(batch)
            with torch.autocast("cpu", enabled=False):  # backward is called outside, as PyTorch asks
                loss.backward()
            losses.append(loss.detach())
        # Divided after the sum, as here: a bias before a BatchNorm has a gradient of rounding alone, which Adamax and
        # its kin blow up to whole steps.
        for parameter in self.model.parameters():
            if parameter.grad is not None and len(batches) > 1:
                parameter.grad.div_(len(batches))
        self.update()
        return torch.stack(losses).mean(), aux

    def update(self) -> None:
        policy = dict(self.case.policy)
        parameters = list(self.model.parameters())
        if "clip" in policy:
            nn.utils.clip_grad_norm_(parameters, policy["clip"])
        if "clip_value" in policy:
            nn.utils.clip_grad_value_(parameters, policy["clip_value"])
        with torch.autocast("cpu", enabled=False):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _value(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        value = self.loss(self.model, *batch)
        return value if isinstance(value, tuple) else (value, None)

    def gradient(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        loss, aux = self._value(batch)
        with torch.autocast("cpu", enabled=False):
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), found, strict=True))
        return loss.detach(), aux, dict(zip(named, zeros, strict=True))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.model(x)

    def wrong_batch(self, batch: Any) -> None:
        return None  # an error, and nothing changes

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())


class Ours(Side):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        policy = Policy(lower="eager", **{"kernels": False, **dict(case.policy)})
        self.sharded = compile_sharded(self.model, self.optimizer, loss=self.loss, policy=policy)

    def step(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        for batch in batches[:-1]:
            self.sharded.accumulate(*batch)
        value = self.sharded.step(*batches[-1])
        return value if isinstance(value, tuple) else (value, None)

    def gradient(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        value, flat = self.sharded.value_and_grad(*batch)
        loss, aux = value if isinstance(value, tuple) else (value, None)
        shapes = {name: p.shape for name, p in self.model.named_parameters()}
        return loss, aux, {name: gradient.view(shapes[name]) for name, gradient in flat.items() if name in shapes}

    def forward(self, x: torch.Tensor) -> Any:
        return self.sharded(x)

    def wrong_batch(self, batch: Any) -> None:
        try:
            self.sharded.step(batch[0][:, :2], batch[1])
        except (*REFUSED, RuntimeError):
            return
        raise Differs("a batch of the wrong width was taken")

    def step_refused(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.expect_error(lambda: self.step([batch]))

    def weights(self) -> dict[str, torch.Tensor]:
        return self.sharded.full_state_dict()
