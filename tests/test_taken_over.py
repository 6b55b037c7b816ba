"""Model and optimizer after compile_sharded: parameters are live; what would do nothing is refused at the call."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parametrize

from fsdp_compiled import CaptureError, Policy, Sharded, compile_sharded
from fsdp_compiled.runtime.parameters.sharded_parameter import WholeParameter
from tests.live_parameters import Net, X, compare, loss
from tests.live_parameters import build as build_sgd

EAGER = Policy(lower="eager")


@dataclass
class Case:
    """A model before and after it was taken over, and the same untouched."""

    model: Net
    optimizer: torch.optim.Optimizer
    sharded: Sharded
    eager: Net
    held: list[nn.Parameter]  # the user's own list, from before

    @property
    def weight(self) -> nn.Parameter:
        return self.held[1]  # of layers.0


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@pytest.fixture
def case() -> Case:
    model, optimizer = build()
    held = list(model.parameters())
    held = [held[0], model.layers[0].weight, *held[1:]]  # type: ignore[list-item]
    return Case(model, optimizer, compile_sharded(model, optimizer, loss=loss, policy=EAGER), build()[0], held)


def assign(owner: Callable[[Case], Any], name: str, value: Any) -> Callable[[Case], Any]:
    return lambda case: setattr(owner(case), name, value)


WEIGHT = r"^layers\.0\.weight is in shards since compile_sharded"
ANY = r"is in shards since compile_sharded|was taken over by compile_sharded"
REFUSED: dict[str, tuple[Callable[[Case], Any], str]] = {
    # converted, or other memory in their place
    "load_state_dict assign": (lambda c: c.model.load_state_dict(c.eager.state_dict(), assign=True), "without assign"),
    "share_memory": (lambda c: c.model.share_memory(), ANY),
    "half": (lambda c: c.model.half(), "Convert the model before compile_sharded"),
    "double": (lambda c: c.model.double(), "Convert the model before compile_sharded"),
    "to_empty": (lambda c: c.model.to_empty(device="cpu"), ANY),
    "data = ...": (assign(lambda c: c.weight, "data", torch.ones(4, 4)), WEIGHT + ".*in place"),
    "vector_to_parameters": (lambda c: nn.utils.vector_to_parameters(torch.ones(99), c.model.parameters()), ANY),
    "a parametrization": (
        lambda c: parametrize.register_parametrization(c.model.layers[0], "weight", nn.Identity()),
        WEIGHT + ".*Register parametrizations before compile_sharded",
    ),
    "spectral_norm": (lambda c: nn.utils.parametrizations.spectral_norm(c.model.layers[0]), WEIGHT + ".*before"),
    # hooks
    "register_hook": (lambda c: c.weight.register_hook(lambda g: g), WEIGHT + ".*parametriz"),
    "register_post_accumulate_grad_hook": (
        lambda c: c.weight.register_post_accumulate_grad_hook(lambda p: None),
        WEIGHT,
    ),
    # the optimizer
    "optimizer.step": (lambda c: c.optimizer.step(), r"sharded\.step"),
    "optimizer.state_dict": (lambda c: c.optimizer.state_dict(), r"sharded\.state\.optimizer"),
    "optimizer.load_state_dict": (lambda c: c.optimizer.load_state_dict({}), r"sharded\.state\.optimizer"),
    "optimizer.state[p]": (lambda c: c.optimizer.state[c.weight], r"sharded\.state\.optimizer"),
    "optimizer.state.clear": (lambda c: c.optimizer.state.clear(), r"sharded\.state\.optimizer"),
    "len(optimizer.state)": (lambda c: len(c.optimizer.state), r"sharded\.state\.optimizer"),
    "iterating over optimizer.state": (lambda c: list(c.optimizer.state.items()), r"sharded\.state\.optimizer"),
    "add_param_group": (lambda c: c.optimizer.add_param_group({"params": [c.model.frozen]}), "before compile_sharded"),
    "a parameter appended": (lambda c: c.optimizer.param_groups[0]["params"].append(c.model.frozen), "before compile"),
    "a group emptied": (lambda c: c.optimizer.param_groups[0]["params"].clear(), "before compile_sharded"),
    "deepcopy of the optimizer": (lambda c: copy.deepcopy(c.optimizer), ANY),
}


# What no call could refuse, and the words of the next call's error.
NOTICED: dict[str, tuple[Callable[[Case], Any], str]] = {
    "weight = ...": (
        lambda c: setattr(c.model.layers[0], "weight", nn.Parameter(torch.ones(4, 4))),
        r"layers\.0\.weight was replaced"
    ),
    "weight = None": (lambda c: setattr(c.model.layers[0], "bias", None), r"layers\.0\.bias was removed"),
    "del": (lambda c: delattr(c.model.layers[0], "weight"), r"layers\.0\.weight was removed"),
    "register_parameter": (
        lambda c: c.model.register_parameter("more", nn.Parameter(torch.ones(2))),
        "more was added after compile_sharded"
    ),
    "a new module": (lambda c: c.model.add_module("adapter", nn.Linear(4, 4)), r"adapter\.weight was added"),
    "a replaced module": (lambda c: setattr(c.model, "norm", nn.LayerNorm(4)), r"norm\.weight was replaced"),
    "weights tied later": (
        lambda c: setattr(c.model.layers[1], "weight", c.model.layers[0].weight), r"layers\.1\.weight was replaced"
    ),
    "weights untied": (lambda c: setattr(c.model.head, "weight", nn.Parameter(torch.ones(4, 4))), r"head\.weight was"),
    "functional_call's tables": (lambda c: c.model.layers[0]._parameters.clear(), r"layers\.0\.weight was removed"),
    "an empty entry filled with nothing": (
        lambda c: c.model.norm.register_parameter("scale", None), r"norm\.scale was added"
    ),
    "a backward hook": (lambda c: c.model.head.register_full_backward_hook(lambda *_: None), "head .* has a backw"),
    "a backward-pre hook": (lambda c: c.model.register_full_backward_pre_hook(lambda *_: None), "The model .* has a"),
    "a group's parameters": (
        lambda c: c.optimizer.param_groups[0].update(params=[c.weight]), "optimizer's groups were changed"
    ),
    "a group removed": (lambda c: c.optimizer.param_groups.clear(), "group"),
    "optimizer.state = ...": (lambda c: setattr(c.optimizer, "state", {}), r"optimizer\.state was replaced"),
    "requires_grad_": (lambda c: c.model.requires_grad_(False), r"requires_grad of scale was changed"),
    "requires_grad = ...": (assign(lambda c: c.weight, "requires_grad", False), r"layers\.0\.weight was changed"),
    "to another device": (lambda c: c.model.to("meta"), "scale was replaced"),
    "thawed": (lambda c: c.model.frozen.requires_grad_(), r"of frozen was changed.*it was frozen, and is trainable"),
    "replaced by an equal one": (
        lambda c: setattr(c.model, "scale", nn.Parameter(torch.tensor(1.5))), "scale was replaced"
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED)
def test_what_would_do_nothing_is_refused_at_the_call(case: Case, call: str) -> None:
    act, words = REFUSED[call]
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        act(case)


def test_a_model_trains_on_after_every_refusal_as_if_there_had_been_none(case: Case) -> None:
    for act, _ in REFUSED.values():
        with pytest.raises(RuntimeError):
            act(case)
    trained_as_eager(case)


def trained_as_eager(case: Case, steps: int = 3) -> None:
    model, optimizer = build()
    for _ in range(steps):
        optimizer.zero_grad()
        expected = loss(model, X)
        expected.backward()
        optimizer.step()
        assert torch.equal(case.sharded.step(X), expected)
    assert same(case.sharded.full_state_dict(), model.state_dict())
    assert not same(model.state_dict(), case.eager.state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("change", NOTICED)
def test_what_no_call_could_refuse_is_refused_by_name_at_the_next(case: Case, change: str) -> None:
    act, words = NOTICED[change]
    parameters = case.sharded.state.parameters
    before = {name: value.clone() for name, value in parameters.items()}
    act(case)
    for call in (case.sharded.step, case.sharded.value_and_grad, case.sharded):
        with pytest.raises(ValueError, match=words):
            call(X)
    assert same(parameters, before) and case.sharded.captures == 0  # type: ignore[arg-type]


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


def described(model: Net, optimizer: torch.optim.Optimizer) -> Any:
    """All that compile_sharded could change, by identity or bit for bit."""
    tables = [
        {name: {key: id(one) for key, one in value.items()} if isinstance(value, dict) else value
         for name, value in vars(module).items()}
        for module in model.modules()
    ]  # fmt: skip
    tensors = [
        (type(p), p.tolist(), p.requires_grad, p.grad, p._backward_hooks)
        for p in model.state_dict(keep_vars=True).values()
    ]
    groups = [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups]
    state = {
        id(p): {name: (id(value), value.tolist()) for name, value in one.items()} for p, one in optimizer.state.items()
    }
    return tables, tensors, groups, state, sorted(vars(optimizer)), torch.get_rng_state().tolist()


def failing(_name: str, _module: nn.Module) -> bool:
    raise KeyError("of the user's")


class Aged(torch.optim.SGD):
    """Brings along state that differs inside a group."""


REFUSALS: dict[str, tuple[Callable[[Net, torch.optim.Optimizer], Any], type[Exception]]] = {
    "a loss that is no function": (lambda m, o: compile_sharded(m, o, loss="mse"), ValueError),  # type: ignore[arg-type]
    "units that match nothing": (lambda m, o: compile_sharded(m, o, units=["none.*"]), ValueError),
    "units that raise": (lambda m, o: compile_sharded(m, o, units=failing), KeyError),
    "an optimizer of another model": (
        lambda m, o: compile_sharded(m, torch.optim.SGD(build()[0].parameters(), lr=0.1)), ValueError
    ),
    "an optimizer that is not element-wise": (
        lambda m, o: compile_sharded(m, torch.optim.LBFGS(m.parameters())), ValueError
    ),
    "state that differs inside a group": (lambda m, o: compile_sharded(m, aged(m, o)), ValueError),
    "a hook": (lambda m, o: compile_sharded(hooked(m), o), ValueError),
    "offload on a CPU": (lambda m, o: compile_sharded(m, o, policy=Policy(offload=True)), ValueError),
}  # fmt: skip


def aged(model: Net, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.state[model.scale]["step"] += 1
    return optimizer


def hooked(model: Net) -> Net:
    if not model.scale._backward_hooks:
        model.scale.register_hook(lambda gradient: gradient)
    return model


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_compile_sharded_leaves_everything_as_it_was(refusal: str) -> None:
    model, optimizer = build()
    loss(model, X).backward()
    optimizer.step()
    act, kind = REFUSALS[refusal]
    if refusal == "state that differs inside a group":
        aged(model, optimizer)
        act = lambda m, o: compile_sharded(m, o)  # noqa: E731
    if refusal == "a hook":
        hooked(model)
    before = described(model, optimizer)
    with pytest.raises(kind):
        act(model, optimizer)
    assert described(model, optimizer) == before
    model.scale.data += 1
    assert described(model, optimizer) != before
