import math

import torch

from fsdp_compiled.cli.gpt import GPT, GPTConfig, decay_groups, next_byte_loss
from fsdp_compiled.cli.options import TrainOptions
from fsdp_compiled.cli.summary import first_line, generate
from fsdp_compiled.cli.train import rate

CONFIG = GPTConfig(layers=2, width=32, heads=4, context=16)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def test_a_prediction_reads_only_what_came_before() -> None:
    gpt, tokens = model(), torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] += 1
    changed %= 256
    before, after = gpt(tokens), gpt(changed)
    assert before.shape == (2, 16, 256)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_it_starts_near_a_uniform_guess() -> None:
    tokens = torch.randint(256, (8, 16), generator=torch.Generator().manual_seed(1))
    loss = next_byte_loss(model(), tokens, tokens.roll(-1, 1))
    assert abs(loss.item() - math.log(256)) < 0.3


def test_each_parameter_is_in_one_group_and_norms_do_not_decay() -> None:
    gpt = model()
    matrices, norms = decay_groups(gpt, 0.1)
    assert matrices["weight_decay"] == 0.1 and norms["weight_decay"] == 0.0
    assert len(matrices["params"]) + len(norms["params"]) == len(list(gpt.parameters()))  # type: ignore[arg-type]
    assert len(norms["params"]) == 2 * CONFIG.layers + 1  # type: ignore[arg-type]


def test_the_rate_rises_then_falls_to_a_tenth() -> None:
    options = TrainOptions(steps=100, warmup=10)
    rates = [rate(step, options) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert abs(rates[-1] - 0.1) < 1e-3
    assert rate(0, TrainOptions(steps=3)) == 1.0  # too short to warm up


def test_sampling_is_seeded_and_slides_its_window() -> None:
    shapes = set()

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(tokens.shape))
        return torch.nn.functional.one_hot((tokens + 1) % 256, 256).float() * 1e3  # always the next byte

    texts = generate(forward, b"abc", (2, 4), 6, seed=0)
    assert texts == [b"abcdefghi"] * 2
    assert shapes == {(2, 4)}

    def even(tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 256)

    first, second = (generate(even, b"x", (2, 4), 8, seed=seed) for seed in (0, 1))
    assert first == generate(even, b"x", (2, 4), 8, seed=0) != second
    assert first[0] != first[1]


def test_the_prompt_is_a_line_with_something_in_it() -> None:
    text = b"# --\n\n  \nimport somewhere_far_away  \nmore of it\n"
    assert first_line(torch.tensor(list(text), dtype=torch.uint8)) == b"import somewhere_far_away"
    assert first_line(torch.tensor(list(b"123"), dtype=torch.uint8)) == b"123"
