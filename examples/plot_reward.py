"""Draws the reward of a run, says whether it rose, and how to go on.

python examples/plot_reward.py runs/smollm2/adapter
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import mean, stdev

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_rewards(output_dir: Path) -> tuple[list[int], list[float]]:
    """Steps and mean rewards that a trainer logged.

    Args:
        output_dir (`Path`): The trainer's `output_dir`, with a `trainer_state.json` in it or in a checkpoint.

    Raises:
        FileNotFoundError: If there is no `trainer_state.json`.
        ValueError: If there are fewer than 8 logged rewards, too few for a quarter to have a spread.
    """
    files = sorted(output_dir.glob("**/trainer_state.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"No trainer_state.json below {output_dir}: train with save_strategy other than 'no'.")
    history = json.loads(files[-1].read_text())["log_history"]
    logged = [(entry["step"], entry["reward"]) for entry in history if "reward" in entry]
    if len(logged) < 8:
        raise ValueError(f"{files[-1]} has {len(logged)} rewards, 8 are needed: set logging_steps to 1.")
    steps, rewards = zip(*logged, strict=True)
    return list(steps), list(rewards)


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean of a sample and its standard error, `s / sqrt(n)`, with `s` the sample's standard deviation."""
    return mean(values), stdev(values) / len(values) ** 0.5


def compare_quarters(rewards: list[float]) -> str:
    """One line: mean reward of the first and of the last quarter of the steps, and the rise, with standard errors."""
    quarter = len(rewards) // 4
    first, first_error = mean_and_error(rewards[:quarter])
    last, last_error = mean_and_error(rewards[-quarter:])
    error = (first_error**2 + last_error**2) ** 0.5
    return (
        f"Mean reward: {first:.3f} ± {first_error:.3f} in the first {quarter} steps, {last:.3f} ± {last_error:.3f} in "
        f"the last {quarter}: {last - first:+.3f} ± {error:.3f}"
    )


def plot(steps: list[int], rewards: list[float], file: Path) -> None:
    """Draw the reward of each step, and its mean over up to five steps before and at it."""
    smooth = [mean(rewards[max(0, end - 5) : end]) for end in range(1, len(rewards) + 1)]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, rewards, "o", color="tab:blue", alpha=0.4, label="step")
    axes.plot(steps, smooth, color="tab:blue", label="mean of 5 steps")
    axes.set(xlabel="optimizer step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    """Write `reward.png`, print what it shows, and how to use the adapter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output_dir", type=Path, help="output_dir of the run")
    output_dir = parser.parse_args().output_dir

    steps, rewards = read_rewards(output_dir)
    plot(steps, rewards, output_dir / "reward.png")
    print(compare_quarters(rewards))
    print(f"Plot: {output_dir / 'reward.png'}")
    print(f'Use the adapter: {os.path.relpath(sys.executable)} -m examples.ask {output_dir} "8 - 3"')


if __name__ == "__main__":
    main()
