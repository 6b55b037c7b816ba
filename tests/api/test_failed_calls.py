"""A rank that fails in a call, catches it and goes on: all are told, and go on together or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, RankError, compile_sharded
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "failed_calls.py"
SOON = 20.0  # seconds on a busy machine; the process group's own patience is 30 minutes
INDEX = "IndexError: index out of range in self"
OPERATOR = 'KeyError: "the user\'s own operator"'
# What the other rank hears, in the same call; afterwards both go on as if the call had not been.
GOES_ON = {
    **dict.fromkeys(("zero3", "ddp", "gradient", "microbatch", "last_microbatch"), INDEX),
    **dict.fromkeys(("operator", "ddp_operator"), OPERATOR),
    "memory": "OutOfMemoryError: tried to allocate more",
    "not_flattened": "rank 1: refused: KeyError: 'taken apart'",
    "rate": "rank 1: refused: could not convert string to float: 'fast'",
    "shapes": "rank 1: step (int64[2], float32[2, 4])",
}
OTHER_PLACEMENTS = {
    **dict.fromkeys(("zero2 eager", "zero1 eager", "zero3 whole gradients"), INDEX),
    **dict.fromkeys(("zero3 inductor", "ddp operator"), OPERATOR),
}
FOR_GOOD = {"interrupt": "It was interrupted", "in_the_update": "The state may be half updated"}
OTHERS = ("joined_caught", "joined_uncaught", "told_nobody")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return launch(WORKER, 2, "all_go_on", *FOR_GOOD, *OTHERS)


def check(first: dict[str, Any], second: dict[str, Any], reason: str) -> None:
    """Rank 1 failed, rank 0 heard of it, and both went on as if the call had not been."""
    assert first["error"] == "RankError" and reason in first["message"], first
    assert second["error"] in ("RankError", reason.split(":")[0])
    for one in (first, second):
        assert one["unchanged"] and one["as if it had not been"] and one["seconds"] < SOON


def each(answers: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """What the ranks found in a case of several that ran together."""
    assert all("result" in answer for answer in answers), answers
    return [answer["result"][case] for answer in answers]


@pytest.mark.parametrize("case", GOES_ON)
def test_all_ranks_raise_and_go_on_as_if_the_call_had_not_been(results: dict[str, Any], case: str) -> None:
    answers = each(results["all_go_on"], case)
    check(*answers, GOES_ON[case])
    assert all(one.get("and steps", True) for one in answers)


@pytest.mark.exhaustive  # as under ZeRO-3 and DDP, above
def test_so_they_do_in_other_placements() -> None:
    results = launch(WORKER, 2, "other_placements")
    for case, reason in OTHER_PLACEMENTS.items():
        check(*each(results["other_placements"], case), reason)


def test_four_ranks_of_which_three_fail_go_on_together() -> None:
    """In two replicas; of those that fail at once, some hear of another before they raise their own."""
    answers = [answer["result"] for answer in launch(WORKER, 4, "hsdp")["hsdp"]]
    assert answers[0]["error"] == "RankError" and INDEX in answers[0]["message"]
    for one in answers:
        assert one["error"] in ("RankError", "IndexError") and one["seconds"] < SOON
        assert one["unchanged"] and one["as if it had not been"]


def test_a_microbatch_that_failed_is_told_at_the_end_of_its_row(results: dict[str, Any]) -> None:
    for case in ("microbatch", "first_microbatch"):
        first, second = each(results["all_go_on"], case)
        assert (first["first"]["error"], second["first"]["error"]) == ("", "IndexError")
        for one in (first, second):
            assert one["error"] == "RankError"
            assert f"A microbatch failed: {INDEX}" in one["message"] and "begin the row again" in one["message"]


def test_forward_alone_is_right_on_the_rank_that_did_not_fail(results: dict[str, Any]) -> None:
    first, second = each(results["all_go_on"], "forward")
    assert (first["error"], second["error"]) == ("", "IndexError")
    assert first["right"] == [True] and first["goes on"] and second["goes on"]


@pytest.mark.parametrize("case", FOR_GOOD)
def test_what_cannot_be_resumed_ends_on_all_ranks(results: dict[str, Any], case: str) -> None:
    first, second = (answer["result"] for answer in results[case])
    assert second["error"] == ("KeyboardInterrupt" if case == "interrupt" else "RuntimeError")
    assert first["error"] == ("RankError" if case == "interrupt" else "")
    for one in (first, second):
        assert one["next"]["error"] == "RankError" and one["next"]["seconds"] < SOON and not one["group"]
        assert "Rank 1 failed in its 2nd call" in one["next"]["message"]
        assert FOR_GOOD[case] in one["next"]["message"] and "last checkpoint" in one["next"]["message"]


def test_a_batch_that_is_skipped_outside_of_calls_is_no_failure(results: dict[str, Any]) -> None:
    assert each(results["all_go_on"], "skipped") == [{"steps": 4}] * 2


def test_a_rank_that_has_run_out_goes_on_where_the_others_do(results: dict[str, Any]) -> None:
    for answer in results["joined_caught"]:
        assert (answer["result"]["error"], answer["result"]["steps"]) == ("", 5)  # four batches, one of them bad
    for answer, error in zip(results["joined_uncaught"], ("RankError", "IndexError"), strict=True):
        assert (answer["result"]["error"], answer["result"]["steps"]) == (error, 4)  # one after the block, too
        assert "index out of range" in answer["result"]["message"]


def test_with_nothing_told_the_other_rank_waits(results: dict[str, Any]) -> None:
    """The control: it waits as long as its process group does, which is set to three seconds here."""
    first, second = (answer["result"] for answer in results["told_nobody"])
    assert second["error"] == "IndexError"
    assert first["error"] and "index" not in first["message"] and first["seconds"] > 2.5


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        table = torch.ones(3, 2)
        return self.linear(table[words]).sum()


def test_one_process_goes_on_unless_its_update_broke_off() -> None:
    model = Half()
    sharded = compile_sharded(model, torch.optim.AdamW(model.parameters()), policy=Policy(lower="eager"))
    sharded.step(torch.tensor([1]))
    before = [value.clone() for value in sharded.state.parameters.values()]
    with pytest.raises(IndexError):
        sharded.step(torch.tensor([7]))
    assert all(map(torch.equal, before, sharded.state.parameters.values()))
    sharded.step(torch.tensor([2]))
    name = next(name for name in sharded.state.optimizer if name.endswith(".exp_avg"))
    sharded.state.optimizer[name] = torch.zeros(7)
    with pytest.raises(RuntimeError, match="size"):
        sharded.step(torch.tensor([2]))
    for call in (sharded.step, sharded.value_and_grad):
        with pytest.raises(RankError, match=r"failed for good:\n.*half updated"):
            call(torch.tensor([2]))
