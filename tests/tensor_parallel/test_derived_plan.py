"""`Policy(tp="auto")` for models without a plan: what is derived, what is left whole and why, and what is refused."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled.runtime.tensor_parallel.derived_plan import derive, generated, patterns, run, tried
from tests.cut_models import GPT, VOCABULARY, WIDTH, loss_fn
from tests.derived_models import HEAD, Attention, Experts, FeedForward, Flat, Fused, Llama, Penalty, Softmax, Stack

ATTENTION = {f"layers.*.attention.w{name}": "colwise" for name in "qkv"} | {"layers.*.attention.wo": "rowwise"}
FEED = {"layers.*.feed.w1": "colwise", "layers.*.feed.w3": "colwise", "layers.*.feed.w2": "rowwise"}
ENDS = {"tokens": "embedding_rowwise", "head": "colwise_gather_output"}
EXPERTS = {name.replace("feed.", "feed.experts.*."): style for name, style in FEED.items()}


def plan(model: nn.Module, ranks: int = 2, loss: Any = None) -> tuple[dict[str, str], str]:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = derive(model, loss, ranks)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return patterns(found.styles, dict(model.named_modules())), "\n".join(found.left)


def test_of_a_gpt_and_of_a_llama_everything_is_cut() -> None:
    gpt = {f"layers.*.attention.{name}": "colwise" for name in "qkv"}
    gpt |= {"layers.*.attention.o": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
    for options in ({}, {"dropout": 0.1, "recompute": True}):
        assert plan(GPT(2, **options), loss=loss_fn) == (gpt | ENDS, "")
    assert plan(Llama()) == (ATTENTION | FEED | ENDS, "")
    assert plan(Llama(tied=True, keys=4), ranks=4) == (ATTENTION | FEED | ENDS, "")
    with torch.device("meta"):
        empty = Llama()
    found = derive(empty, None, 2)
    assert patterns(found.styles, dict(empty.named_modules())) == ATTENTION | FEED | ENDS


def test_norms_of_heads_experts_and_blocks_of_another_form() -> None:
    norms = {"layers.*.attention.norm": "replicated_with_grad_allreduce"}
    assert plan(Llama(norm=True)) == (ATTENTION | FEED | norms | ENDS, "")
    assert plan(Llama(Experts, depth=1)) == (ATTENTION | EXPERTS | ENDS, "")
    assert derive(Llama(Experts, depth=1), None, 2).alone == ("layers.*.feed.router",)
    styles, left = plan(Llama(lambda: Experts(before=True)))
    assert styles == ATTENTION | EXPERTS | ENDS and "layers.*.feed.router: cut over 2 ranks" in left
    flat = {f"layers.*.{name}": "colwise" for name in "abce"} | {"layers.*.d": "rowwise", "layers.*.f": "rowwise"}
    assert plan(Stack(Flat)) == (flat, "")
    assert plan(Stack(lambda: Fused(by_head=True)))[0] == {"layers.*.qkv": "colwise", "layers.*.out": "rowwise"}
    mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    assert plan(mlp)[0] == {"0": "colwise", "2": "rowwise"}


@pytest.mark.parametrize(
    ("make", "kept", "why"),
    [
        (lambda: Llama(fixed=True), FEED | ENDS, r"attention\.wq.*write -1 for it in view"),
        (lambda: Llama(keys=1), FEED | ENDS, r"attention\.wq.*let 2 divide the heads of queries and of keys"),
        (
            lambda: Llama(lambda: FeedForward(fused=True)),
            ATTENTION | ENDS,
            r"feed\.w1.*it gives another result.*Several things in one layer.*of its own",
        ),
        (Penalty, None, r"layers\.0\.attention\.wq: its weight is read by other code than its own forward"),
    ],
)
def test_what_is_not_proved_is_left_whole_with_the_reason(make: Any, kept: Any, why: str) -> None:
    styles, left = plan(make())
    if kept is None:  # the attention that it is in
        kept = {name.replace("*", "1"): style for name, style in ATTENTION.items()} | FEED | ENDS
    assert styles == kept
    assert re.search(why, left), left


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: Stack(Softmax),
            "layers.*.a, layers.*.b: cut over 2 ranks, on parts it fails: ValueError: it gives another result",
        ),
        (lambda: Stack(lambda: Fused(by_head=False)), "Several things in one layer"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4)), "could not be called with any"),
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)), "2 ranks divide neither"),
    ],
)
def test_where_nothing_can_be_cut_it_is_refused(make: Any, why: str) -> None:
    with pytest.raises(ValueError) as error:
        derive(make(), None, 2)
    assert why in str(error.value)


def test_the_trial_sees_cuts_that_fit_and_are_wrong() -> None:
    """Shapes fit in all of these, and eager PyTorch would train on."""
    x = (torch.empty(3, 5, WIDTH, device="meta", requires_grad=True),)
    pair = {"qkv": "colwise", "out": "rowwise"}

    def trial(block: nn.Module, styles: dict[str, str], *args: torch.Tensor) -> tuple[str | None, set[str]]:
        whole, call = generated(block), ((*x, *args), {})
        return tried(whole, run(whole, call, {}, 1), call, styles, 2)

    assert trial(Fused(by_head=True), pair) == (None, set())
    assert "another result" in str(trial(Fused(by_head=False), pair)[0])
    styles = dict.fromkeys("abce", "colwise") | dict.fromkeys("df", "rowwise")
    assert trial(Flat(), styles) == (None, set())
    assert "another result" in str(trial(Flat(heads=4), styles)[0])
    angles = torch.empty(32, HEAD, device="meta")
    attention = {"wq": "colwise", "wk": "colwise", "wv": "colwise", "wo": "rowwise"}
    assert trial(Attention(norm=True), attention, angles) == (None, {"norm"})
    forgotten = {name: style for name, style in attention.items() if name != "wv"}
    assert trial(Attention(), forgotten, angles)[0]


def test_generated_models_are_cut_where_their_heads_divide() -> None:
    draw = random.Random(3)
    for _ in range(4):
        keys, ranks = draw.choice([1, 2, 4]), draw.choice([2, 4])
        experts, norm, tied = (draw.random() < 0.5 for _ in range(3))
        styles, _ = plan(Llama(Experts if experts else FeedForward, tied, 1, keys=keys, norm=norm), ranks)
        expected = (EXPERTS if experts else FEED) | ENDS
        if keys % ranks == 0:
            expected |= ATTENTION
            expected |= {"layers.*.attention.norm": "replicated_with_grad_allreduce"} if norm else {}
        assert styles == expected, (keys, ranks, experts, norm, tied)


def test_an_embedding_that_is_a_matrix_elsewhere_is_left_whole() -> None:
    class ByHand(Llama):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.head = nn.Identity()
            return super().forward(tokens) @ self.tokens.weight.T

    styles, left = plan(ByHand())
    assert styles == ATTENTION | FEED and "tokens: its weight is read by other code" in left
    padded = Llama()
    padded.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
    styles, left = plan(padded)
    assert "tokens" not in styles and "tokens: its options (padding_idx" in left
    uneven = Llama()
    uneven.tokens, uneven.head = nn.Embedding(VOCABULARY + 1, WIDTH), nn.Linear(WIDTH, VOCABULARY + 1)
    styles, left = plan(uneven)
    assert styles == ATTENTION | FEED and "head, tokens: 2 ranks do not divide 41" in left
