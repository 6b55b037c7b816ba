"""Programs that run as graphs, on a stand-in for a GPU: the same numbers, fixed addresses, nothing read on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.lower.capturable import Held, Results
from fsdp_compiled.lower.cuda_graph import RESTARTS, WARM
from tests.chosen import chosen, examples
from tests.graphs import adamw, make, refuses_the_graph, same, stand_in
from tests.parts import parts
from tests.standin import Seen, StandIn
from tests.toys import EAGER, batches, build, mse, same_weights, sgd


def each(calls: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """What the calls return, made one after the other from the same state of the default generator."""
    drawn, results = torch.get_rng_state(), []
    for call in calls:
        torch.set_rng_state(drawn)
        results.append(call())
    return results


@pytest.mark.parametrize("kernels", chosen([False, True], [True]))
def test_200_launches_with_changing_batches_rates_and_dropout_are_the_steps_themselves(kernels: bool) -> None:
    policy = replace(EAGER, clip=0.05, weigh="rows", kernels=kernels)
    if kernels:  # and with copies of the shards, in memory that keeps its place
        policy = replace(policy, precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    graphed, plain = (make(graphs, policy, dropout=0.3) for graphs in (True, False))
    handed, values = [], []
    for step, (x, y) in enumerate(batches(200 + WARM)):
        for sharded in (graphed, plain):
            assert sharded.optimizer is not None
            sharded.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step // 3)
        losses = each([partial(graphed.step, x, y), partial(plain.step, x, y)])
        assert torch.equal(*losses), step
        assert torch.equal(graphed.grad_norm, plain.grad_norm), step
        handed.append(losses[0])
        values.append(float(losses[0]))
        assert same(graphed.state, plain.state), step
    assert graphed.replays == 200
    assert (graphed.memory.persistent.copies > 0) == kernels
    assert stand_in(graphed).log == ["warm"] * WARM + ["capture", "warm"] + ["launch"] * 200
    assert [float(loss) for loss in handed] == values, "a loss that was handed out changed"
    assert len(set(values)) > 150
    # Controls: the masks and the rates took part.
    still = make(True, policy, dropout=0.3)
    still.step(*batches(1)[0])
    first = still.step(*batches(1)[0])
    assert not torch.equal(first, still.step(*batches(1)[0]))
    assert int(graphed.state.step) == 200 + WARM


@pytest.fixture(scope="module", params=[False, True], ids=["aten", "kernels"])
def pair(request: pytest.FixtureRequest) -> tuple[Sharded, Sharded]:
    policy = replace(EAGER, loss_scale="dynamic", clip=1.0, kernels=request.param)
    return make(True, policy, dropout=0.2), make(False, policy, dropout=0.2)


@settings(max_examples=examples(6, 12), deadline=None, derandomize=True)
@given(plans=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([4, 5]), st.booleans()), min_size=1, max_size=4))
def test_steps_and_microbatches_of_two_shapes_share_state_and_memory(
    pair: tuple[Sharded, Sharded], plans: list[tuple[int, int, bool]]
) -> None:
    for microbatches, rows, overflow in plans:
        *before, (x, y) = batches(microbatches + 1, rows=rows)
        for part in before:
            assert torch.equal(*each([partial(sharded.accumulate, *part) for sharded in pair]))
        y = y * float("inf") if overflow else y
        assert torch.equal(*each([partial(sharded.step, x, y) for sharded in pair]))
        assert same(pair[0].state, pair[1].state)


def test_the_sequences_above_ran_as_graphs(pair: tuple[Sharded, Sharded]) -> None:
    graphed, plain = pair
    programs = len(graphed.programs)
    assert programs >= 4  # step or last, and accumulate, of two shapes
    assert stand_in(graphed).log.count("launch") == graphed.replays > 10
    assert len(stand_in(graphed).graphs) <= programs
    assert plain.replays == 0 and int(graphed.overflows) == int(plain.overflows) > 0


def test_a_step_is_one_copy_in_one_launch_and_one_copy_out() -> None:
    with parts() as of:
        sharded = make(True, replace(EAGER, clip=1.0))
    data = batches(5)
    for batch in data[:4]:
        sharded.step(*batch)
    compiled, seen = of(sharded).programs.newest, Seen()
    launch = compiled.runner

    def watched(*given: Any) -> Any:  # from inside, since a step under a mode that could not see it is refused
        with seen:
            return launch(*given)

    compiled.runner = watched
    sharded.step(*data[4])
    views = {"aten.slice.Tensor", "aten.view.dtype", "aten.view", "aten.detach"}
    assert [name for name in seen.names if name not in views] == ["aten._foreach_copy_", "aten.clone"]
    operators = stand_in(sharded).graphs[0].operators
    assert len(operators) > 30 and "aten.add_.Tensor" in operators


def test_without_copies_of_the_batch_it_would_train_on_the_first_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the comparisons: they notice a graph that reads the memory of the batch it was captured with."""

    class Same(Held):
        def __init__(self, like: torch.Tensor) -> None:
            super().__init__(like)
            self.tensor = like

    monkeypatch.setattr("fsdp_compiled.lower.cuda_graph.Held", Same)
    sharded, plain = make(True), make(False)
    losses = [[each.step(*batch) for batch in batches(WARM + 2)] for each in (sharded, plain)]
    assert [torch.equal(*pair) for pair in zip(*losses, strict=True)] == [True] * (WARM + 1) + [False]


def twice_and_one(place: Callable[[], torch.Tensor | None]) -> torch.Tensor:
    tensor = place()
    assert tensor is not None
    return tensor.mul_(2).add(1)


def test_memory_that_the_caller_frees_or_moves_is_noticed() -> None:
    """The control of the stand-in itself."""
    device, tensor = StandIn(), torch.ones(3)
    result, graph = device.capture(partial(twice_and_one, weakref.ref(tensor)))
    assert tensor.tolist() == [1, 1, 1] and result.isnan().all()  # to capture did nothing
    graph.replay()
    assert tensor.tolist() == [2, 2, 2] and result.tolist() == [3, 3, 3]
    tensor.set_(torch.ones(3))
    with pytest.raises(AssertionError, match="moved"):
        graph.replay()
    del tensor
    with pytest.raises(AssertionError, match="was freed"):
        graph.replay()


def test_a_number_read_on_the_host_breaks_the_capture(caplog: pytest.LogCaptureFixture) -> None:
    with parts() as of:
        sharded, plain = make(True), make(False)
    data = batches(6)
    sharded.step(*data[0])
    compiled = of(sharded).programs.newest
    inner = compiled.runner.runner  # type: ignore[attr-defined]

    def reads(*inputs: torch.Tensor) -> Any:
        results = inner(*inputs)
        results[0].item()
        return results

    compiled.runner.runner = reads  # type: ignore[attr-defined]
    for batch in data[1:]:
        sharded.step(*batch)
    for batch in data:
        plain.step(*batch)
    assert sharded.replays == 0 and stand_in(sharded).log.count("capture") == 1
    said = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert len(said) == 1 and "reads a number on the host" in said[0] and said[0].startswith("step (float32[5, 6]")
    assert same(sharded.state, plain.state)  # what was begun and broken off changed nothing


def test_where_a_graph_was_asked_for_a_broken_capture_is_an_error() -> None:
    sharded = make(True, wanted=True)
    stand_in(sharded).fail = "the device said no"
    last = refuses_the_graph(sharded, "the device said no")
    stand_in(sharded).fail = ""
    sharded.step(*last)
    assert sharded.replays == 1


def test_what_the_device_refuses_is_said_once_and_with_true_an_error(caplog: pytest.LogCaptureFixture) -> None:
    sharded = make(True)
    stand_in(sharded).refuse = "its segments move"
    for batch in batches(4):
        sharded.step(*batch)
    assert sharded.replays == 0 and stand_in(sharded).log == []
    assert caplog.text.count("its segments move") == 1
    strict = make(True, wanted=True)
    stand_in(strict).refuse = "its segments move"
    before = pytree.tree_map(torch.clone, strict.state)
    with pytest.raises(ValueError, match=r'its segments move\nWith cuda_graph="auto"'):
        strict.step(*batches(1)[0])
    assert same(before, strict.state)


def test_another_state_is_captured_on_its_own_tensors() -> None:
    graphed, plain = make(True), make(False)
    data = batches(12)
    ends = []
    for sharded in (graphed, plain):
        first = sharded.state
        second = pytree.tree_map(torch.clone, first)
        for batch in data[:6]:
            first, _ = sharded.apply(first, *batch)
        for batch in data[6:]:
            second, _ = sharded.apply(second, *batch)
        ends.append((first, second))
    assert same(ends[0][0], ends[1][0]) and same(ends[0][1], ends[1][1])
    assert not same(ends[0][0], ends[0][1])
    assert stand_in(graphed).log.count("capture") == 2
    assert stand_in(graphed).log.count("reset in a process group") + stand_in(graphed).log.count("reset") == 1
    assert graphed.replays == 8


@pytest.mark.parametrize("wanted", chosen(["auto", True], ["auto"]))
def test_states_that_take_turns_are_not_captured(wanted: Any, caplog: pytest.LogCaptureFixture) -> None:
    graphed, plain = make(True, wanted=wanted), make(False)
    states = [[pytree.tree_map(torch.clone, sharded.state) for _ in range(2)] for sharded in (graphed, plain)]
    raised = 0
    for turn, batch in enumerate(batches(8)):
        for sharded, mine in zip((graphed, plain), states, strict=True):
            try:
                mine[turn % 2], _ = sharded.apply(mine[turn % 2], *batch)
            except ValueError as error:
                assert wanted is True and "another State" in str(error)
                raised += 1
    assert graphed.replays == 0
    if wanted is True:
        assert raised == (8 - 1) // RESTARTS
    else:
        assert caplog.text.count("another State") == 1
        assert same(states[0], states[1])


def test_a_hyperparameter_a_mode_and_a_shape_have_graphs_of_their_own() -> None:
    graphed, plain = make(True, optimizer=sgd, dropout=0.5), make(False, optimizer=sgd, dropout=0.5)
    for sharded in (graphed, plain):
        assert sharded.optimizer is not None
        torch.manual_seed(7)
        for _ in range(2):
            for batch in batches(4):
                sharded.step(*batch)
            sharded.model.eval()
            for batch in batches(4, rows=3):
                sharded.step(*batch)
            sharded.model.train()
            sharded.optimizer.param_groups[0]["weight_decay"] = 0.1
    assert same(graphed.state, plain.state)
    # Traced again with the new weight decay, both start over; in the second round each launches twice.
    assert graphed.replays == 8 and stand_in(graphed).log.count("capture") == 4


def test_forward_and_gradients_alone_are_not_captured() -> None:
    sharded = make(True)
    x, y = batches(1)[0]
    for _ in range(4):
        sharded(x)
        sharded.value_and_grad(x, y)
    assert sharded.replays == 0 and stand_in(sharded).log == []


def test_forward_and_gradients_beside_graphs_run_in_the_graphs_memory() -> None:
    """Where what they return is copied, so that launches after it do not write over it."""
    graphed, plain = (make(graphs, dropout=0.2) for graphs in (True, False))
    data = batches(WARM + 4)
    for x, y in data[: WARM + 1]:
        assert torch.equal(*each([partial(graphed.step, x, y), partial(plain.step, x, y)]))
    begun = len(stand_in(graphed).log)
    x, y = data[-1]
    results = each([partial(graphed, x), partial(plain, x)])
    gradients = each([partial(graphed.value_and_grad, x, y), partial(plain.value_and_grad, x, y)])
    assert stand_in(graphed).log[begun:] == ["warm"] * 2
    before = [leaf.clone() for leaf in pytree.tree_leaves((results, gradients))]
    for x, y in data[WARM + 1 :]:
        assert torch.equal(*each([partial(graphed.step, x, y), partial(plain.step, x, y)]))
    assert same(results[0], results[1]) and same(gradients[0], gradients[1])
    assert same(before, (results, gradients)) and graphed.replays > 0
    graphed.close()
    graphed(x)
    assert stand_in(graphed).log.count("warm") == WARM + 3, "without graphs it runs in memory of its own"


def test_graphs_are_destroyed_before_the_process_group_ends() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = make(True)
        for batch in batches(4):
            sharded.step(*batch)
    finally:
        dist.destroy_process_group()
    assert stand_in(sharded).log[-2:] == ["launch", "reset in a process group"]
    with pytest.raises(AssertionError, match="launched after"):
        stand_in(sharded).graphs[0].replay()
    for batch in batches(4):  # a world of one has no collectives, and goes on
        sharded.step(*batch)
    assert sharded.replays == 4
    released = len(stand_in(sharded).released)
    sharded.close()
    assert stand_in(sharded).log[-1] == "reset"
    assert len(stand_in(sharded).released) == released + 1, "the graphs' memory is given back after them"


def layouts() -> st.SearchStrategy[torch.Tensor]:
    """Tensors with gaps, transposed, shown many times, empty, of several dtypes."""
    base = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]).map(
        lambda dtype: torch.arange(24).reshape(4, 6).to(dtype)
    )
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t,
        lambda t: t[:, 1:4],
        lambda t: t.t(),
        lambda t: t[::2, ::3],
        lambda t: t[:1].expand(5, 6),
        lambda t: t[0, 0].expand(2, 2),
        lambda t: t[0, 0],
        lambda t: t[:0],
        lambda t: t.unfold(1, 3, 1),
        lambda t: t.reshape(2, 2, 6).transpose(0, 2),
    ]
    return st.tuples(base, st.sampled_from(ways)).map(lambda made: made[1](made[0]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layouts())
def test_held_memory_is_laid_out_as_the_batch(tensor: torch.Tensor) -> None:
    held = Held(tensor)
    other = (tensor + 1) if tensor.dtype != torch.bool else ~tensor
    for source in (tensor, other.as_strided(other.shape, other.stride())):
        if source.stride() != tensor.stride():  # another's elements, laid out as the first
            continue
        held.target.copy_(held.source(source))
        assert torch.equal(held.tensor, source)
    assert held.tensor.stride() == tensor.stride() and held.tensor.shape == tensor.shape
    assert held.tensor.data_ptr() != tensor.data_ptr() or not tensor.numel()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.one_of(layouts(), st.none(), st.just(torch.ones(300))), max_size=5))
def test_results_are_handed_out_as_copies(results: list[Any]) -> None:
    kept = Results([value.clone() if value is not None else None for value in results])
    first, second = kept.copies(), kept.copies()
    for value, one, other in zip(results, first, second, strict=True):
        if value is None:
            assert one is None and other is None
            continue
        assert torch.equal(one, value) and one.dtype == value.dtype and torch.equal(other, value)
        if value.numel():
            one.fill_(1)
            assert torch.equal(other, value)


@pytest.mark.parametrize("value", ["yes", None, 1, 0, 2.0])
def test_a_choice_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r'Policy\.cuda_graph is .*; expected True, False or "auto"'):
        Policy(cuda_graph=value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_a_cpu_auto_is_no_graph_and_true_is_refused() -> None:
    model = build()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r'cuda_graph is True, which needs a GPU: the model is on cpu. Use "auto"'):
        compile_sharded(model, adamw(model), loss=mse, policy=Policy(cuda_graph=True))
    assert same_weights(weights, dict(model.state_dict()))
    for choice in ("auto", False):
        fine = build()
        sharded = compile_sharded(fine, adamw(fine), loss=mse, policy=replace(EAGER, cuda_graph=choice))
        for batch in batches(3):
            sharded.step(*batch)
        assert sharded.replays == 0
