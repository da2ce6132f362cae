"""Small parts of the trainer: checks of datasets, the sampler, seeds, padding, metrics on their way to the log, and
the forward of a module replaced for a while."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Sampler


REWARD_ARGUMENTS = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")
"""What reward functions are called with, beside the columns of the dataset."""


def check_datasets(train_dataset: Any, eval_dataset: Any, generation_batch_size: int, num_generations: int) -> None:
    """Raise for datasets that no rollout can be drawn from.

    Args:
        train_dataset (`Dataset`): Rows with a `prompt`.
        eval_dataset (`Dataset`, `dict` of them or `None`): The same.
        generation_batch_size (`int`): Completions of one rollout.
        num_generations (`int`): Completions of each prompt.

    Raises:
        ValueError: Names the dataset, what is wrong with it and what to do.
    """
    if train_dataset is None:
        raise ValueError("train_dataset is missing: give a dataset with a column 'prompt'.")
    _check_dataset("train_dataset", train_dataset)
    needed = generation_batch_size // num_generations
    if len(train_dataset) < needed:
        raise ValueError(
            f"train_dataset has {len(train_dataset)} prompts, and one rollout needs {needed} (generation_batch_size="
            f"{generation_batch_size} / num_generations={num_generations}): add prompts, or lower "
            "generation_batch_size, steps_per_generation or per_device_train_batch_size."
        )
    named = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    for name, dataset in named.items():
        if dataset is not None:
            _check_dataset(f"eval_dataset[{name!r}]" if name else "eval_dataset", dataset)


def _check_dataset(argument: str, dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"{argument} is a {type(dataset).__name__}, which has no random access: give one with a length, "
            "such as datasets.Dataset."
        )
    if len(dataset) == 0:
        raise ValueError(f"{argument} is empty: give at least one row with a 'prompt'.")
    columns = list(dataset[0])
    if "prompt" not in columns:
        raise ValueError(
            f"{argument} has no column 'prompt', only {', '.join(map(repr, columns))}: rename the column that holds "
            "the prompts."
        )
    taken = [name for name in columns if name in REWARD_ARGUMENTS]
    if taken:
        raise ValueError(
            f"{argument} has the columns {', '.join(map(repr, taken))}, and reward functions are called with "
            "arguments of these names already: rename the columns."
        )


class RepeatSampler(Sampler):
    """Indices of prompts, repeated as rollouts need them.

    The prompts of one rollout come `mini_repeat_count` times each, one prompt after the other; all of that is repeated
    `repeat_count` times before the next rollout. Prompts that do not fill a rollout are left out of the epoch.

    Args:
        data_source (`Sized`): The dataset.
        mini_repeat_count (`int`): Times that an index is repeated in a row.
        batch_size (`int`, defaults to `1`): Different indices in one rollout.
        repeat_count (`int`, defaults to `1`): Times that a rollout's indices are repeated.
        shuffle (`bool`, defaults to `True`): Draw the prompts in random order.
        seed (`int`, *optional*): Seed of that order.

    Attributes:
        epoch (`int`): Set it before an epoch; every epoch has an order of its own, which only depends on `seed`.

    Example:

    ```python
    >>> list(RepeatSampler(range(5), mini_repeat_count=2, batch_size=2, repeat_count=2, shuffle=False))
    [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    ```
    """

    # Not `set_epoch`: accelerate would call it with a count of its own, which starts anew when a run is resumed.
    epoch: int = 0

    def __init__(
        self,
        data_source: Sized,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        self.num_rollouts = len(data_source) // batch_size
        self.num_samples = len(data_source)
        self.mini_repeat_count = mini_repeat_count
        self.batch_size = batch_size
        self.repeat_count = repeat_count
        self.shuffle = shuffle
        self.seed = seed or 0

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(derived_seed(self.seed, self.epoch))
            indices = torch.randperm(self.num_samples, generator=generator).tolist()
        else:
            indices = list(range(self.num_samples))
        for rollout in range(self.num_rollouts):
            prompts = indices[rollout * self.batch_size : (rollout + 1) * self.batch_size]
            for _ in range(self.repeat_count):
                for index in prompts:
                    yield from [index] * self.mini_repeat_count

    def __len__(self) -> int:
        return self.num_rollouts * self.batch_size * self.mini_repeat_count * self.repeat_count


def derived_seed(*numbers: int) -> int:
    """A seed below 2**32 that depends on all of `numbers` and on nothing else."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def pad(rows: Sequence[Sequence[float]], value: float, side: str = "right", dtype: torch.dtype = torch.long) -> Tensor:
    """Rows of different lengths as one tensor `[len(rows), longest]` (at least one column), on the CPU.

    Args:
        rows (sequence of sequences of numbers): What to pad.
        value (`float`): Fills what is missing.
        side (`str`, defaults to `"right"`): Where: `"left"` or `"right"`.
        dtype (`torch.dtype`, defaults to `torch.long`): Of the tensor.
    """
    width = max(1, *(len(row) for row in rows)) if rows else 1
    if side == "left":
        padded = [[value] * (width - len(row)) + list(row) for row in rows]
    else:
        padded = [list(row) + [value] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=dtype).view(len(rows), width)


class MetricBuffer:
    """Collects metrics between two logs, without waiting for the device.

    Over time and processes a name that ends in `min` keeps its minimum and one that ends in `max` its maximum; all
    others are averaged. NaN stands for "nothing to measure" and is left out.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor | float]] = {}

    def add(self, metrics: dict[str, Tensor | float]) -> None:
        """Add one value to each of the named metrics: numbers, or scalars on any device."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)

    def pop(self) -> dict[str, float]:
        """Reduce what was collected, over all processes, and forget it. All processes must call this together."""
        values, self._values = self._values, {}
        names = [name for name, items in values.items() for _ in items]
        items = _on_host([item for items in values.values() for item in items])
        collected: dict[str, list[float]] = {}
        for name, item in gather_object(list(zip(names, items, strict=True))):
            if not math.isnan(item):
                collected.setdefault(name, []).append(item)
        return {name: _reduce(name, items) for name, items in collected.items()}


def _on_host(items: Sequence[Tensor | float]) -> list[float]:
    """Numbers of scalars, with one transfer for each device."""
    numbers = list(items)
    tensors: dict[torch.device, list[int]] = {}
    for position, item in enumerate(items):
        if isinstance(item, Tensor):
            tensors.setdefault(item.device, []).append(position)
    for positions in tensors.values():
        for position, number in zip(
            positions, torch.stack([items[position].float() for position in positions]).tolist(), strict=True
        ):
            numbers[position] = number
    return [float(number) for number in numbers]


def _reduce(name: str, items: list[float]) -> float:
    if name.endswith("min"):
        return min(items)
    if name.endswith("max"):
        return max(items)
    return sum(items) / len(items)


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have the module compute `forward(input)`. Hooks on it, which may gather sharded weights, still run."""
    previous = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if previous is None:
            del module.forward
        else:
            module.forward = previous
