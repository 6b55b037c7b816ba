"""`Policy.verify`: a step is held against eager PyTorch, and what a defence has missed is an error before it counts."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.capture.guards import Guards
from fsdp_compiled.distributed.mesh import RankError
from fsdp_compiled.kernels import operators as kernels
from fsdp_compiled.plan.make_plan import SCALED
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime import verify as verification
from fsdp_compiled.runtime.eager_comparison import moved_by_wire, sent_apart
from tests.launch import launch
from tests.stale_models import Backwards, Layers, set_scale
from tests.toys import batches, build, mse

WORKER = Path(__file__).parents[1] / "workers" / "verify.py"
TABLE: dict[str, float] = {}
GAIN = 1.0


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Reads(nn.Module):
    """Reads one of several Python values, which a trace takes for constants."""

    def __init__(self, read: Callable[[Reads], float]) -> None:
        super().__init__()
        self.linear, self.gain, self.read = nn.Linear(6, 2), 1.0, read
        self.norm = nn.BatchNorm1d(2)
        self.calls, self.seen = 0, []  # type: ignore[var-annotated]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.linear(x)) * self.read(self)


def set_global(value: float) -> None:
    globals()["GAIN"] = value


READS: dict[str, tuple[Callable[[Reads], float], Callable[[Reads], Any]]] = {
    "attribute": (lambda model: model.gain, lambda model: setattr(model, "gain", 2.0)),
    "absent key": (lambda _: TABLE.get("gain", 1.0), lambda _: TABLE.update(gain=2.0)),
    "global": (lambda _: GAIN, lambda _: set_global(2.0)),
    "environment": (
        lambda _: 2.0 if os.environ.get("FSDP_COMPILED_TEST") else 1.0,
        lambda _: os.environ.update(FSDP_COMPILED_TEST="1"),
    ),
    "mode": (lambda model: 1.0 if model.training else 2.0, lambda model: setattr(model, "training", False)),
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("FSDP_COMPILED_TEST", raising=False)
    TABLE.clear()
    set_global(1.0)
    set_scale(1.0)
    yield
    os.environ.pop("FSDP_COMPILED_TEST", None)


@pytest.mark.parametrize("name", READS)
def test_a_stale_read_is_an_error_and_the_state_is_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all guards off. The control, without verify, returns another loss in silence."""
    read, change = READS[name]
    batch = batches(1, 4)[0]
    found = {}
    for verify in (False, 1):
        with monkeypatch.context() as off:
            _clear()
            torch.manual_seed(0)
            model = Reads(read)
            sharded = compile_sharded(model, adamw(model), loss=mse, policy=Policy(lower="eager", verify=verify))
            sharded.step(*batch)
            off.setattr(Guards, "hold", lambda _: True)
            change(model)
            before = [one.clone() for one in (*sharded.state.parameters.values(), *sharded.state.optimizer.values())]
            buffers = {key: one.clone() for key, one in sharded.state.buffers.items()}
            drawn = torch.get_rng_state()
            try:
                sharded.step(*batch)
            except RankError as error:
                found[verify] = str(error)
                now = [*sharded.state.parameters.values(), *sharded.state.optimizer.values()]
                assert all(map(torch.equal, before, now))
                assert all(torch.equal(buffers[key], one) for key, one in sharded.state.buffers.items())
                assert int(sharded.state.step) == 1 and torch.equal(drawn, torch.get_rng_state())
    assert set(found) == {1}, found
    assert "the loss is" in found[1] and "in eager PyTorch" in found[1]
    if name == "attribute":
        assert "gain was 1.0 and is 2.0" in found[1]


def _clear() -> None:
    TABLE.clear()
    set_global(1.0)
    os.environ.pop("FSDP_COMPILED_TEST", None)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_verified_steps_are_those_without(lower: str) -> None:
    """Dropout, BatchNorm's statistics, counters, lists and random states are as if nothing had run beside."""
    runs = []
    for verify in (False, 2):
        model = nn.Sequential(build(dropout=0.3), nn.BatchNorm1d(2))
        noted: list[int] = []

        def loss(model: Any, x: torch.Tensor, y: torch.Tensor, noted: list[int] = noted) -> torch.Tensor:
            noted.append(1)
            return mse(model, x, y)

        sharded = compile_sharded(model, adamw(model), loss=loss, policy=Policy(lower=lower, verify=verify))
        torch.manual_seed(1)
        random.seed(1)
        losses = [float(sharded.step(*batch)) for batch in batches(5, 4)]
        values = [one.tolist() for one in sharded.full_state_dict().values()]
        runs.append((losses, noted, float(torch.rand(())), random.random(), values))
    assert runs[0] == runs[1]


def sharded_backwards(gradients: bool) -> Any:
    """A model whose derivative reads a Python value, each call verified."""
    set_scale(1.0)
    model = Backwards()
    policy = Policy(lower="eager", verify=1, verify_gradients=gradients)
    return compile_sharded(model, adamw(model), loss=mse, policy=policy)


@pytest.mark.parametrize("call", ["step", "value_and_grad"])
def test_a_stale_read_in_backward_is_an_error(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the loss tells nothing: the control compares forward alone, and goes on."""
    batch, found = batches(1, 4)[0], {}
    for gradients in (False, True):
        with monkeypatch.context() as off:
            sharded = sharded_backwards(gradients)
            getattr(sharded, call)(*batch)
            off.setattr(Guards, "hold", lambda _: True)
            set_scale(1.5)
            before = [one.clone() for one in (*sharded.state.parameters.values(), *sharded.state.optimizer.values())]
            try:
                getattr(sharded, call)(*batch)
            except RankError as error:
                found[gradients] = str(error)
                now = [*sharded.state.parameters.values(), *sharded.state.optimizer.values()]
                assert all(map(torch.equal, before, now))
    assert set(found) == {True}
    assert "the gradient's norm is" in found[True] or "the gradient of linear." in found[True]


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_stale_read_in_the_backward_of_a_microbatch_is_an_error(where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any of three, of which the step compares the mean; the control compares losses alone."""
    found = {}
    for gradients in (False, True) if where == 1 else (True,):
        with monkeypatch.context() as off:
            sharded = sharded_backwards(gradients)
            calls = [sharded.accumulate, sharded.accumulate, sharded.step]
            for call, batch in zip(calls, batches(3, 4), strict=True):
                call(*batch)
            off.setattr(Guards, "hold", lambda _: True)
            try:
                for place, (call, batch) in enumerate(zip(calls, batches(3, 4), strict=True)):
                    set_scale(1.5 if place == where else 1.0)
                    call(*batch)
                    sharded(batch[0])  # an evaluation between them leaves them
            except RankError as error:
                assert call == sharded.step and int(sharded.state.step) == 1
                found[gradients] = str(error)
    assert set(found) == {True}
    assert "the gradient's norm is" in found[True] or "the gradient of linear." in found[True]


@pytest.mark.parametrize("call", ["accumulate", "evaluate"])
def test_a_stale_read_in_a_microbatch_or_an_evaluation_is_an_error(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = Reads(lambda model: model.gain), batches(1, 4)[0]
    sharded = compile_sharded(model, adamw(model), loss=mse, policy=Policy(lower="eager", verify=1))
    run = (lambda: sharded(x)) if call == "evaluate" else lambda: sharded.accumulate(x, y)
    run()
    monkeypatch.setattr(Guards, "hold", lambda _: True)
    model.gain = 2.0
    buffers = {key: one.clone() for key, one in sharded.state.buffers.items()}
    sums = {key: one.clone() for key, one in sharded.state.sums.items()}
    with pytest.raises(RankError, match=r"gain was 1\.0 and is 2\.0"):
        run()
    assert all(torch.equal(buffers[key], one) for key, one in sharded.state.buffers.items())
    assert all(torch.equal(sums[key], one) for key, one in sharded.state.sums.items())


@pytest.mark.parametrize(("accumulate", "weigh", "every"), [("shards", "ranks", 1), ("full", "rows", 2)])
def test_microbatches_that_are_right_are_no_difference(accumulate: Any, weigh: Any, every: int) -> None:
    """Uneven ones, in rows of two and three, evaluations, and a step without any; all of it is that without verify."""
    found = []
    for verify in (False, every):
        torch.manual_seed(0)
        model = nn.Sequential(build(dropout=0.2), nn.BatchNorm1d(2))
        policy = Policy(lower="eager", accumulate=accumulate, weigh=weigh, verify=verify, clip=0.5)
        sharded = compile_sharded(model, adamw(model), loss=mse, policy=policy)
        losses: list[torch.Tensor] = []
        torch.manual_seed(1)
        for rows in ((2, 4), (2, 2, 4), (4,)):
            for place, count in enumerate(rows):
                batch = batches(1, count)[0]
                losses.append((sharded.accumulate if place < len(rows) - 1 else sharded.step)(*batch))
            losses.append(sharded(batches(1, 4)[0][0]).sum())
        found.append([*map(float, losses), *(one.tolist() for one in sharded.full_state_dict().values())])
    assert found[0] == found[1]


def test_an_update_that_is_not_the_optimizers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two dtypes in one group one is updated by the other's rate. The control, without verify, says nothing."""
    update = import_module("fsdp_compiled.passes.update")
    inline = update._inline

    def twice(edit: Any, rule: Any, buffer: Any, *others: Any) -> None:
        for _ in range(1 + (buffer.dtype is torch.bfloat16)):
            inline(edit, rule, buffer, *others)

    monkeypatch.setattr(update, "_inline", twice)
    for verify in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2, dtype=torch.bfloat16))

        def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (model[1](model[0](x).bfloat16()).float() - y).square().mean()

        sharded = compile_sharded(model, adamw(model), loss=loss, policy=Policy(lower="eager", verify=verify))
        if not verify:
            sharded.step(*batches(1, 4)[0])
            continue
        with pytest.raises(RankError, match=r"1\.(weight|bias).*after its update"):
            sharded.step(*batches(1, 4)[0])


class Convolved(nn.Module):
    """A bias whose gradient is zero but for rounding, of which Adam makes the whole rate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x[:, None])).tanh().flatten(1))


class Unused(nn.Module):
    """Checkpointed layers, and one that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.unused = Layers(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def with_aux(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    out = model(x)
    return nn.functional.mse_loss(out, y), {"out": out, "rows": len(x)}


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "policy"),
    [
        (Convolved, torch.optim.AdamW, {}, {"lower": "inductor"}),
        (Convolved, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}, {"lower": "eager", "clip": 0.1}),
        (Unused, torch.optim.NAdam, {"decoupled_weight_decay": True}, {"lower": "eager", "clip_value": 0.01}),
        (build, torch.optim.AdamW, {"amsgrad": True}, {"lower": "inductor", "precision": HALF}),
        (Unused, torch.optim.RMSprop, {"centered": True}, {"lower": "eager", "loss_scale": 128.0}),
    ],
)
def test_what_is_right_is_no_difference(
    model: Callable[[], nn.Module], optimizer: type[torch.optim.Optimizer], options: Any, policy: Any
) -> None:
    torch.manual_seed(0)
    one = model()
    made = optimizer(one.parameters(), lr=0.01, **options)  # type: ignore[call-arg]
    loss = with_aux if policy["lower"] == "eager" else mse
    sharded = compile_sharded(one, made, loss=loss, policy=Policy(verify=1, **policy))
    for batch in batches(4, 4):
        sharded.step(*batch)
    assert int(sharded.state.step) == 4


@pytest.mark.parametrize("what", ["loss", "aux"])
def test_a_stale_read_beside_aux_is_an_error(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loss, or in ``aux`` alone."""

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model.linear(x)
        gains = (model.gain, 1.0) if what == "loss" else (1.0, model.gain)
        return nn.functional.mse_loss(out, y) * gains[0], {"out": out * gains[1]}

    model = Reads(lambda _: 1.0)
    sharded = compile_sharded(model, adamw(model), loss=loss, policy=Policy(lower="eager", verify=1))
    batch = batches(1, 4)[0]
    sharded.step(*batch)
    monkeypatch.setattr(Guards, "hold", lambda _: True)
    model.gain = 2.0
    with pytest.raises(RankError, match="in eager PyTorch"):
        sharded.step(*batch)


class Inner(nn.Module):
    """Its forward reads a Python value, and counts what it saw in a buffer that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain, self.noted = nn.Linear(6, 6), 1.0, 1.0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.noted
        return x + self.linear(x) * self.gain


def stack(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Inner(), Inner(), nn.Linear(6, 2))
    return compile_sharded(model, adamw(model), loss=mse, policy=Policy(lower="eager", verify=1, **options))


@pytest.mark.parametrize(
    ("place", "name", "value", "said"),
    [
        (1, "gain", 2.0, r"the loss is .*traced again, 1 is the first module .*, 2\.0\)"),
        # neither loss nor gradients tell of it
        (0, "noted", 3.0, r"the buffer 0\.seen is 2, and 4 in eager PyTorch; traced again, 0 is the"),
    ],
)
def test_the_first_module_that_computes_something_else_is_named(
    place: int, name: str, value: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded, batch = stack(), batches(1, 4)[0]
    sharded.step(*batch)
    monkeypatch.setattr(Guards, "hold", lambda _: True)
    setattr(sharded.model[place], name, value)
    with pytest.raises(RankError, match=said):
        sharded.step(*batch)
    assert float(sharded.state.buffers["0.seen"]) == 1


def test_where_the_trace_is_not_out_of_date_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, batch = stack(), batches(1, 4)[0]
    sharded.step(*batch)
    compiled = sharded._programs.cached[0]
    run = compiled.runner
    monkeypatch.setattr(compiled, "runner", lambda *given: [one * 1.5 for one in run(*given)])
    with pytest.raises(RankError, match="its code gives the same program"):
        sharded.step(*batch)


@pytest.mark.parametrize("how", ["step", "microbatches", "after an error"])
def test_a_program_that_differs_is_traced_anew(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the steps are those of a model whose change the guards see. The control, which raises, is traced anew at the
    next call."""
    found = []
    for seen in (True, False):
        with monkeypatch.context() as off:
            sharded = stack(verify_difference="raise" if how == "after an error" else "recapture")
            losses = []
            for step, batch in enumerate(batches(4, 4)):
                if step == 2:
                    if not seen:
                        off.setattr(Guards, "hold", lambda _: True)
                    sharded.model[1].gain = 2.0
                    if not seen and how == "after an error":
                        with pytest.raises(RankError, match="in eager PyTorch"):
                            sharded.step(*batch)
                if how == "microbatches":
                    losses.append(float(sharded.accumulate(*batch)))
                losses.append(float(sharded.step(*batch)))
            found.append((losses, [one.tolist() for one in sharded.full_state_dict().values()]))
    assert found[0] == found[1]
    assert ("It is traced anew." in caplog.text) == (how != "after an error")


def test_a_new_program_that_differs_too_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "result_off", lambda what, *_: f"{what} is off, and another in eager PyTorch")
    sharded = stack(verify_difference="recapture")
    before = [one.clone() for one in sharded.state.parameters.values()]
    with pytest.raises(RankError, match="in eager PyTorch"):
        sharded.step(*batches(1, 4)[0])
    assert sharded.captures == 2 and all(map(torch.equal, before, sharded.state.parameters.values()))


def test_which_calls_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_compiled.runtime.verify import Verification

    calls: list[int] = []
    made = [0]
    run = Verification.run
    monkeypatch.setattr(Verification, "run", lambda *args: (calls.append(made[0]), run(*args))[1])
    model = build()
    sharded = compile_sharded(model, adamw(model), loss=mse, policy=Policy(lower="eager", verify=3))
    for made[0] in range(8):
        sharded.step(*batches(1, 4)[0])
    assert calls == [0, 1, 3, 6]
    for made[0] in range(8, 11):
        sharded.value_and_grad(*batches(1, 4)[0])
    assert calls == [0, 1, 3, 6, 8, 9]


def test_a_model_that_would_raise_now_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reads(lambda model: 1.0 / model.gain)
    before = copy.deepcopy(dict(model.state_dict()))
    sharded = compile_sharded(model, adamw(model), loss=mse, policy=Policy(lower="eager", verify=1))
    sharded.step(*batches(1, 4)[0])
    monkeypatch.setattr(Guards, "hold", lambda _: True)
    model.gain = 0.0
    with pytest.raises(RankError, match="does not run in eager PyTorch"):
        sharded.step(*batches(1, 4)[0])
    assert before.keys() == sharded.full_state_dict().keys() and int(sharded.state.step) == 1


def test_what_is_not_a_number_of_steps_is_refused() -> None:
    for wrong in (-1, 0.5, "yes"):
        with pytest.raises(ValueError, match=r"Policy\.verify"):
            Policy(verify=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Policy\.verify_difference"):
        Policy(verify=True, verify_difference="warn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sync_every=2"):
        Policy(verify=True, verify_difference="recapture", sync_every=2)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    alike = ("same_as_without", "microbatches_as_without", "at_once")
    sites = ("wired", "wrong_under_a_wire", "local_steps", "stale_on_a_site")
    orders = ("another_order", "another_order_unseen")
    return launch(WORKER, 2, *alike, *sites, "differences", *orders, "raises_on_one_along_tp")


@pytest.fixture(scope="module")
def four() -> dict[str, Any]:
    return launch(WORKER, 4, "wired", "local_steps")


@pytest.mark.parametrize("ranks", ["results", "four"])
def test_gradients_that_the_wire_rounds_and_local_steps_are_no_difference(
    ranks: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(ranks)
    assert all(one.get("result") in ("[True]", "[True, True]") for one in found["wired"]), found
    assert {one.get("result", str(one)) for one in found["local_steps"]} == {"True"}


def test_a_wrong_gradient_under_a_wire_is_an_error(results: dict[str, Any]) -> None:
    for one in results["wrong_under_a_wire"]:
        assert "after its update, is" in one["message"] and "unchanged: True" in one["notes"], one


def test_a_stale_read_on_one_site_is_an_error_there_and_where_sites_meet_next(results: dict[str, Any]) -> None:
    first, second = results["stale_on_a_site"]
    assert "on rank 1, the loss is" in second["message"] and "unchanged: True" in second["notes"], second
    assert first["error"] == "RankError" and "the loss is" in first["message"], first


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize(("replicas", "whole"), [(1, False), (1, True), (2, False)])
def test_what_the_wire_may_move_is_a_bound_and_a_near_one(form: str, replicas: int, whole: bool) -> None:
    """Of means over ranks of gradients with blocks of many sizes, sent as a program sends them."""
    numel, ranks, nearest = 16 * SCALED, 4, 0.0
    plan = Plan((), Policy("ddp" if whole else "zero3"), torch.device("cpu"), ranks // replicas, replicas)
    for seed in range(20):
        torch.manual_seed(seed)
        own = torch.randn(ranks, numel) * torch.rand(ranks, numel // SCALED).pow(4).repeat_interleave(SCALED, 1)
        found = own
        for axis, count in (("shard", ranks // replicas), ("replicate", replicas)):
            again = axis == "replicate" or whole
            found = averaged(found, count, form, seed, again) if count > 1 else found
        bound = moved_by_wire(torch.stack([sent_apart(one, form) for one in own]).mean(0), plan)
        share = (found[0] - own.mean(0)).abs() / bound
        assert float(share.max()) <= 1
        nearest = max(nearest, float(share.max()))
    assert nearest > (0.15 if replicas > 1 else 0.3)


def averaged(own: torch.Tensor, ranks: int, form: str, seed: int, again: bool) -> torch.Tensor:
    """``[world, numel]`` -> the same, the mean of each run of so many ranks, as they send it."""
    operators, numel = kernels.operators, own.shape[1]
    means = []
    for first in range(0, len(own), ranks):
        seeds = [torch.tensor(1000 * seed + rank) for rank in range(first, first + ranks)]
        rows = torch.stack([operators.pack(own[first + n], ranks, one, 0, form=form) for n, one in enumerate(seeds)])
        parts = []
        for place, one in enumerate(seeds):
            sent = rows.view(ranks, ranks, -1)[:, place].reshape(-1)
            part = operators.combine(sent, ranks, numel // ranks, torch.float32, form=form, mean=True)
            if again:
                part = operators.unpack(
                    operators.pack(part, 1, one, 1, form=form), 1, len(part), torch.float32, form=form
                )
            parts.append(part)
        means += [torch.cat(parts)] * ranks
    groups = torch.stack(means)
    return groups if len(own) == ranks else groups.view(-1, ranks, numel).transpose(0, 1).reshape(len(own), numel)


DIFFERENT = {
    "stale_on_both": "gain was 1.0 and is 2.0",
    "stale_on_one": "Policy.verify: in step",
    "stale_in_a_microbatch_of_one": "on rank 1, the loss is",
    "stale_in_an_evaluation_of_one": "on rank 1, value 0 that was returned is",
    "raises_on_one": "on rank 1 the model does not run in eager PyTorch",
}


@pytest.mark.parametrize("case", ["same_as_without", "microbatches_as_without"])
def test_two_ranks_step_as_without_under_every_placement(results: dict[str, Any], case: str) -> None:
    assert [one.get("result", one) for one in results[case]] == [repr([True] * 2)] * 2


def test_no_rank_holds_the_model(results: dict[str, Any]) -> None:
    largest, whole = eval(results["at_once"][0]["result"])
    assert 0 < largest <= whole / 2


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_difference_is_an_error_on_every_rank_and_nothing_changes(results: dict[str, Any], case: str) -> None:
    for one in (answer["result"][case] for answer in results["differences"]):
        assert DIFFERENT[case] in one["message"], one
        assert "unchanged: True" in one["notes"], one


def test_along_tp_a_rank_that_fails_alone_takes_the_others_out_of_their_collectives(results: dict[str, Any]) -> None:
    for one in results["raises_on_one_along_tp"]:
        assert "the model does not run in eager PyTorch" in one["message"], one
        assert "unchanged: True" in one["notes"], one
    assert results["raises_on_one_along_tp"][0]["error"] == "RankError"


def test_a_mesh_in_another_order_is_found_with_its_check_off(results: dict[str, Any]) -> None:
    assert all("Policy.verify: in step" in one["message"] for one in results["another_order"])
    assert all("result" in one for one in results["another_order_unseen"])


def test_a_step_without_rows_is_none() -> None:
    model = nn.Linear(6, 1)
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda m, x, y: nn.functional.mse_loss(m(x), y),
        policy=Policy(lower="eager", weigh="rows", verify=True),
    )  # fmt: skip
    sharded.step(torch.randn(4, 6), torch.randn(4, 1))
    before = sharded.full_state_dict()
    assert sharded.step(torch.zeros(0, 6), torch.zeros(0, 1)).isnan()
    assert all(torch.equal(before[name], value) for name, value in sharded.full_state_dict().items())
