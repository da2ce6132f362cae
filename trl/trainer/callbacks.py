"""What a user sees of a run beside its metrics: the progress bar, and the table of completions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback


if TYPE_CHECKING:
    import pandas as pd


# ---------------------------------------------------------------------------------------------------------------------
# Progress bar
# ---------------------------------------------------------------------------------------------------------------------


METRICS_ON_BAR = {"reward": "reward", "reward_std": "reward_std", "completions/mean_length": "length"}
"""Metric to its name on the progress bar."""


class RewardProgressCallback(ProgressCallback):
    """Progress bar that shows how training goes: the rewards at its right end instead of a printed line per log.

    What is logged without a reward (evaluation, the summary at the end) is printed above the bar as usual.
    """

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        if "reward" not in logs:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif self.training_bar is not None:  # it exists on the main process, while training
            shown = {name: f"{logs[metric]:.3g}" for metric, name in METRICS_ON_BAR.items() if metric in logs}
            self.training_bar.set_postfix(shown)


def show_rewards_on_progress_bar(trainer: Trainer) -> None:
    """Put [`RewardProgressCallback`] in the place of the trainer's own progress bar, if it has one.

    Without one (`disable_tqdm`, a notebook) nothing changes.
    """
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(RewardProgressCallback())


# ---------------------------------------------------------------------------------------------------------------------
# Table of completions
# ---------------------------------------------------------------------------------------------------------------------


class CompletionsCallback(TrainerCallback):
    """Shows and keeps completions with their rewards, each time metrics are logged.

    The trainer calls [`record`] after every rollout. At the next log the newest `max_rows` completions are printed,
    written to `output_dir/completions/completions_STEP.parquet` (`completions_STEP_eval.parquet` for those of an
    evaluation) and sent as a table to wandb and trackio where these are in `report_to`; then they are forgotten. Only
    the main process does so, and only what was recorded there is seen: gather first.

    Args:
        max_rows (`int`): Completions to keep between two logs, usually one generation batch.
        num_completions_to_print (`int`, *optional*): Print that many, drawn at even distances; `None` prints all, `0`
            none. Files and tables always hold all.
        log_unique_prompts (`bool`, defaults to `False`): Send one completion of each prompt to the trackers.

    Raises:
        ValueError: If `max_rows` is not positive or `num_completions_to_print` negative.
    """

    def __init__(
        self, max_rows: int, num_completions_to_print: int | None = None, log_unique_prompts: bool = False
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows} keeps no completion: give at least 1.")
        if num_completions_to_print is not None and num_completions_to_print < 0:
            raise ValueError(
                f"num_completions_to_print={num_completions_to_print} is negative: give 0 to print none, None for all."
            )
        self.num_completions_to_print = num_completions_to_print
        self.log_unique_prompts = log_unique_prompts
        self._rows = {mode: deque(maxlen=max_rows) for mode in ("train", "eval")}

    def record(
        self,
        mode: str,
        prompts: Sequence[str],
        completions: Sequence[str],
        rewards: Mapping[str, Sequence[float]],
        advantages: Sequence[float],
        extra: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Keep the completions of one rollout until the next log.

        Args:
            mode (`str`): `"train"` or `"eval"`.
            prompts, completions (`Sequence[str]`): `N` of each, as text.
            rewards (`Mapping[str, Sequence[float]]`): `N` rewards by name of the reward function.
            advantages (`Sequence[float]`): `N`.
            extra (`Mapping[str, Sequence]`, *optional*): Further columns, `N` values each.
        """
        columns = {"prompt": prompts, "completion": completions, **rewards, **(extra or {}), "advantage": advantages}
        for values in zip(*columns.values(), strict=True):
            self._rows[mode].append(dict(zip(columns, values, strict=True)))

    def on_log(self, args, state, control, logs=None, **kwargs):
        mode = "eval" if any(name.startswith("eval_") for name in logs or {}) else "train"
        rows = list(self._rows[mode])
        self._rows[mode].clear()
        if not rows or not state.is_world_process_zero:
            return
        table = completions_table(state.global_step, rows)
        print_completions(table, self.num_completions_to_print)
        write_completions(table, args.output_dir, suffix="_eval" if mode == "eval" else "")
        sent = table.drop_duplicates(subset=["prompt"]) if self.log_unique_prompts else table
        for tracker in args.report_to:
            if tracker in TRACKERS:
                TRACKERS[tracker](sent)


def completions_table(step: int, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each completion: `step`, `prompt`, `completion`, a column for each reward, ..., `advantage`."""
    import pandas as pd  # half a second that only runs with a table should pay

    table = pd.DataFrame(list(rows))
    table.insert(0, "step", step)
    return table


def print_completions(table: pd.DataFrame, max_rows: int | None = None) -> None:
    """Print a table of completions to the terminal, at most `max_rows` of it at even distances (`None`: all)."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if max_rows is not None and max_rows < len(table):
        table = table.iloc[[index * len(table) // max_rows for index in range(max_rows)]]
    if table.empty:
        return
    columns = [name for name in table.columns if name != "step"]
    printed = Table(title=f"Completions at step {table['step'].iloc[0]}", show_lines=True, expand=True)
    for name in columns:
        is_text = name in ("prompt", "completion")
        printed.add_column(name, justify="left" if is_text else "right", ratio=3 if is_text else None)
    for row in table[columns].itertuples(index=False):
        # Text, not str: what a model writes may look like rich's markup.
        printed.add_row(*(Text(f"{value:.2f}" if isinstance(value, float) else str(value)) for value in row))
    with tqdm.external_write_mode():  # the progress bar steps aside
        Console().print(printed)


def write_completions(table: pd.DataFrame, output_dir: str | Path, suffix: str = "") -> Path:
    """Write a table of completions to `output_dir/completions/completions_STEP{suffix}.parquet`; returns the path."""
    directory = Path(output_dir) / "completions"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"completions_{table['step'].iloc[0]:05d}{suffix}.parquet"
    table.to_parquet(path, index=False)
    return path


def _send_to_wandb(table: pd.DataFrame) -> None:
    import wandb

    if wandb.run is not None:  # none if disabled
        wandb.log({"completions": wandb.Table(dataframe=table)})


def _send_to_trackio(table: pd.DataFrame) -> None:
    import trackio

    trackio.log({"completions": trackio.Table(dataframe=table)})


TRACKERS: dict[str, Callable[[pd.DataFrame], None]] = {"wandb": _send_to_wandb, "trackio": _send_to_trackio}
"""Entry of `report_to` to what sends a table there. Its own callback has started the tracker by then."""
