from __future__ import annotations

import os
import subprocess
import sys

import pytest
from datasets import Dataset
from peft import PeftConfig

import trl
from trl import ModelConfig, cli
from trl.scripts import grpo, launch

from .testing_utils import make_model


@pytest.fixture(autouse=True)
def no_accelerate_config(monkeypatch):
    """The tests do not depend on whether `accelerate config` was run on this machine."""
    monkeypatch.setattr(launch, "default_config_file", "")


@pytest.fixture
def config(tmp_path):
    """Write a YAML file and return its path."""

    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def trl_command(*args: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "trl.cli", *args], capture_output=True, text=True, **kwargs)


def test_version_and_help():
    assert trl_command("--version").stdout == f"trl {trl.__version__}\n"
    result = trl_command("--help")
    assert result.returncode == 0
    assert "grpo" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("args", [[], ["grop"], ["env"]])
def test_unknown_commands(args, capsys):
    with pytest.raises(SystemExit) as info:
        cli.main(args)
    assert info.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_help_of_a_command(capsys):
    with pytest.raises(SystemExit) as info:
        cli.main(["grpo", "--help"])
    assert info.value.code == 0
    said = capsys.readouterr().out
    for option in ("--reward_funcs", "--lora_r", "--num_generations", "--vllm_enable_lora", "--config"):
        assert option in said


def test_one_process_is_plain_python(config):
    path = config("{lora_r: 8, env: {omp_wait_policy: passive, SIZE: 1}}")
    arguments, variables = cli.plan("grpo", ["--config", path, "--use_peft", "--learning_rate", "1e-5"])
    assert arguments[1:] == [
        "-m",
        "trl.scripts.grpo",
        f"--config={path}",
        "--use_peft",
        "--learning_rate",
        "1e-5",
    ]
    assert variables == {"OMP_WAIT_POLICY": "passive", "SIZE": "1"}


def test_launcher_options_start_accelerate(config):
    path = config("{num_processes: 2, use_fsdp: true, fsdp_version: 2, fsdp_offload_params: true, multi_gpu: false}")
    arguments, _ = cli.plan("grpo", ["--num_processes", "4", "--config", path, "--gradient_accumulation_steps", "2"])
    module = arguments.index("--module")
    assert arguments[1:3] == ["-m", "accelerate.commands.launch"]
    assert sorted(arguments[3:module]) == [
        "--dynamo_backend=no",
        "--fsdp_offload_params=True",
        "--fsdp_version=2",
        "--mixed_precision=no",
        "--num_machines=1",
        "--num_processes=4",
        "--use_fsdp",
    ]
    # An option of both is the script's.
    assert arguments[module:] == [
        "--module",
        "trl.scripts.grpo",
        f"--config={path}",
        "--gradient_accumulation_steps",
        "2",
    ]


def test_several_devices_start_as_many_processes():
    arguments = launch.launch_command("trl.scripts.grpo", ["--lora_r", "8"], {}, num_devices=4)
    assert "--num_processes=4" in arguments
    assert arguments[-4:] == ["--module", "trl.scripts.grpo", "--lora_r", "8"]


def test_an_accelerate_config_decides_alone(config):
    path = config("{}")
    arguments, _ = cli.plan("grpo", ["--accelerate_config", path])
    assert arguments[3:] == [f"--config_file={path}", "--module", "trl.scripts.grpo"]


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (
            "lora_rank: 8",
            [],
            "Unknown key 'lora_rank' in the config file. Did you mean 'local_rank' or 'max_lora_rank' or 'lora_r'?",
        ),
        ("", ["--num_generation", "8"], "Unknown argument '--num_generation'. Did you mean 'num_generations'"),
        ("num_proceses: 2", [], "Did you mean 'num_processes'"),
        ("", ["--lora_r", "many"], "invalid int value: 'many'"),
        ("", ["--accelerate_config", "zero2"], "accelerate_config='zero2' is not a file"),
        ("[]", [], None),
        ("- 1", [], "Write one option a line"),
    ],
)
def test_bad_options_end_before_anything_is_started(config, monkeypatch, capsys, text, flags, message):
    started = []
    monkeypatch.setattr(os, "execvpe", lambda *args: started.append(args))
    args = ["grpo", "--config", config(text), *flags]
    if message is None:
        cli.main(args)
        assert len(started) == 1
        return
    with pytest.raises(SystemExit) as info:
        cli.main(args)
    assert info.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("trl grpo: error: ")
    assert message in said
    assert started == []


def test_environment_is_that_of_the_new_process_alone(config, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execvpe", lambda *args: started.append(args))
    before = dict(os.environ)
    cli.main(["grpo", "--config", config("env: {TRL_TEST: 1}")])
    assert started[0][2] == before | {"TRL_TEST": "1"}
    assert os.environ == before


def test_reward_functions_by_path():
    from math import fsum

    assert grpo.load_function("math.fsum") is fsum
    assert grpo.load_function("math:fsum") is fsum
    script_args = grpo.GRPOScriptArguments(reward_funcs=["math:fsum"], reward_model_name_or_path="judge")
    assert grpo.load_rewards(script_args) == ["judge", fsum]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("fsum", ValueError, "reward_funcs='fsum' is not an import path"),
        ("math:fsumm", ValueError, "module 'math' has no function 'fsumm'"),
        ("math:pi", ValueError, "has no function 'pi'"),
        ("no_such_module:fsum", ModuleNotFoundError, "no_such_module"),
    ],
)
def test_bad_reward_paths(path, error, message):
    with pytest.raises(error, match=message):
        grpo.load_function(path)


def test_no_reward():
    with pytest.raises(ValueError, match="give reward_funcs, reward_model_name_or_path"):
        grpo.load_rewards(grpo.GRPOScriptArguments())


def test_missing_split():
    with pytest.raises(
        ValueError, match="dataset_test_split='test' is not a split of the dataset, which has train, val"
    ):
        grpo.pick_split({"train": 1, "val": 2}, "dataset_test_split", "test")


@pytest.mark.parametrize(
    ("given", "expected"), [(None, None), ("true", True), ("True", True), ("false", None), ("runs/a", "runs/a")]
)
def test_resume_point(given, expected):
    assert grpo.resume_point(given) == expected


@pytest.mark.parametrize(
    ("options", "parts", "absent"),
    [
        ({"use_peft": True, "lora_r": 3}, ["AutoPeftModel", "vllm serve base", "--max-lora-rank 8", "=out"], []),
        ({"use_peft": True, "use_dora": True}, ["AutoPeftModelForCausalLM"], ["vllm"]),
        ({"use_peft": True, "lora_r": 600}, ["AutoPeftModelForCausalLM"], ["vllm"]),
        ({}, ["AutoModelForCausalLM"], ["vllm"]),
    ],
)
def test_last_line(options, parts, absent):
    line = grpo.usage_line("out", ModelConfig(model_name_or_path="base", **options))
    assert all(part in line for part in parts)
    assert not any(part in line for part in absent)


REWARDS = """
import os


def length(completion_ids, trainer_state, **kwargs):
    with open("steps.txt", "a") as file:
        print(trainer_state.global_step, os.environ["TRL_TEST"], file=file)
    return [float(len(ids)) for ids in completion_ids]
"""


@pytest.fixture
def workplace(tmp_path, tokenizer):
    """A folder with a model, a dataset, a reward function and the options of a run of two steps."""
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    Dataset.from_dict({"prompt": ["one", "two", "three", "four"]}).to_json(tmp_path / "rows.jsonl")
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "config.yaml").write_text(
        """
        model_name_or_path: model
        dataset_name: rows.jsonl
        reward_funcs: my_rewards:length
        output_dir: out
        use_peft: true
        lora_r: 4
        lora_target_modules: all-linear
        per_device_train_batch_size: 4
        num_generations: 2
        max_completion_length: 4
        max_steps: 5
        save_steps: 2
        use_cpu: true
        report_to: none
        env:
          TRL_TEST: 7
        """
    )
    return tmp_path


def test_training_from_a_file_and_resuming(workplace):
    folders = {"cwd": workplace, "env": {**os.environ, "PYTHONPATH": os.getcwd(), "HF_HOME": str(workplace / "home")}}
    first = trl_command("grpo", "--config", "config.yaml", "--max_steps", "2", **folders)
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1].startswith("Saved the adapter: ")
    assert PeftConfig.from_pretrained(workplace / "out").r == 4
    assert (workplace / "steps.txt").read_text() == "0 7\n1 7\n"

    second = trl_command(
        "grpo", "--config", "config.yaml", "--max_steps", "3", "--resume_from_checkpoint", "true", **folders
    )
    assert second.returncode == 0, second.stderr
    assert (workplace / "steps.txt").read_text() == "0 7\n1 7\n2 7\n"
