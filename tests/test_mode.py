from __future__ import annotations

import logging

import pytest

from trl.weight_sync.mode import ModeChooser


def run(chooser, rollouts):
    """Modes chosen for rollouts of `(error, seconds when dynamic, seconds when merged[, tokens of all])`."""
    modes = []
    for error, dynamic, merged, *tokens in rollouts:
        modes.append(chooser.choose(error))
        seconds = {"dynamic": dynamic, "merged": merged}[modes[-1]]
        chooser.record(0.1 * seconds, 0.9 * seconds, *(tokens or [1000]), 10)
    return modes


@pytest.mark.parametrize(("merged", "faster"), [(1.0, "merged"), (3.0, "dynamic")])
def test_both_ways_are_measured_and_the_faster_one_stays(merged, faster, caplog):
    caplog.set_level(logging.INFO, "trl")
    modes = run(ModeChooser(), [(0.01, 2.0, merged)] * 8)
    assert modes == ["dynamic", "dynamic", "merged", "merged", *[faster] * 4]
    assert [f"{faster!r} from now on" in record.message for record in caplog.records] == [True]


def test_the_first_rollout_may_be_slow():
    rollouts = [(0.01, 2.0, 9.0), (0.01, 2.0, 9.0), (0.01, 2.0, 9.0), *[(0.01, 2.0, 1.0)] * 3]
    assert run(ModeChooser(), rollouts)[-1] == "merged"


def test_no_adapter_is_merged_that_rounding_would_change():
    modes = run(ModeChooser(bound=0.05), [(0.06, 2.0, 1.0)] * 5 + [(0.05, 2.0, 1.0)] * 4 + [(0.06, 2.0, 1.0)])
    # The rollouts before count, so only the other way is still measured.
    assert modes == ["dynamic"] * 5 + ["merged"] * 4 + ["dynamic"]


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ((0.01, 1.0, 2.0, 1400), False),
        ((0.01, 1.0, 2.0, 1600), True),  # completions longer by more than half
        ((0.01, 1.0, 2.0, 400), True),
        ((0.016, 1.0, 2.0, 1000), True),  # error
        ((0.014, 1.0, 2.0, 1000), False),
    ],
)
def test_decides_again_when_length_or_error_has_changed_by_half(change, again):
    chooser = ModeChooser()
    assert run(chooser, [(0.01, 2.0, 1.0)] * 5)[-1] == "merged"
    modes = run(chooser, [change] * 6)
    assert (modes[-1] == "dynamic") == again


def test_error_far_below_the_bound_does_not_matter():
    chooser = ModeChooser()
    run(chooser, [(1e-7, 2.0, 1.0)] * 5)
    assert run(chooser, [(5e-7, 1.0, 2.0)] * 6) == ["merged"] * 6
