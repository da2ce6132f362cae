from __future__ import annotations

from types import SimpleNamespace

import pytest

from trl import GRPOTrainer
from trl.trainer.rollouts import Samples, micro_batch_order


LENGTHS = [7, 3, 9, 1, 8, 2, 6, 4]


def test_samples_of_an_update_are_sorted_by_length():
    order = micro_batch_order(LENGTHS, seed=0, size_of_update=4)
    by_chance = micro_batch_order(LENGTHS, seed=0, size_of_update=4, by_length=False)
    assert sorted(order) == list(range(8))
    for update in (slice(0, 4), slice(4, 8)):
        assert set(order[update]) == set(by_chance[update])
        lengths = [LENGTHS[sample] for sample in order[update]]
        assert lengths == sorted(lengths, reverse=True)


def test_chance_decides_on_the_update():
    orders = [micro_batch_order(LENGTHS, seed, size_of_update=4, by_length=False) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != list(range(8))


@pytest.mark.parametrize(("rollout", "update", "sorts"), [(4, 2, True), (2, 4, True), (4, 3, False)])
def test_updates_that_straddle_rollouts_are_left_to_chance(rollout, update, sorts):
    arguments = {"steps_per_generation": rollout, "gradient_accumulation_steps": update}
    args = SimpleNamespace(per_device_train_batch_size=2, loss_type="dapo", **arguments)
    completions = [[0] * length for length in LENGTHS]
    samples = Samples([], [[1]] * 8, [], completions, None, [False] * 8)
    order = GRPOTrainer._order(SimpleNamespace(args=args), samples, 0)
    by_chance = micro_batch_order(LENGTHS, 0, size_of_update=2 * update, by_length=False)
    assert (order != by_chance) is sorts
