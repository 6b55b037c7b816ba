"""Random numbers: eager PyTorch's own on one rank; on several, of nobody else's, and the same again under a seed."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import CaptureError, Policy, compile_sharded
from fsdp_compiled.runtime.rng import DefaultState, RandomNumbers, given_generator, seed
from tests.chosen import chosen
from tests.launch import launch

aten = torch.ops.aten
CPU = torch.device("cpu")
WORKER = Path(__file__).parents[1] / "workers" / "random_numbers.py"


# One rank: bit for bit eager PyTorch, from its own generator.


def unused(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Draws that nothing reads, which eager PyTorch makes all the same."""
    torch.randn(3)
    F.dropout(x, 0.5)
    torch.empty(3).uniform_()
    torch.bernoulli(torch.full((3,), 0.5))
    return model(x).square().mean()


def every_kind(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    noisy = model(x + torch.randn_like(x)) * torch.rand_like(x) + torch.randn(4, 6) + torch.rand(6)
    noisy = noisy + torch.randint_like(x, 3) + torch.randint(2, 5, (6,)) + torch.normal(noisy.detach(), 0.5)
    noisy = noisy[:, torch.randperm(6)] + torch.empty(6).exponential_() + torch.poisson(x.abs())
    noisy = F.alpha_dropout(F.rrelu(noisy, training=True), 0.2, True) + F.gumbel_softmax(noisy, dim=-1)
    return noisy.square().mean() + torch.multinomial(x.abs()[0] + 0.1, 2).sum()


def attending(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    heads = checkpoint(lambda value: F.dropout(model(value), 0.3), x, use_reentrant=False).view(1, 1, 4, 6)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).sum()


@pytest.mark.parametrize(
    ("lower", "loss"),
    chosen(
        [(lower, loss) for lower in ("eager", "inductor") for loss in (unused, every_kind, attending)],
        [("eager", unused), ("eager", every_kind), ("eager", attending), ("inductor", every_kind)],
    ),
)
def test_one_rank_draws_what_eager_pytorch_draws_between_the_users_draws(lower: str, loss: Callable[..., Any]) -> None:
    model = nn.Linear(6, 6)
    plain = copy.deepcopy(model)
    sharded = compile_sharded(
        model, torch.optim.SGD(model.parameters(), lr=0.01), loss=loss, policy=Policy(lower=lower)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)

    def eager(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        result = loss(plain, x)
        result.backward()
        optimizer.step()
        return result.detach()

    runs = []
    for step in (sharded.step, eager):
        torch.manual_seed(5)
        runs.append([(torch.randn(4, 6), step(torch.ones(4, 6)), torch.randn(3)) for _ in range(3)])
    for mine, theirs in zip(*runs, strict=True):
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[2], theirs[2])
        if lower == "eager":
            assert torch.equal(mine[1], theirs[1])
        torch.testing.assert_close(mine[1], theirs[1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(runs[0][0][2], runs[0][1][2])  # control: they move


def noise(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).mean(), (torch.rand(20), F.dropout(torch.ones(20), 0.5), torch.randint(2**62, (20,)))


def drawing() -> Any:
    model = nn.Linear(4, 4)
    return compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=noise, policy=Policy(lower="eager"))


def numbers(aux: Any) -> list[float]:
    return torch.cat([part.double() for part in aux]).tolist()


X = torch.ones(2, 4)


def test_equal_states_give_equal_results_and_move_no_other_generator() -> None:
    sharded = drawing()
    first, second = (pytree.tree_map(torch.clone, sharded.state) for _ in range(2))
    drawn = torch.get_rng_state()
    found = []
    for state in (first, second):
        state, (loss, aux) = sharded.apply(state, X)
        state, (later, more) = sharded.apply(state, X)
        found.append((float(loss), numbers(aux), float(later), numbers(more), state.random.tolist()))
        assert torch.equal(torch.get_rng_state(), drawn)
        torch.randn(5)  # of no effect on the second
        torch.set_rng_state(drawn)
    assert found[0] == found[1] and found[0][1] != found[0][3]
    for place in (0, 2):  # `step` makes the same two steps, from the same generator's state, and moves it
        loss, aux = sharded.step(X)
        assert (float(loss), numbers(aux)) == (found[0][place], found[0][place + 1])
    assert torch.get_rng_state().tolist() == found[0][4]
    state, _ = sharded.apply(sharded.state, X)  # the state that is trained goes on drawing from the generator
    assert torch.equal(state.random, torch.get_rng_state()) and state.random.tolist() != found[0][4]


def test_the_states_random_is_the_generators_and_can_be_set() -> None:
    sharded = drawing()
    sharded.step(X)
    saved = sharded.state.random.clone()
    assert torch.equal(saved, torch.get_rng_state())
    expected = numbers(sharded.step(X)[1])
    assert sharded.state.random.tolist() != saved.tolist()
    sharded.state.random.copy_(saved)
    assert numbers(sharded.step(X)[1]) == expected
    assert numbers(sharded.step(X)[1]) != expected
    sharded.state.random.copy_(saved)
    assert torch.equal(sharded.state.random, saved) and torch.equal(torch.get_rng_state(), saved)


# The operators that are given a generator.


OPERATORS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "dropout": (aten.native_dropout.default, (torch.randn(5, 7).t(), 0.3, True), {}),
    "dropout of all": (aten.native_dropout.default, (torch.randn(5, 7), 1.0, True), {}),
    "dropout in bf16": (aten.native_dropout.default, (torch.randn(40, dtype=torch.bfloat16), 0.3, None), {}),
    "dropout of nothing": (aten.native_dropout.default, (torch.randn(0), 0.3, True), {}),
    "dropout in eval mode": (aten.native_dropout.default, (torch.randn(5), 0.3, False), {}),
    "rand": (aten.rand.default, ([5, 7],), {"dtype": torch.float64}),
    "randn": (aten.randn.default, ([40],), {}),
    "randint": (aten.randint.default, (9, [40]), {}),
    "randint from": (aten.randint.low, (3, 9, [40]), {"dtype": torch.int32}),
    "randperm": (aten.randperm.default, (20,), {}),
    "rand_like": (aten.rand_like.default, (torch.ones(5, 7).t(),), {"dtype": torch.float64}),
    "randn_like": (aten.randn_like.default, (torch.ones(40, 2),), {}),
    "randint_like": (aten.randint_like.default, (torch.ones(40), 9), {}),
    "randint_like a tensor": (aten.randint_like.Tensor, (torch.ones(40), torch.tensor(9)), {}),
    "randint_like from": (aten.randint_like.low_dtype, (torch.ones(40), 3, 9), {"dtype": torch.int64}),
    "bernoulli": (aten.bernoulli.p, (torch.ones(40), 0.3), {}),
    "normal": (aten.normal.Tensor_float, (torch.zeros(40), 1.0), {}),
    "multinomial": (aten.multinomial.default, (torch.ones(40), 3), {}),
    "exponential": (aten.exponential.default, (torch.ones(40),), {}),
    "poisson": (aten.poisson.default, (torch.full((40,), 3.0),), {}),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_with_a_generator_is_the_one_without(name: str) -> None:
    operator, args, kwargs = OPERATORS[name]
    given = given_generator(operator)
    assert given is not None
    torch.manual_seed(3)
    expected = pytree.tree_leaves(operator(*args, **kwargs))
    generator, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    for found, reference in zip(pytree.tree_leaves(given(*args, **kwargs, generator=generator)), expected, strict=True):
        assert torch.equal(found, reference)
        assert (found.dtype, found.stride()) == (reference.dtype, reference.stride())
    assert torch.equal(generator.get_state(), torch.get_rng_state())
    drawn = pytree.tree_leaves(given(*args, **kwargs, generator=other))
    if not torch.equal(other.get_state(), torch.Generator().manual_seed(4).get_state()) and "all" not in name:
        assert not all(map(torch.equal, drawn, expected))  # control


def test_all_random_operators_of_pytorch_on_a_cpu_can_be_given_one() -> None:
    """But for those that a trace takes apart first, and those of other devices."""
    without: set[str] = set()
    for packet in (getattr(aten, name) for name in dir(aten)):
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            operator = getattr(packet, overload)
            if torch.Tag.nondeterministic_seeded in operator.tags and "out" not in overload and overload != "names":
                if given_generator(operator) is None:
                    without.add(packet.__name__)
    taken_apart = {name for name in without if "dropout_" in f"{name}_" and name != "native_dropout"}
    taken_apart |= {"gru", "lstm", "rnn_relu", "rnn_tanh"}
    elsewhere = {name for name in without if "attention" in name or name in ("_cudnn_rnn", "miopen_rnn")}
    assert without - taken_apart - elsewhere == set()


def test_a_seed_fills_the_whole_state() -> None:
    """`manual_seed` uses 32 bits; two texts that it would give the same seed are far apart."""
    draws = []
    for text in ("0 [1, 2]", "1 [1, 2]", "0 [1, 3]"):
        generator = torch.Generator()
        seed(generator, text)
        draws.append(torch.rand(20000, generator=generator, dtype=torch.float64))
        assert abs(float(draws[-1].mean()) - 0.5) < 0.01 and abs(float(draws[-1].std()) - 12**-0.5) < 0.01
    assert torch.corrcoef(torch.stack(draws)).fill_diagonal_(0).abs().max() < 0.04


def test_several_ranks_take_little_of_the_default_generator_and_never_set_it_back() -> None:
    random_numbers = RandomNumbers(CPU, 0, 2)
    draw = random_numbers.bound(aten.randint.default)
    torch.manual_seed(3)
    seen: list[torch.Tensor] = []

    def other() -> None:
        seen.append(torch.randint(2**62, (4,)))

    for _ in range(50):
        with random_numbers.drawing(random_numbers.state):
            inside = draw(2**62, [4])
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        seen += [inside, torch.randint(2**62, (4,))]
    assert len(set(torch.cat(seen).tolist())) == 50 * 12
    assert isinstance(random_numbers.state, DefaultState)


# Several ranks, in processes of their own.


@pytest.fixture(scope="module")
def answers() -> list[list[dict[str, Any]]]:
    """By run, then rank: the same script twice, in fresh processes."""
    return [launch(WORKER, 2), launch(WORKER, 2, "again")]


def test_no_noise_is_like_another(answers: list[list[dict[str, Any]]]) -> None:
    """On either rank: the user's own under the same seed, two steps', and two models'."""
    found = {
        f"rank {rank}: {name}": torch.tensor(values)
        for rank, answer in enumerate(answers[0])
        for name, values in answer["streams"].items()
        if rank == 0 or not name.startswith("outside")  # the users of both ranks seeded alike
    }
    assert len(found) == 3 + 4 + 4
    for (left, first), (right, second) in itertools.combinations(found.items(), 2):
        if "outside" in left and "outside" in right:
            continue  # one seed, and so one stream
        assert not set(first.tolist()) & set(second.tolist()), (left, right)
        assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.3, (left, right)
    outside = [answer["streams"]["outside"] for answer in answers[0]]
    assert outside[0] == outside[1]  # control: these are alike


def test_a_fresh_process_draws_the_same_under_the_same_seed(answers: list[list[dict[str, Any]]]) -> None:
    for first, second in zip(*answers, strict=True):
        assert first["streams"] == second["streams"] and first["masks"] == second["masks"]


def test_seeds_states_and_apply_repeat_on_several_ranks(answers: list[list[dict[str, Any]]]) -> None:
    for answer in answers[0]:
        assert all(answer["repeats"].values()), answer["repeats"]


def test_threads_that_draw_meanwhile_get_no_number_twice(answers: list[list[dict[str, Any]]]) -> None:
    for answer in answers[0]:
        assert answer["threads"] == 0
        assert answer["control"] > 0  # where the generator is set back, as `torch.random.fork_rng` does


def test_masks_differ_by_rank_and_step_under_inductor(answers: list[list[dict[str, Any]]]) -> None:
    masks = [tuple(mask) for answer in answers[0] for mask in answer["masks"]]
    assert len(set(masks)) == 4
    assert all(60 < sum(value > 0 for value in mask) < 140 for mask in masks)


def test_what_one_rank_must_refuse_is_an_error_on_all(answers: list[list[dict[str, Any]]]) -> None:
    (first, said, same), (second, also, untouched) = (answer["refused"] for answer in answers[0])
    assert (first, second) == ("RankError", "CaptureError")
    assert "random.randint" in said and "random.randint" in also and "random_numbers.py" in also
    assert same == untouched == "True"


# What a program cannot draw.


OWN = torch.Generator().manual_seed(5)
PYTHON = random.Random(5)
NUMPY = np.random.default_rng(5)


def refused_forked(h: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return h * torch.rand(4)


def refused_seeded(h: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return h * torch.rand(4)


def refused_reseeded(h: torch.Tensor) -> torch.Tensor:
    torch.seed()
    return h * torch.rand(4)


def refused_restored(h: torch.Tensor) -> torch.Tensor:
    torch.set_rng_state(torch.get_rng_state())
    return h


def refused_numpy_seed(h: torch.Tensor) -> torch.Tensor:
    np.random.seed(0)
    return h


def refused_layerdrop(h: torch.Tensor) -> torch.Tensor:
    return h * 2 if random.uniform(0, 1) < 0.5 else h


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "random.random": (lambda h: h * random.random(), "draw random numbers with torch"),
    "random.randint": (lambda h: h * random.randint(1, 9), "draw random numbers with torch"),
    "random.choice": (lambda h: h * random.choice([1.0, 2.0]), "draw random numbers with torch"),
    "random.Random": (lambda h: h * random.Random(1).random(), "draw random numbers with torch"),
    "PYTHON.random": (lambda h: h * PYTHON.random(), "draw random numbers with torch"),
    "random.uniform": (refused_layerdrop, "layerdrop"),
    "np.random.rand(": (lambda h: h * np.random.rand(), "draw with torch"),
    "np.random.randn": (lambda h: h * torch.from_numpy(np.random.randn(4)).float(), "draw with torch"),
    "np.random.seed": (refused_numpy_seed, "draw with torch"),
    "default_rng": (lambda h: h * np.random.default_rng(0).random(), "draw with torch"),
    "NUMPY.random": (lambda h: h * NUMPY.random(), "pass the numbers in with the batch"),
    "generator=OWN": (lambda h: h * torch.rand(4, generator=OWN), "leave generator= out"),
    "uniform_(generator": (lambda h: h * torch.empty(4).uniform_(generator=OWN), "leave generator= out"),
    "torch.Generator()": (lambda h: h * torch.rand(4, generator=torch.Generator()), "leave generator= out"),
    "torch.manual_seed": (refused_seeded, "seed outside"),
    "torch.seed": (refused_reseeded, "seed outside"),
    "torch.get_rng_state": (refused_restored, "around the step"),
    "torch.random.fork_rng": (refused_forked, "around the step"),
    "torch.initial_seed": (lambda h: h * (torch.initial_seed() % 7), "around the step"),
}


@pytest.mark.parametrize("line", chosen(REFUSED, list(REFUSED)[::3]))
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_what_a_program_cannot_draw_is_refused_with_the_line_and_the_cure(line: str) -> None:
    rewrite, cure = REFUSED[line]
    model = nn.Linear(4, 4)
    sharded = compile_sharded(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, x: rewrite(model(x)).mean(),
        policy=Policy(lower="eager"),
    )
    before, python, theirs = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with pytest.raises(CaptureError) as caught:
        sharded.step(X)
    text = str(caught.value)
    assert line in text and __file__ in text, text
    assert cure in text.split("Cure:")[1], text
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python
    assert str(np.random.get_state()) == str(theirs)


class Initialised(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.factor = random.uniform(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


def test_random_numbers_outside_of_the_loss_are_the_users_own_affair() -> None:
    model = Initialised()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, loss=lambda model, x: model(x).mean(), policy=Policy(lower="eager"))
    x = torch.full((2, 4), random.random())
    assert torch.equal(sharded.value_and_grad(x)[0], plain(x).mean().detach())
    drawn = random.getstate()
    sharded.value_and_grad(x)
    assert random.getstate() == drawn
