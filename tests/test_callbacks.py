from __future__ import annotations

import io
import sys
import types

import pandas as pd
import pytest
import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from trl.trainer.callbacks import (
    CompletionsCallback,
    RewardProgressCallback,
    print_completions,
    show_rewards_on_progress_bar,
)


ROLLOUT = {
    "prompts": ["1+1=", "1+1=", "2+2=", "2+2="],
    "completions": [" 2", " [red]3[/red]", " 4", " 5"],
    "rewards": {"exact": [1.0, 0.0, 1.0, float("nan")], "short": [0.5, 0.5, 0.25, 0.125]},
    "advantages": [0.7, -0.7, 0.75, -0.75],
}
TRAIN_LOGS = {"loss": 0.1, "reward": 0.5}
EVAL_LOGS = {"eval_loss": 0.1, "eval_reward": 0.5}


@pytest.fixture
def args(tmp_path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)


def log(callback, args, logs=TRAIN_LOGS, step=7, is_main=True) -> None:
    state = TrainerState(global_step=step, max_steps=10, is_world_process_zero=is_main)
    callback.on_log(args, state, TrainerControl(), logs=logs)


def read(args, name: str) -> pd.DataFrame:
    return pd.read_parquet(f"{args.output_dir}/completions/{name}.parquet")


def test_completions_are_written_at_the_next_log_and_then_forgotten(args):
    callback = CompletionsCallback(max_rows=4, num_completions_to_print=0)
    callback.record("train", **ROLLOUT, extra={"answer": ["2", "2", "4", "4"]})
    log(callback, args)
    table = read(args, "completions_00007")
    assert list(table.columns) == ["step", "prompt", "completion", "exact", "short", "answer", "advantage"]
    assert table["step"].tolist() == [7] * 4
    assert table["completion"].tolist() == ROLLOUT["completions"]
    assert table["short"].tolist() == ROLLOUT["rewards"]["short"]
    assert table["exact"].isna().tolist() == [False, False, False, True]
    assert table["advantage"].tolist() == ROLLOUT["advantages"]
    log(callback, args, step=8)
    with pytest.raises(FileNotFoundError):
        read(args, "completions_00008")


def test_newest_rows_are_kept(args):
    callback = CompletionsCallback(max_rows=3, num_completions_to_print=0)
    callback.record("train", **ROLLOUT)
    callback.record("train", ["new"], ["new"], {"exact": [1.0], "short": [1.0]}, [0.0])
    log(callback, args)
    assert read(args, "completions_00007")["prompt"].tolist() == ["2+2=", "2+2=", "new"]


def test_training_and_evaluation_are_kept_apart(args):
    callback = CompletionsCallback(max_rows=4, num_completions_to_print=0)
    callback.record("train", **ROLLOUT)
    callback.record("eval", ["e"], ["e"], {"exact": [1.0]}, [0.0])
    log(callback, args, EVAL_LOGS)
    assert read(args, "completions_00007_eval")["prompt"].tolist() == ["e"]
    log(callback, args)
    assert read(args, "completions_00007")["prompt"].tolist() == ROLLOUT["prompts"]


def test_other_processes_write_nothing(args, tmp_path, capsys):
    callback = CompletionsCallback(max_rows=4)
    callback.record("train", **ROLLOUT)
    log(callback, args, is_main=False)
    assert not (tmp_path / "completions").exists()
    assert capsys.readouterr().out == ""


def test_record_refuses_columns_of_different_lengths():
    callback = CompletionsCallback(max_rows=4)
    with pytest.raises(ValueError, match="shorter"):
        callback.record("train", ["a", "b"], ["a", "b"], {"exact": [1.0, 1.0]}, [0.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_rows": 0}, "max_rows=0"),
        ({"max_rows": 1, "num_completions_to_print": -1}, "num_completions_to_print=-1"),
    ],
)
def test_construction_refuses_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        CompletionsCallback(**arguments)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [(None, ["ape", "bee", "cat", "dog"]), (9, ["ape", "bee", "cat", "dog"]), (2, ["ape", "cat"])],
)
def test_as_many_completions_are_printed_as_asked_for(args, capsys, shown, expected):
    callback = CompletionsCallback(max_rows=4, num_completions_to_print=shown)
    callback.record("train", **{**ROLLOUT, "completions": ["ape", "bee", "cat", "dog"]})
    log(callback, args)
    printed = capsys.readouterr().out
    assert [word for word in ("ape", "bee", "cat", "dog") if word in printed] == expected


def test_no_completions_are_printed_for_zero(args, capsys):
    callback = CompletionsCallback(max_rows=4, num_completions_to_print=0)
    callback.record("train", **ROLLOUT)
    log(callback, args)
    assert capsys.readouterr().out == ""


def test_printed_table_shows_rewards_and_takes_text_literally(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    table = pd.DataFrame(
        {"step": [3], "prompt": ["[/b] p"], "completion": ["[red]c"], "exact": [0.125], "advantage": [-1.0]}
    )
    print_completions(table)
    printed = capsys.readouterr().out
    for text in ("step 3", "[/b] p", "[red]c", "exact", "0.12", "advantage", "-1.00"):
        assert text in printed
    assert printed.count("step") == 1


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
@pytest.mark.parametrize(("unique", "expected"), [(False, [" 2", " [red]3[/red]", " 4", " 5"]), (True, [" 2", " 4"])])
def test_table_is_sent_to_trackers_in_report_to(args, monkeypatch, tracker, unique, expected):
    sent = []
    module = types.ModuleType(tracker)
    module.run = object()
    module.Table = lambda dataframe: dataframe
    module.log = sent.append
    monkeypatch.setitem(sys.modules, tracker, module)
    callback = CompletionsCallback(max_rows=4, num_completions_to_print=0, log_unique_prompts=unique)

    callback.record("train", **ROLLOUT)
    log(callback, args)
    assert sent == []

    args.report_to = ["tensorboard", tracker]
    callback.record("train", **ROLLOUT)
    log(callback, args)
    assert [message["completions"]["completion"].tolist() for message in sent] == [expected]


def test_disabled_wandb_gets_nothing(args, monkeypatch):
    module = types.ModuleType("wandb")
    module.run = None
    monkeypatch.setitem(sys.modules, "wandb", module)
    args.report_to = ["wandb"]
    callback = CompletionsCallback(max_rows=4, num_completions_to_print=0)
    callback.record("train", **ROLLOUT)
    log(callback, args)


@pytest.fixture
def bar(monkeypatch, args) -> tuple[RewardProgressCallback, io.StringIO]:
    """A callback with its bar drawn into a string."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    callback = RewardProgressCallback()
    callback.on_train_begin(args, TrainerState(max_steps=10), TrainerControl())
    yield callback, stream
    callback.training_bar.close()


def test_bar_shows_rewards_and_prints_no_line(bar, args, capsys):
    callback, stream = bar
    log(callback, args, {"reward": 0.51234, "reward_std": 0.25, "completions/mean_length": 12.5, "kl": 3.0})
    assert "reward=0.512, reward_std=0.25, length=12.5" in stream.getvalue()
    log(callback, args, {"reward": 0.75})
    assert stream.getvalue().rstrip().endswith("reward=0.75]")
    assert capsys.readouterr().out == ""


def test_logs_without_reward_are_printed(bar, args, capsys):
    callback, _ = bar
    log(callback, args, {"train_runtime": 3.5})
    assert "train_runtime" in capsys.readouterr().out


def test_bar_is_left_alone_before_training(args):
    log(RewardProgressCallback(), args, {"reward": 0.5})


@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_bar_replaces_the_one_of_the_trainer(tmp_path, disable_tqdm):
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=disable_tqdm)
    trainer = Trainer(model=torch.nn.Linear(1, 1), args=args)
    show_rewards_on_progress_bar(trainer)
    bars = [type(cb) for cb in trainer.callback_handler.callbacks if isinstance(cb, ProgressCallback)]
    assert bars == ([] if disable_tqdm else [RewardProgressCallback])
