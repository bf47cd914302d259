"""Packing cases from public bug reports, each named after what went wrong there."""

from __future__ import annotations

import numpy as np
import pytest

from routepack_opt import Constraints, Plan, Topology, Window, plan_window
from routepack_opt.errors import Infeasible

ONE_RANK = Topology(dp=1, ep=1, shards=1)


def window_of(lengths: list[int] | np.ndarray, *, seed: int = 0, num_experts: int = 4, **extra: object) -> Window:
    """Two layers of demand that follows the lengths."""
    lengths = np.asarray(lengths)
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(num_experts, 2.0), 2)
    return Window(lengths, rng.poisson(2 * popularity[None] * lengths[:, None, None]), **extra)  # type: ignore[arg-type]


def plan_of(window: Window, topology: Topology, token_cap: int, steps: int = 500, **rules: object) -> Plan:
    plan = plan_window(
        window, topology, token_cap=token_cap, budget_steps=steps, constraints=Constraints(**rules)  # type: ignore[arg-type]
    )  # fmt: skip
    plan.verify(window)
    return plan


def counts_per_rank(plan: Plan) -> list[int]:
    return [sum(len(row[d]) for row in plan.cells) for d in range(plan.topology.dp)]


def test_eight_sevens_with_cap_eight_got_a_cell_of_fourteen_tokens() -> None:
    plan = plan_of(window_of([7] * 8), ONE_RANK, 8)
    assert plan.rows == 8
    assert max(max(row) for row in plan.cell_tokens) <= 8


def test_a_sample_over_the_cap_was_dropped_or_looped_forever() -> None:
    window = window_of([21, 5, 6, 7])
    with pytest.raises(Infeasible, match=r"sample 0: length 21 exceeds the token cap 20.*a cap of 21 would do"):
        plan_of(window, ONE_RANK, 20)
    plan = plan_of(window, ONE_RANK, 20, oversize="alone")
    assert (0,) in [cell for row in plan.cells for cell in row]
    assert plan_of(window, ONE_RANK, 21).rows == 2
    assert plan_of(window_of([20, 20]), ONE_RANK, 20).rows == 2  # length == cap is fine


def test_the_sample_over_the_cap_is_named_by_its_place_in_the_input() -> None:
    with pytest.raises(Infeasible, match=r"sample 2 \(late\): length 30"):
        plan_of(window_of([5, 9, 30, 1], sample_ids=["a", "b", "late", "c"]), ONE_RANK, 20)


def test_padded_tensor_width_was_counted_instead_of_true_lengths() -> None:
    # four samples of 4 true tokens in a tensor 64 wide, cap 16: one row of one cell
    plan = plan_of(window_of([4, 4, 4, 4]), ONE_RANK, 16)
    assert plan.rows == 1
    assert plan.cell_tokens == ((16,),)


def test_sixty_four_ranks_were_taken_for_the_number_of_partitions_instead_of_dp() -> None:
    topology = Topology.from_sizes(world=64, tp=4, pp=2, ep=8)
    assert topology.dp == 8
    plan = plan_of(window_of(np.full(160, 10), num_experts=8), topology, 1000)
    assert all(len(row) == 8 for row in plan.cells)
    assert counts_per_rank(plan) == [20] * 8


def test_206_samples_on_four_ranks_left_uneven_counts() -> None:
    window = window_of(np.full(206, 10))
    counts = counts_per_rank(plan_of(window, Topology(dp=4, ep=1, shards=1), 100))
    assert max(counts) - min(counts) <= 1
    with pytest.raises(Infeasible, match="needs 2 dummy samples") as caught:
        plan_of(window, Topology(dp=4, ep=1, shards=1), 100, equal_samples_per_rank=True)
    assert caught.value.dummy_samples == 2


def test_equal_lengths_of_one_group_differ_by_at_most_one_sample_whatever_the_sizes() -> None:
    for num_samples in (9, 31, 64, 206):
        for dp in (2, 3, 4):
            window = Window(np.full(num_samples, 10), np.full((num_samples, 1, 4), 5))
            counts = counts_per_rank(plan_of(window, Topology(dp=dp, ep=1, shards=1), 50))
            assert max(counts) - min(counts) <= 1, (num_samples, dp)


def test_ranks_with_different_token_sums_got_different_numbers_of_microbatches() -> None:
    # rank sums of 4 and 6 caps: naive packing gives one rank 4 cells and the other 6, and the job hangs
    window = window_of([100] * 10)
    plan = plan_of(window, Topology(dp=2, ep=1, shards=1), 100)
    assert plan.rows == 5
    assert all(len(row) == 2 and all(row) for row in plan.cells)


def test_samples_move_across_ranks_when_one_rank_has_too_few() -> None:
    # one rank held 2 short samples, the other 6 long ones: 4 rows need 4 cells on each rank
    plan = plan_of(window_of([5, 5, 90, 90, 90, 90, 90, 90]), Topology(dp=2, ep=1, shards=1), 100, min_rows=4)
    assert plan.rows == 4
    assert counts_per_rank(plan) == [4, 4]


def test_too_few_samples_for_the_grid_are_reported_before_anything_starts() -> None:
    with pytest.raises(Infeasible, match="needs 3 dummy samples") as caught:
        plan_of(window_of([5] * 5), Topology(dp=2, ep=1, shards=1), 100, min_rows=4)
    assert caught.value.dummy_samples == 3


def test_nine_samples_on_four_ranks_left_a_rank_empty() -> None:
    for lengths in ([10] * 9, [1, 2, 3, 4, 5, 6, 7, 8, 9], [90, 1, 1, 1, 1, 1, 1, 1, 1]):
        plan = plan_of(window_of(lengths), Topology(dp=4, ep=1, shards=1), 100)
        assert plan.rows == 1
        assert all(plan.cells[0])
    even = plan_of(Window([10] * 9, np.full((9, 1, 4), 5)), Topology(dp=4, ep=1, shards=1), 100)
    assert sorted(len(cell) for cell in even.cells[0]) == [2, 2, 2, 3]


def test_fewer_samples_than_ranks_gave_an_empty_batch() -> None:
    with pytest.raises(Infeasible, match=r"needs 1 dummy sample\b") as caught:
        plan_of(window_of([5, 5, 5]), Topology(dp=4, ep=1, shards=1), 100)
    assert caught.value.dummy_samples == 1


def test_row_multiple_with_a_sample_limit_made_empty_rows() -> None:
    plan = plan_of(window_of([5] * 5), Topology(dp=2, ep=1, shards=1), 100, max_samples_per_cell=2, row_multiple=2)
    assert plan.rows == 2
    assert sorted(len(cell) for row in plan.cells for cell in row) == [1, 1, 1, 2]
    with pytest.raises(Infeasible, match=r"needs 1 dummy sample\b") as caught:
        plan_of(window_of([5] * 3), Topology(dp=2, ep=1, shards=1), 100, row_multiple=2)
    assert caught.value.dummy_samples == 1


def test_an_atomic_group_over_the_cap_was_split_silently() -> None:
    window = window_of([5, 5, 3, 3], group_ids=[70, 70, 71, 71])
    with pytest.raises(Infeasible, match=r"group 70 \(samples 0, 1\): length 10 exceeds the token cap 8"):
        plan_of(window, ONE_RANK, 8, groups="cell")
    with pytest.raises(Infeasible, match=r"group 0 \(samples 0, 1\): length 10 exceeds the token cap 8"):
        plan_of(window, ONE_RANK, 8, groups=[0, 0, 1, 1])
    alone = plan_of(window, ONE_RANK, 8, groups="cell", oversize="alone")
    assert {cell for row in alone.cells for cell in row} == {(0, 1), (2, 3)}


def grpo_lengths(rng: np.random.Generator) -> np.ndarray:
    """16 prompts x 8 rollouts in sequence, one prompt much longer than the rest."""
    lengths = rng.integers(10, 60, (16, 8))
    lengths[3] += 400
    return lengths.ravel()


def test_siblings_in_sequence_with_one_long_prompt_made_one_rank_the_straggler() -> None:
    rng = np.random.default_rng(0)
    lengths = grpo_lengths(rng)
    window = window_of(lengths)
    topology = Topology(dp=4, ep=2, shards=2)
    orders = [np.arange(lengths.size), *(rng.permutation(lengths.size) for _ in range(3))]
    plans = [
        plan_of(Window(window.lengths[order], window.demand[order]), topology, 1000, steps=3000) for order in orders
    ]
    assert len({plan.score for plan in plans}) == 1  # with a fixed step budget, not at all
    by_rank = np.array([[sum(row[d] for row in plan.cell_tokens) for d in range(4)] for plan in plans])
    assert by_rank.max() < 1.15 * by_rank.mean()


def test_shuffling_the_input_changes_the_score_by_no_more_than_the_noise_of_the_clock() -> None:
    rng = np.random.default_rng(1)
    lengths = grpo_lengths(rng)
    window = window_of(lengths)
    topology = Topology(dp=4, ep=2, shards=2)
    scores = []
    for order in (np.arange(lengths.size), rng.permutation(lengths.size)):
        shuffled = Window(window.lengths[order], window.demand[order])
        plan = plan_window(shuffled, topology, token_cap=1000, budget_s=0.3)
        scores.append(plan.score.slowest_shard)
    assert max(scores) / min(scores) < 1.05


def test_cells_of_1_and_100_tokens_were_averaged_as_if_equal() -> None:
    # without counts a trainer takes the mean of cell means; the plan carries what global normalisation needs
    window = window_of([1, 100])
    plan = plan_of(window, Topology(dp=2, ep=1, shards=1), 100)
    assert sorted(plan.cell_tokens[0]) == [1, 100]
    assert plan.total_tokens == 101
    stored = plan.to_json()
    assert stored["total_tokens"] == 101
    assert sorted(stored["cell_tokens"][0]) == [1, 100]


def test_8192_samples_on_1024_ranks_took_minutes() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6.0, 0.8, 8192).astype(np.int64) + 1, 8192)
    window = Window(lengths, rng.poisson(0.5 * lengths[:, None, None], (8192, 2, 16)))
    topology = Topology(dp=1024, ep=8, shards=128)
    plan = plan_window(window, topology, token_cap=8192, budget_s=1.0)
    plan.verify(window)
    assert plan.rows == plan.rows_lower_bound
