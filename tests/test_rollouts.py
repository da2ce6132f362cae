from __future__ import annotations

import pytest

from trl.trainer.rollouts import micro_batch_order


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


@pytest.mark.parametrize(("size_of_update", "sorts"), [(4, True), (8, True), (16, True), (6, False), (12, False)])
def test_updates_that_straddle_rollouts_are_left_to_chance(size_of_update, sorts):
    order = micro_batch_order(LENGTHS, 0, size_of_update)
    by_chance = micro_batch_order(LENGTHS, 0, size_of_update, by_length=False)
    assert (order != by_chance) is sorts
