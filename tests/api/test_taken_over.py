"""Model and optimizer after compile_sharded: parameters are live, and all else is as it was."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import CaptureError, Policy, compile_sharded
from fsdp_compiled.runtime.parameters.sharded_parameter import WholeParameter
from tests.live_parameters import Net, X, compare, loss
from tests.live_parameters import build as build_sgd
from tests.taken_over import EAGER, Case, build, same, taken, trained_as_eager


@pytest.fixture
def case() -> Case:
    return taken()


TRUE: dict[str, Callable[[Net], Any]] = {
    "shape": lambda m: m.head.weight.shape,
    "stride": lambda m: m.head.weight.stride(),
    "dtype": lambda m: m.head.weight.dtype,
    "device": lambda m: m.head.weight.device,
    "numel": lambda m: sum(p.numel() for p in m.parameters()),
    "dim": lambda m: [(p.dim(), p.ndim, p.size()) for p in m.parameters()],
    "bytes": lambda m: sum(p.nbytes + p.element_size() for p in m.parameters()),
    "len": lambda m: len(m.head.weight),
    "flags": lambda m: [(p.is_leaf, p.is_meta, p.is_cuda, p.is_sparse, p.is_floating_point()) for p in m.parameters()],
    "requires_grad": lambda m: [p.requires_grad for p in m.parameters()],
    "is_contiguous": lambda m: m.head.weight.is_contiguous(),
    "isinstance": lambda m: all(isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor) for p in m.parameters()),
    "names": lambda m: [name for name, _ in m.named_parameters()],
    "names of ties": lambda m: [name for name, _ in m.named_parameters(remove_duplicate=False)],
    "ties": lambda m: m.head.weight is m.layers[1].weight,
    "repr": repr,
    "a repr of parameters": lambda m: repr(nn.ParameterList(m.parameters())),
    "identity": lambda m: len(dict.fromkeys(m.parameters())) == len(set(map(id, m.parameters()))),
    "membership": lambda m: m.head.weight in set(m.parameters()),
    "buffers": lambda m: {name: buffer.tolist() for name, buffer in m.named_buffers()},
    "a state_dict without parameters": lambda m: nn.BatchNorm1d(4, affine=False).state_dict().keys(),
    "train": lambda m: m.train(False).training,
    "to the same": lambda m: (m.to("cpu") is m, m.float() is m, m.cpu() is m),
    "zero_grad": lambda m: m.zero_grad(),
    "requires_grad_ to what it is": lambda m: m.head.requires_grad_(True) is m.head,
    "functional_call": lambda m: torch.func.functional_call(
        m.layers[0], {"weight": torch.ones(4, 4), "bias": torch.ones(4)}, (X,)
    ).tolist(),
    "a module without parameters": lambda m: nn.Sequential(nn.Tanh())(X).tolist(),
}


@pytest.mark.parametrize("read", TRUE)
def test_what_is_true_of_the_model_can_be_read(case: Case, read: str) -> None:
    assert TRUE[read](case.model) == TRUE[read](case.eager)


def test_the_optimizer_stays_the_place_of_the_rate(case: Case) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(case.optimizer, lambda step: 1 / (1 + step))
    model, optimizer = build()
    other = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        case.optimizer.zero_grad()
        case.sharded.step(X)
        schedule.step()
        optimizer.zero_grad()
        loss(model, X).backward()
        optimizer.step()
        other.step()
    assert repr(case.optimizer) == repr(optimizer)
    assert same(case.sharded.full_state_dict(), model.state_dict())
    assert list(case.optimizer.param_groups[0]["params"]) == [p for p in case.model.parameters() if p.requires_grad]
    assert case.sharded.captures == 1


def test_whoever_held_a_parameter_holds_the_live_one(case: Case) -> None:
    assert case.weight is case.model.layers[0].weight and isinstance(case.weight, WholeParameter)
    assert case.optimizer.param_groups[0]["params"][0] is case.held[0]
    assert repr(case.weight).startswith("Parameter containing:")
    before = case.weight.detach().clone()
    case.sharded.step(X)
    assert not torch.equal(case.weight, before)
    assert torch.equal(case.weight, case.sharded.full_state_dict()["layers.0.weight"])


def test_what_is_read_and_written_is_what_an_eager_model_has() -> None:
    model, optimizer = build_sgd()
    sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER)
    assert compare(sharded, model, *build_sgd()) == []


def test_a_comparison_tells_a_write_that_is_lost() -> None:
    model, optimizer = build_sgd()
    sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER)
    kept = {name: shard.clone() for name, shard in sharded.state.parameters.items()}
    inner = sharded.step

    def forgetful(x: torch.Tensor) -> torch.Tensor:
        for name, shard in sharded.state.parameters.items():
            shard.copy_(kept[name])
        return inner(x)

    sharded.step = forgetful  # type: ignore[method-assign]
    assert any(line.startswith("the step after mul_") for line in compare(sharded, model, *build_sgd()))


def test_a_tensor_that_was_put_into_the_state_is_shown(case: Case) -> None:
    for key, shard in case.sharded.state.parameters.items():
        case.sharded.state.parameters[key] = shard * 2
    case.sharded(X)
    assert torch.equal(case.weight, case.eager.layers[0].weight * 2)
    with torch.no_grad():
        case.weight.zero_()
    case.sharded.step(X)
    assert (case.weight.abs() <= 0.011).all()


def test_copies_in_the_compute_dtype_follow_what_is_written_through_the_model() -> None:
    found = []
    for writes in (lambda p: p.mul_(0.5), lambda p: p.data.mul_(0.5), lambda p: p.detach().mul_(0.5), lambda p: p):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        policy = Policy(
            lower="eager", kernels=True, copies=True, precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        )
        sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.0), loss=loss, policy=policy)
        sharded.step(X)
        with torch.no_grad():
            writes(model.weight)
            model.bias.zero_()
        found.append(sharded.step(X).item())
    assert found[0] == found[1] == found[2] == pytest.approx(found[3] / 4, rel=1e-2)


def test_a_backward_after_a_step_between_is_an_error_as_in_eager(case: Case) -> None:
    case.sharded.step(X)
    value = loss(case.model, X)
    case.sharded.step(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_step_runs_no_python_for_a_parameter(case: Case) -> None:
    case.sharded.step(X)
    code = Counter[str]()

    def count(frame: Any, event: str, _: Any) -> None:
        code[frame.f_code.co_filename.rsplit("/", 1)[-1]] += event == "call"

    sys.setprofile(count)
    try:
        case.sharded.step(X)
    finally:
        sys.setprofile(None)
    assert code["sharded.py"] > 0  # that it counts
    assert code["sharded_operators.py"] == code["shard_layout.py"] == code["gathered_call.py"] == 0
    assert code["sharded_parameter.py"] <= 4  # around one comparison of all tables


def test_what_a_user_noted_on_a_parameter_stays_on_it() -> None:
    model, optimizer = build()
    model.head.weight.no_decay = True  # type: ignore[assignment]
    compile_sharded(model, optimizer, loss=loss, policy=EAGER)
    assert model.head.weight.no_decay is True and model.layers[1].weight.no_decay is True
    assert not hasattr(model.scale, "no_decay")


def test_what_a_user_noted_on_a_parameter_is_read_in_forward() -> None:
    class Noted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * getattr(self.weight, "gain", 1.0)

    models = [Noted(4, 4), Noted(4, 4)]
    models[0].load_state_dict(models[1].state_dict())
    for model in models:
        model.weight.gain = 3.0  # type: ignore[assignment]
    expected = loss(models[1], X)
    assert torch.equal(compile_sharded(models[0], loss=loss, policy=EAGER).value_and_grad(X)[0], expected)
    del models[1].weight.gain
    assert not torch.equal(loss(models[1], X), expected)


class Aliased(nn.Linear):
    """Reads its weight by a list that PyTorch does not know."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.alias = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.alias[0])


def test_a_parameter_that_is_read_past_the_model_is_refused_by_name(case: Case) -> None:
    taken = case.model.layers[0]
    for model, objective, words in (
        (Aliased(), loss, "which is not a parameter of the model: its gradient would be lost"),
        (nn.Linear(4, 4), lambda m, x: F.linear(m(x), case.weight).mean(), "its gradient would be lost"),
        (nn.Linear(4, 4), lambda m, x: (m(x) * case.weight.mean()).mean(), "its gradient would be lost"),
        (nn.Linear(4, 4), lambda m, x: taken(m(x)).mean(), "its gradient would be lost"),
        (nn.Linear(4, 4), lambda m, x: case.model(m(x)).mean(), "This Net was taken over.*through the other yet"),
    ):
        with pytest.raises(CaptureError, match=f"(?s){words}"):
            compile_sharded(model, loss=objective, policy=EAGER).value_and_grad(X)


def test_a_parameter_that_is_weakly_referenced_is_replaced_and_left_empty() -> None:
    model, optimizer = build()
    held = model.layers[0].weight
    torch.compile(model, backend="eager")(X)  # Dynamo's guards hold weak references
    sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER)
    now = model.layers[0].weight
    assert isinstance(now, WholeParameter) and any(now is one for one in optimizer.param_groups[0]["params"])
    assert held is now or held.numel() == 0
    expected = build()[0]
    expected(X)  # the running statistics that the call above moved
    assert torch.equal(sharded.step(X), loss(expected, X))


def test_a_model_that_shares_a_parameter_or_module_with_a_taken_one_is_refused(case: Case) -> None:
    sharing = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharing[1].weight = case.weight  # type: ignore[assignment]
    for model in (case.model, sharing, nn.Sequential(case.model.head), nn.Sequential(nn.Linear(4, 4), case.model)):
        with pytest.raises(ValueError, match="was taken over by compile_sharded before"):
            compile_sharded(model, loss=loss, policy=EAGER)
    trained_as_eager(case, 1)


def test_models_may_share_a_module_without_parameters() -> None:
    act = nn.Tanh()
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), act)
        compile_sharded(model, loss=loss, policy=EAGER)


def test_a_copy_made_before_is_a_model_of_its_own() -> None:
    model, optimizer = build()
    copied = copy.deepcopy(model)
    case = Case(model, optimizer, compile_sharded(model, optimizer, loss=loss, policy=EAGER), build()[0], [])
    trained_as_eager(case, 1)
    assert same(copied.state_dict(), case.eager.state_dict())
    copied.load_state_dict(case.sharded.full_state_dict())
    assert same(copied.state_dict(), case.sharded.full_state_dict())


def test_full_state_dict_is_what_state_dict_would_be_hooks_and_metadata_included() -> None:
    def hooked() -> tuple[Net, torch.optim.Optimizer]:
        model, optimizer = build()
        model.layers[0].register_state_dict_post_hook(
            lambda module, found, prefix, _: found.update({prefix + "double": found[prefix + "weight"] * 2})
        )
        return model, optimizer

    model, optimizer = hooked()
    expected = hooked()[0].state_dict()
    sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER)
    found = sharded.full_state_dict()
    assert same(found, expected) and "layers.0.double" in found
    assert found._metadata == expected._metadata  # type: ignore[attr-defined]
    assert found["head.weight"].data_ptr() == found["layers.1.weight"].data_ptr()  # tied, as they were
    found["scale"].zero_()
    assert same(sharded.full_state_dict(), expected) and same(model.state_dict(), expected)
