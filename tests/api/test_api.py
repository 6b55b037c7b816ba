"""compile_sharded and Sharded as a person uses them, on one process; what they refuse is in test_api_refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from fsdp_compiled import CaptureError, Policy, State, compile_sharded
from fsdp_compiled.runtime.parameters.sharded_parameter import is_live
from tests.toys import EAGER, Net, batches, build, mse, same_weights, sgd

# Numbers on one process: bit for bit plain PyTorch.


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_training_on_one_process_is_bitwise_plain_pytorch(kind: type[torch.optim.Optimizer]) -> None:
    model = build()
    plain, off = copy.deepcopy(model), copy.deepcopy(model)
    sharded = compile_sharded(model, kind(model.parameters(), lr=1e-2), loss=mse, policy=EAGER)  # type: ignore[call-arg]
    optimizer = kind(plain.parameters(), lr=1e-2)  # type: ignore[call-arg]
    wrong = kind(off.parameters(), lr=1.001e-2)  # type: ignore[call-arg]
    for x, y in batches(20):
        loss = sharded.step(x, y)
        for reference, stepper in ((plain, optimizer), (off, wrong)):
            stepper.zero_grad()
            expected = mse(reference, x, y)
            expected.backward()
            stepper.step()
            assert torch.equal(loss, expected) or reference is off
    assert same_weights(sharded.full_state_dict(), dict(plain.state_dict()))
    assert not same_weights(sharded.full_state_dict(), dict(off.state_dict()))  # control
    assert sharded.captures == 1


def test_the_norm_is_the_one_before_clipping_and_the_gradient_is_clipped() -> None:
    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=Policy(lower="eager", clip=0.05))
    optimizer = sgd(plain)
    for x, y in batches(3):
        sharded.step(x, y)
        optimizer.zero_grad()
        mse(plain, x, y).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        torch.testing.assert_close(sharded.grad_norm, norm, rtol=1e-6, atol=0)
        assert norm > 0.05
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(sharded.full_state_dict()[name], value, rtol=1e-5, atol=1e-7)


def test_a_learning_rate_schedule_drives_the_step_without_a_recompile() -> None:
    model = build()
    plain = copy.deepcopy(model)
    mine, theirs = sgd(model), sgd(plain)
    sharded = compile_sharded(model, mine, loss=mse, policy=EAGER)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) for optimizer in (mine, theirs)]
    for x, y in batches(10):
        sharded.step(x, y)
        theirs.zero_grad()
        mse(plain, x, y).backward()
        theirs.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the scheduler must see that the optimizer was stepped
            for schedule in schedules:
                schedule.step()
    assert same_weights(sharded.full_state_dict(), dict(plain.state_dict()))
    assert sharded.captures == 1


def test_another_hyperparameter_may_change_and_is_compiled_in(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    plain = copy.deepcopy(model)
    mine, theirs = sgd(model), sgd(plain)
    sharded = compile_sharded(model, mine, loss=mse, policy=EAGER)
    for index, (x, y) in enumerate(batches(4)):
        if index == 2:
            mine.param_groups[0]["weight_decay"] = theirs.param_groups[0]["weight_decay"] = 0.3
        sharded.step(x, y)
        theirs.zero_grad()
        mse(plain, x, y).backward()
        theirs.step()
    assert same_weights(sharded.full_state_dict(), dict(plain.state_dict()))
    assert sharded.captures == 2 and "compiled again" in caplog.text


def test_an_optimizer_that_has_stepped_brings_its_state_along() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    first, *rest = batches(4)
    mse(model, *first).backward()
    optimizer.step()
    optimizer.zero_grad()
    plain = copy.deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    sharded = compile_sharded(model, optimizer, loss=mse, policy=EAGER)
    for x, y in rest:
        sharded.step(x, y)
        theirs.zero_grad()
        mse(plain, x, y).backward()
        theirs.step()
    assert same_weights(sharded.full_state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_both_lowerings_train_alike(lower: str) -> None:
    model = build(dropout=0.3)
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=Policy(lower=lower, clip=1.0))
    torch.manual_seed(3)
    optimizer = sgd(plain)
    for x, y in batches(5):
        drawn = torch.get_rng_state()
        loss = sharded.step(x, y)
        torch.set_rng_state(drawn)  # both draw from the one default generator
        optimizer.zero_grad()
        expected = mse(plain, x, y)
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, value in plain.state_dict().items():
        mine = sharded.full_state_dict()[name]
        assert (mine - value).norm() <= 1e-6 * value.norm()


# The calls.


def test_value_and_grad_differentiates_and_updates_nothing() -> None:
    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, loss=mse, policy=EAGER)
    x, y = batches(1)[0]
    loss, gradients = sharded.value_and_grad(x, y)
    expected = mse(plain, x, y)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert gradients.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and torch.equal(gradients[name], parameter.grad.flatten())
    assert same_weights(sharded.full_state_dict(), dict(plain.state_dict()))


def test_forward_follows_train_and_eval_and_returns_any_structure() -> None:
    class Wrapped(Net):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            y = super().forward(x)
            return {"logits": y, "twice": (y, 2 * y), "width": 6}

    torch.manual_seed(0)
    model = Wrapped(dropout=0.5)
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, policy=EAGER)
    x, _ = batches(1)[0]
    model.eval()
    plain.eval()
    result, expected = sharded(x), plain(x)
    assert result["width"] == 6 and not result["logits"].requires_grad
    assert torch.equal(result["logits"], expected["logits"]) and torch.equal(result["twice"][1], expected["twice"][1])
    assert torch.equal(sharded(x)["logits"], result["logits"])
    model.train()
    assert not torch.equal(sharded(x)["logits"], result["logits"])
    assert sharded.captures == 2


def test_a_loss_inside_a_dictionary_is_found() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        output = model(x)
        return {"mean": output.mean(), "loss": F.mse_loss(output, y)}

    model = build()
    plain = copy.deepcopy(model)
    x, y = batches(1)[0]
    with pytest.raises(CaptureError, match=r"returned a tuple in the place of a scalar.*or .scalar, aux"):
        compile_sharded(
            copy.deepcopy(model), loss=lambda m, x, y: (loss(m, x, y)["loss"], m(x).mean(), x), policy=EAGER
        ).value_and_grad(x, y)
    sharded = compile_sharded(model, sgd(model), loss=loss, policy=EAGER)
    assert torch.equal(sharded.step(x, y), mse(plain, x, y).detach())


def test_numbers_of_another_type_are_another_program() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, weight: Any) -> torch.Tensor:
        return mse(model, x, y) * (1 if isinstance(weight, bool) else 2 if isinstance(weight, int) else 3)

    sharded = compile_sharded(build(), loss=loss, policy=EAGER)
    found = [sharded.value_and_grad(*batches(1)[0], weight)[0] for weight in (True, 1, 1.0)]
    assert found[1] == 2 * found[0] and found[2] == 3 * found[0] and sharded.captures == 3


def test_a_batch_of_unknown_objects_is_refused() -> None:
    class Bag:
        x = torch.ones(5, 6)

    sharded = compile_sharded(build(), loss=lambda model, bag: model(bag.x).mean(), policy=EAGER)
    with pytest.raises(ValueError, match=r"The batch holds a .*Bag\. Pass tensors"):
        sharded.value_and_grad(Bag())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_one_cycle_drives_momentum_without_a_recompile(kind: type[torch.optim.Optimizer]) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model = build()
    plain = copy.deepcopy(model)
    mine, theirs = (kind(m.parameters(), lr=0.01, **options) for m in (model, plain))
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=20) for o in (mine, theirs)]
    sharded = compile_sharded(model, mine, loss=mse, policy=EAGER)
    for x, y in batches(8):
        sharded.step(x, y)
        theirs.zero_grad()
        mse(plain, x, y).backward()
        theirs.step()
        for schedule in schedules:
            schedule.step()
    assert sharded.captures == 1
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(sharded.full_state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_a_hyperparameter_that_asks_for_new_state_gets_it() -> None:
    model = build()
    plain = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    sharded = compile_sharded(model, mine, loss=mse, policy=EAGER)
    for index, (x, y) in enumerate(batches(4)):
        for optimizer in (mine, theirs):
            optimizer.param_groups[0]["momentum"] = 0.9 if index >= 2 else 0
        sharded.step(x, y)
        theirs.zero_grad()
        mse(plain, x, y).backward()
        theirs.step()
    assert same_weights(sharded.full_state_dict(), dict(plain.state_dict()))


def test_aux_comes_back_in_its_own_structure() -> None:
    def with_aux(model: nn.Module, x: torch.Tensor, *, y: torch.Tensor) -> Any:
        output = model(x)
        return F.mse_loss(output, y), {"output": output, "rows": len(x)}

    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, sgd(model), loss=with_aux, policy=EAGER)
    x, y = batches(1)[0]
    loss, aux = sharded.step(x, y=y)
    assert loss.dim() == 0 and aux["rows"] == 5
    assert torch.equal(aux["output"], plain(x)) and not aux["output"].requires_grad


def test_a_model_that_returns_its_loss_needs_no_loss_function() -> None:
    class Output(dict[str, torch.Tensor]):
        pass

    class WithLoss(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return {"loss": F.mse_loss(logits, labels), "logits": logits}

    torch.manual_seed(0)
    model = WithLoss()
    x, y = batches(1)[0]
    expected = model(x, y)["loss"].detach().clone()
    sharded = compile_sharded(model, sgd(model), policy=EAGER)
    assert torch.equal(sharded.step(x, labels=y), expected)


def test_apply_is_step_as_a_function_and_consumes_its_state() -> None:
    model, other = build(), build()
    by_step = compile_sharded(model, sgd(model), loss=mse, policy=EAGER)
    by_apply = compile_sharded(other, sgd(other), loss=mse, policy=EAGER)
    state = by_apply.state
    kept = pytree.tree_map(torch.clone, state)
    assert isinstance(kept, State)
    losses, again = [], []
    for batch in batches(3):
        previous = state
        state, loss = by_apply.apply(state, *batch)
        losses.append(loss.item())
        with pytest.raises(RuntimeError, match="consumed by apply"):
            _ = previous.parameters
    assert losses == [by_step.step(*batch).item() for batch in batches(3)]
    for batch in batches(3):  # from the clone: the same steps once more
        kept, loss = by_apply.apply(kept, *batch)
        again.append(loss.item())
    assert again == losses
    assert int(state.step) == int(kept.step) == 3


def test_a_new_batch_shape_is_captured_once_and_kept() -> None:
    model = build()
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=EAGER)
    for rows in (5, 3, 5, 3, 5):
        sharded.step(*batches(1, rows)[0])
    assert sharded.captures == 2 and len(sharded.programs) == 2


def test_updates_are_made_in_place() -> None:
    model = build()
    sharded = compile_sharded(model, torch.optim.AdamW(model.parameters()), loss=mse, policy=EAGER)
    before = {id(leaf): leaf.data_ptr() for leaf in pytree.tree_leaves(sharded.state)}
    for batch in batches(3):
        sharded.step(*batch)
    assert before == {id(leaf): leaf.data_ptr() for leaf in pytree.tree_leaves(sharded.state)}


def test_batch_norm_buffers_are_updated_and_stay_on_the_model() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    model, plain = make(), make()
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=EAGER)
    optimizer = sgd(plain)
    for x, y in batches(3):
        sharded.step(x, y)
        optimizer.zero_grad()
        mse(plain, x, y).backward()
        optimizer.step()
    assert same_weights(sharded.full_state_dict(), dict(plain.state_dict()))
    assert torch.equal(model[1].running_mean, plain[1].running_mean)  # type: ignore[index, union-attr]


def test_a_meta_model_is_initialised_unit_by_unit() -> None:
    alive: list[int] = []

    def init(module: nn.Module) -> None:
        held = [parameter for parameter in model.parameters() if not is_live(parameter)]
        real = [parameter for parameter in held if not parameter.is_meta]
        alive.append(sum(parameter.numel() for parameter in real))
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with torch.device("meta"):
        model = Net()
    total = sum(parameter.numel() for parameter in model.parameters())
    torch.manual_seed(5)
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=EAGER, init=init)
    largest = max(sum(slot.leaf.numel for slot in buffer.slots) for buffer in sharded.plan.buffers)
    assert max(alive) <= largest < total
    losses = [sharded.step(*batch) for batch in batches(5)]
    assert all(torch.isfinite(loss) for loss in losses)
    weights = sharded.full_state_dict()
    assert weights["head.weight"].std() > 0 and weights["blocks.0.norm.weight"].shape == (6,)


def test_a_meta_module_with_buffers_alone_is_filled() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(6.0), persistent=False)

        def reset_parameters(self) -> None:
            self.table.copy_(torch.arange(6.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table

    with torch.device("meta"):
        model = nn.Sequential(Rotary(), nn.Linear(6, 2))
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=EAGER)
    assert torch.equal(sharded.state.buffers["0.table"], torch.arange(6.0))
    assert torch.isfinite(sharded.step(*batches(1)[0]))


def test_plan_program_and_dump_show_what_will_run(tmp_path: Any) -> None:
    model = build()
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=EAGER)
    assert "blocks.2" in str(sharded.plan) and "4 units" in str(sharded.plan)
    sharded.step(*batches(1)[0])
    assert "backward" in str(sharded.program) and "blocks.1" in str(sharded.program)
    folder = sharded.dump(tmp_path / "dump")
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == "00-capture.txt" and "01-gather.diff" in names and "plan.txt" in names
    assert "all_gather" not in (folder / "00-capture.txt").read_text()


@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)])
def test_mixed_precision_keeps_shards_whole_and_casts_at_the_ends(precision: MixedPrecisionPolicy) -> None:
    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=Policy(lower="eager", precision=precision))
    x, y = batches(1)[0]
    expected = F.mse_loss(plain.to(torch.bfloat16)(x.to(torch.bfloat16)).float(), y)
    assert torch.equal(sharded.step(x, y), expected)
    assert all(shard.dtype == torch.float32 for shard in sharded.state.parameters.values())
    assert sharded(x).dtype == torch.float32


def test_a_list_of_blocks_may_hold_none() -> None:
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), None, nn.Linear(4, 4)])  # type: ignore[list-item]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x if layer is None else layer(x)
            return x

    model = Some()
    policy = Policy(lower="eager", bucket_mb=0)
    sharded = compile_sharded(model, loss=lambda model, x: model(x).square().mean(), policy=policy)
    assert sharded.value_and_grad(torch.ones(2, 4))[1].keys() == dict(model.named_parameters()).keys()
    assert {"layers.0", "layers.2"} <= {unit.name for unit in sharded.plan.units}
