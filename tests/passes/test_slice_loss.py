"""A loss in slices of rows is the whole loss, as are its gradients, and no value has all logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, compile_sharded, fully_shard
from fsdp_compiled.analysis.memory import Persistent
from fsdp_compiled.analysis.peak_memory import predict
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan
from tests import simulate

ROWS, CLASSES, WIDTH = 24, 96, 16
SLICED = Policy(lower="eager", bucket_mb=0, loss_rows=10)  # 10, 10 and 4
BOUND = 1e-6  # of the largest
IGNORED = 5


class Model(nn.Module):
    def __init__(self, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def mean(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def summed(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten(), reduction="sum") * 0.5 + 1


def squared(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    return mean(model, tokens, targets) ** 2


def batches(steps: int = 2, ranks: int = 2) -> list[list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(1)
    return [[tuple(torch.randint(CLASSES, (2, 4, ROWS // 4))) for _ in range(ranks)] for _ in range(steps)]  # type: ignore[misc]


def trained(model: Model, loss: Any, policy: Policy, damage: Any = None) -> simulate.Simulation:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    like = loss, model.head.bias is None, model.head.weight is model.embed.weight
    return simulate.simulate(model, optimizer, loss, batches(), policy, damage=damage, traced_as=like)


def furthest(one: simulate.Simulation, other: simulate.Simulation) -> float:
    pairs = [(value, other.parameters[name]) for name, value in one.parameters.items()]
    pairs += list(zip(one.losses, other.losses, strict=True))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def whole(program: Program) -> list[str]:
    """The values that have all logits, in any shape."""
    values = [(node, node.meta["val"]) for node in program.graph.nodes if node.op == "call_function"]
    return [node.name for node, value in values if isinstance(value, Tensor) and value.numel() == ROWS * CLASSES]


@pytest.mark.parametrize(
    ("loss", "options", "policy"),
    [
        (mean, {}, {}),
        (mean, {"bias": False, "tied": True}, {"recompute": "cheap"}),
        (summed, {}, {"loss_scale": 8.0, "clip": 1.0}),
        (mean, {}, {"weigh": "rows", "shard": "zero1", "recompute": "unit"}),
        (squared, {}, {"recompute": "cheap"}),
    ],
)
def test_slices_are_the_whole_loss(loss: Any, options: dict[str, Any], policy: dict[str, Any]) -> None:
    sliced = trained(Model(**options), loss, replace(SLICED, **policy))
    uncut = trained(Model(**options), loss, replace(SLICED, loss_rows=None, **policy))
    assert furthest(sliced, uncut) < BOUND
    assert not whole(sliced.program) and whole(uncut.program)
    products = [sum("mm" in str(node.target) for node in run.program.graph.nodes) for run in (sliced, uncut)]
    assert products[0] - products[1] == 2 * 3  # three slices of three products: none is made twice
    assert "logits of 3 slices, [10, 96]" in str(sliced.program)


def test_in_bfloat16_slices_are_as_near_to_the_truth_as_the_whole() -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for loss in (mean, summed):
        truth = trained(Model(), loss, replace(SLICED, loss_rows=None))
        uncut = trained(Model(), loss, replace(SLICED, loss_rows=None, precision=half))
        sliced = trained(Model(), loss, replace(SLICED, precision=half))
        assert not whole(sliced.program) and whole(uncut.program)
        assert BOUND < furthest(uncut, truth) < 0.05 and furthest(sliced, truth) < 1.5 * furthest(uncut, truth)


def test_a_slice_too_few_is_noticed() -> None:
    def without_last(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        last = [node for node in edit.graph.nodes if node.target is torch.ops.aten.nll_loss_backward.default][-1]
        with edit.at(last.next, "forward"):
            zero = edit.call(torch.ops.aten.mul.Scalar, last, 0)
        last.replace_all_uses_with(zero, delete_user_cb=lambda user: user is not zero)
        return edit.done("broken")

    uncut = trained(Model(), mean, replace(SLICED, loss_rows=None))
    assert furthest(trained(Model(), mean, SLICED, without_last), uncut) > 100 * BOUND


def test_the_input_program_stays_as_it_was_and_evaluation_is_whole() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    stages, plan = simulate.stages(model, optimizer, mean, batches()[0][0], SLICED)
    assert whole(stages[0]) and stages[1].history[-1] == "slice_loss" and not whole(stages[1])
    forward, _ = simulate.stages(model, None, mean, batches()[0][0], SLICED, kind="forward")
    assert whole(forward[-1])
    assert not [node for node in stages[-1].graph.nodes if node.op == "call_function" and not node.meta.get("phase")]
    uncut, _ = simulate.stages(model, optimizer, mean, batches()[0][0], replace(SLICED, loss_rows=None))
    peaks = [predict(program, plan, Persistent(), "gloo").peak.nbytes for program in (stages[-1], uncut[-1])]
    assert peaks[0] < peaks[1]


def shifted(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """As most scripts have it: logits of a token, and the token after it."""
    return model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()


def capped(model: Model, tokens: Tensor) -> Tensor:
    """After the head, before and after the shift: Gemma 2's cap, and a scale that is learned."""
    logits = 5 * torch.tanh(model(tokens).float() * model.mix.bias[0].exp() / 5)
    return logits[:, :-1].contiguous().view(-1, CLASSES)


def with_z_loss(model: Model, tokens: Tensor) -> Tensor:
    logits, targets = shifted(model, tokens)
    return F.cross_entropy(logits, targets) + 1e-2 * logits.logsumexp(-1).square().mean()


def focal(model: Model, tokens: Tensor) -> Tensor:
    each = F.cross_entropy(*shifted(model, tokens), reduction="none")
    return ((1 - (-each).exp()) ** 2 * each * torch.arange(1.0, 21.0)).mean()


def with_entropy(model: Model, tokens: Tensor) -> Tensor:
    logits, targets = shifted(model, tokens)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED) - 0.1 * entropy.mean()


def with_margin(model: Model, tokens: Tensor) -> Tensor:
    logits, targets = shifted(model, tokens)
    return F.cross_entropy(logits, targets) + logits.gather(1, targets[:, None]).relu().mean()


def of_time_first(model: Model, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).transpose(0, 1)[::2].flatten(0, 1), tokens.t()[::2].flatten())


def masked(model: Model, tokens: Tensor) -> Tensor:
    each = F.cross_entropy(*shifted(model, tokens), reduction="none")
    counts = (tokens[:, 1:] > IGNORED).flatten()
    return (each * counts).sum() / counts.sum()


def scored(model: Model, tokens: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    logits, targets = shifted(model, tokens)
    return F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean()


def of_two(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten()) + 0.3 * F.cross_entropy(logits, tokens.flatten())


WEIGHTS = torch.linspace(0.5, 2, CLASSES)
BY_ROW: dict[str, Any] = {
    "shifted by a token": lambda model, tokens, _: F.cross_entropy(*shifted(model, tokens)),
    "label smoothing": lambda model, tokens, _: F.cross_entropy(
        *shifted(model, tokens), label_smoothing=0.1, ignore_index=IGNORED
    ),
    "weights of classes": lambda model, tokens, _: F.cross_entropy(
        *shifted(model, tokens), WEIGHTS, label_smoothing=0.1, ignore_index=IGNORED
    ),
    "capped": lambda model, tokens, _: F.cross_entropy(capped(model, tokens), shifted(model, tokens)[1]),
    "z-loss": lambda model, tokens, _: with_z_loss(model, tokens),
    "focal": lambda model, tokens, _: focal(model, tokens),
    "entropy": lambda model, tokens, _: with_entropy(model, tokens),
    "margin": lambda model, tokens, _: with_margin(model, tokens),
    "time first": lambda model, tokens, _: of_time_first(model, tokens),
    "a mean over a mask": lambda model, tokens, _: masked(model, tokens),
    "two targets": of_two,
    "squared": lambda model, tokens, _: F.cross_entropy(capped(model, tokens), shifted(model, tokens)[1]) ** 2,
}


@pytest.mark.parametrize("name", BY_ROW)
def test_what_is_made_of_logits_by_row_is_made_of_slices(name: str) -> None:
    options = {"bias": name != "z-loss", "tied": name == "z-loss"}
    sliced = trained(Model(**options), BY_ROW[name], SLICED)
    uncut = trained(Model(**options), BY_ROW[name], replace(SLICED, loss_rows=None))
    assert furthest(sliced, uncut) < BOUND
    assert not large(sliced.program) and large(uncut.program)


def test_a_batch_of_one_row_is_one_slice() -> None:
    """Whose numbers by row have the form of one number for all."""

    def loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * targets.flatten().float().cos()).mean()

    found = []
    for rows in (4, None):
        model = Model()
        sharded = compile_sharded(
            model, torch.optim.SGD(model.parameters(), 0.5), loss=loss, policy=replace(SLICED, loss_rows=rows)
        )
        found.append([sharded.step(torch.ones(1, 1, dtype=torch.int64), torch.full((1, 1), 3)) for _ in range(2)])
    torch.testing.assert_close(*found)


def large(program: Program) -> list[str]:
    """The values that have all classes of half of the rows, or more: the weight has them of fewer."""
    values = [(node, node.meta["val"]) for node in program.graph.nodes if node.op == "call_function"]
    return [node.name for node, value in values if isinstance(value, Tensor)
            and value.shape[-1:] == (CLASSES,) and value.numel() > WIDTH * CLASSES]  # fmt: skip


def test_numbers_of_each_row_are_reported_as_they_are() -> None:
    model, plain = Model(), Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sharded = compile_sharded(model, optimizer, loss=scored, policy=SLICED)
    tokens, targets = batches()[0][0]
    (value, right), (found, score) = scored(plain, tokens, targets), sharded.step(tokens, targets)
    assert abs(float(found) - value.item()) < BOUND * value.item() and float(score) == right.item()
    assert not large(sharded.program)


def test_a_hugging_face_model_with_a_cap_is_sliced_as_it_is() -> None:
    import transformers

    sizes = {"vocab_size": CLASSES, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    config = transformers.Gemma2Config(**sizes, use_cache=False, attn_implementation="eager")
    config.final_logit_softcapping = 1.0
    torch.manual_seed(0)
    model, plain = transformers.Gemma2ForCausalLM(config), transformers.Gemma2ForCausalLM(config)
    plain.load_state_dict(model.state_dict())

    def loss(model: Any, tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    tokens = torch.randint(1, CLASSES, (4, 8))
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.5), loss=loss, policy=SLICED)
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for _ in range(2):
        expected = loss(plain, tokens)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert abs(float(sharded.step(tokens)) - expected.item()) < BOUND * expected.item()
    assert not large(sharded.program)


def with_logits(model: Model, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def twice(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    return mean(model, tokens, targets) + mean(model, targets, tokens)


def other(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    return model(tokens).square().mean()


def of_the_loss(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    return (each / each.mean()).square().mean()


def partly_of_the_loss(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten()) ** 2 + logits.logsumexp(-1).square().mean()


def at_other_rows(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + logits[:, -1].logsumexp(-1).mean()


def of_all_rows(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten()) + logits.mean()


def dropped(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(model(tokens), 0.5).flatten(0, 1), targets.flatten())


def of_fewer_classes(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[..., :50].flatten(0, 1), targets.flatten() % 50)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (with_logits, "its logits are used elsewhere as well, by output"),
        (twice, "2 calls of cross_entropy"),
        (other, "no calls of cross_entropy"),
        (of_the_loss, "more than sums and constants is made of the loss"),
        (partly_of_the_loss, "is made of the loss"),
        (at_other_rows, "at other rows|goes into"),
        (of_all_rows, "used elsewhere as well, by aten.mean"),
        (dropped, "not by a linear layer"),
        (of_fewer_classes, "not by a linear layer"),
    ],
)
def test_what_cannot_be_sliced_is_refused_by_name(loss: Any, reason: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=reason):
        simulate.stages(model, optimizer, loss, batches()[0][0], SLICED)


def test_in_float16_a_derivative_that_is_not_known_in_forward_is_refused() -> None:
    half = replace(SLICED, precision=MixedPrecisionPolicy(param_dtype=torch.float16), loss_scale=8.0)
    for loss in (mean, squared):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters())
        if loss is mean:
            assert not whole(simulate.stages(model, optimizer, loss, batches()[0][0], half)[0][-1])
        else:
            with pytest.raises(ValueError, match="in float16 the derivative by the loss must be known in forward"):
                simulate.stages(model, optimizer, loss, batches()[0][0], half)


@pytest.mark.parametrize("rows", [0, -1, True, 1.5, "auto"])
def test_rows_are_a_whole_number(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"Policy.loss_rows is .*; expected a whole number, 1 or more, or None"):
        Policy(loss_rows=rows)
    with pytest.raises(ValueError, match="under dynamic=True their number moves"):
        Policy(loss_rows=4, dynamic=True)
    assert Policy().learns_sizes and not Policy(loss_rows=4).learns_sizes


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_one_rank_trains_as_eager_pytorch(lower: str) -> None:
    plain, model = Model(), Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), lr=0.5), loss=mean, policy=Policy(lower=lower, loss_rows=10)
    )
    for ((tokens, targets),) in batches(3, 1):
        expected = mean(plain, tokens, targets)
        torch.testing.assert_close(sharded.step(tokens, targets), expected.detach(), rtol=BOUND, atol=0)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    for name, value in sharded.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-6)


class Whole(Model):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def test_a_model_that_returns_its_loss_is_sliced_in_a_loop_of_its_own() -> None:
    plain, model = Whole(), Whole()
    fully_shard(model, policy=SLICED)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (plain, model)]
    for step, ((tokens, targets),) in enumerate(batches(3, 1)):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            loss = one(tokens, targets)
            (loss * (1 + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(tokens, targets), plain(tokens, targets), rtol=1e-5, atol=0)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.full_tensor(), plain.state_dict()[name], rtol=0, atol=1e-5)  # type: ignore[operator]


def test_a_model_that_returns_logits_is_refused_in_a_loop_of_its_own() -> None:
    model = Model()
    fully_shard(model, policy=SLICED)
    with pytest.raises(ValueError, match="the model's forward, which is to return the loss, has no calls"):
        model(batches()[0][0][0])
    with torch.no_grad():
        assert model(batches()[0][0][0]).shape[-1] == CLASSES
