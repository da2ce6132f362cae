"""Rewards that are computed, not learned, for problems of the package `reasoning-gym`."""

from __future__ import annotations

import re

from reasoning_gym import get_score_answer_fn


NUMBER_AT_END = re.compile(r"(-?\d+(?:\.\d+)?)\W*$")

score_answer = get_score_answer_fn("chain_sum")


def final_number(text: str) -> str | None:
    """The number that a text ends with: `"7 - 5 equals 2."` gives `"2"`. `None` if it ends with something else."""
    match = NUMBER_AT_END.search(text)
    return match[1] if match else None


def correct_answer(completions: list[list[dict[str, str]]], answer: list[str], **kwargs) -> list[float]:
    """1 where a completion ends with the right number, else 0. Talking on after the answer therefore costs it.

    Args:
        completions (`list[list[dict[str, str]]]`): The assistant's message of each sample.
        answer (`list[str]`): The right number of each sample, a column of the data set.
    """
    numbers = [final_number(messages[-1]["content"]) for messages in completions]
    scores = [score_answer(number, {"answer": right}) for number, right in zip(numbers, answer, strict=True)]
    # reasoning-gym gives part of a point to an answer that merely contains the right one, as 12 contains 2.
    return [float(score == 1.0) for score in scores]
