"""The demo: its model and data set, its reward, its YAML file and its plot."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import yaml
from examples import ask, plot_reward
from examples.plot_reward import compare_quarters, read_rewards
from examples.prepare_smollm2 import GGUF_FILE, gguf_folder, make_dataset, save_model
from examples.rewards import correct_answer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl.scripts.grpo import load_rewards, make_parser


YAML_FILE = Path(__file__).parent.parent / "examples" / "grpo_smollm2_cpu.yaml"


# The model and the data set


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    save_model(folder)
    return folder


def test_saved_model_holds_the_weights_of_the_gguf_file(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert not hasattr(model.config, "quantization_config")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_folder() / GGUF_FILE).tensors}
    for name, module in {
        "token_embd": model.lm_head,
        "blk.0.attn_v": model.model.layers[0].self_attn.v_proj,
        "blk.29.ffn_down": model.model.layers[29].mlp.down_proj,
        "output_norm": model.model.norm,
    }.items():
        tensor = packed[f"{name}.weight"]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(module.weight.detach().numpy(), expected, err_msg=name)


def test_saved_model_answers(model_folder):
    """Queries and keys are stored permuted in GGUF: a model put together wrongly does not speak."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    assert ask.answer(model, tokenizer, "8 - 3").startswith("The final answer")


def test_saved_tokenizer_writes_chatml_and_single_digits(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "12 + 7"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n12 + 7<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
    assert tokens[0] == "<|im_start|>"
    assert tokens.count("<|im_start|>") == 3
    assert {"1", "2", "7"} <= set(tokens)
    assert tokenizer.eos_token == "<|im_end|>"


def test_dataset_has_prompts_with_their_right_answers():
    dataset = make_dataset(num_prompts=64, seed=3)
    assert dataset.column_names == ["prompt", "answer"]
    for prompt, answer in zip(dataset["prompt"], dataset["answer"], strict=True):
        assert [message["role"] for message in prompt] == ["system", "user"]
        first, sign, second = prompt[1]["content"].removesuffix(" =").split(": ")[1].split()
        assert int(answer) == int(first) + (int(second) if sign == "+" else -int(second))


def test_dataset_is_that_of_its_seed():
    assert make_dataset(16, seed=3)["prompt"] == make_dataset(16, seed=3)["prompt"]
    assert make_dataset(16, seed=3)["prompt"] != make_dataset(16, seed=4)["prompt"]


# The reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("4", "4", 1.0),
        ("3 + 1 = 4.", "4", 1.0),
        ("The final answer is 4", "4", 1.0),
        ("4 - 7 = -3", "-3", 1.0),
        ("4.0", "4", 1.0),
        ("4 - 7 = 3", "-3", 0.0),
        ("4 or 5", "4", 0.0),
        ("3 + 1 = 4\n\nThe sum", "4", 0.0),
        ("14", "4", 0.0),
        ("3.4", "4", 0.0),
        ("four", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_reward_is_one_where_the_right_number_ends_the_completion(text, answer, reward):
    assert correct_answer([[{"role": "assistant", "content": text}]], [answer]) == [reward]


def test_each_completion_has_the_reward_of_its_own_answer():
    completions = [[{"role": "assistant", "content": text}] for text in ("1", "2", "3")]
    assert correct_answer(completions, ["1", "3", "3"]) == [1.0, 0.0, 1.0]


# The YAML file


def test_yaml_is_a_valid_run_of_trl_grpo(tmp_path):
    parser = make_parser()
    with parser.environment:
        script_args, training_args, model_args = parser.parse_args_and_config(
            ["--config", str(YAML_FILE), "--output_dir", str(tmp_path)]
        )
    assert [function.__name__ for function in load_rewards(script_args)] == ["correct_answer"]
    assert training_args.use_vllm
    assert training_args.vllm_enable_lora
    assert training_args.logging_steps == 1
    assert model_args.use_peft
    assert model_args.lora_target_modules in ("all-linear", ["all-linear"])


def test_yaml_reads_what_the_preparation_writes_by_default():
    options = yaml.safe_load(YAML_FILE.read_text())
    assert options["model_name_or_path"] == "runs/smollm2/model"
    assert options["dataset_name"] == "runs/smollm2/dataset"


# The plot


def write_state(folder: Path, rewards: list[float]) -> None:
    folder.mkdir(parents=True)
    history = [{"step": step, "reward": reward} for step, reward in enumerate(rewards, start=1)]
    history.append({"step": len(rewards), "train_loss": 0.0})
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def test_rewards_come_from_the_newest_state(tmp_path):
    write_state(tmp_path / "checkpoint-8", [0.0] * 8)
    write_state(tmp_path / "checkpoint-16", [0.5] * 16)
    assert read_rewards(tmp_path) == (list(range(1, 17)), [0.5] * 16)


def test_missing_or_short_history_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"trainer_state\.json"):
        read_rewards(tmp_path)
    write_state(tmp_path / "checkpoint-2", [0.1, 0.2])
    with pytest.raises(ValueError, match="2 rewards, 8 are needed"):
        read_rewards(tmp_path)


def test_quarters_are_compared_with_their_standard_errors():
    rewards = [0.1, 0.3, 0.2, *[9.0] * 7, 0.5, 0.9, 0.7]  # 13 steps: a quarter is 3
    first, last = np.array(rewards[:3]), np.array(rewards[-3:])
    errors = [quarter.std(ddof=1) / np.sqrt(3) for quarter in (first, last)]
    line = compare_quarters(rewards)
    assert f"{first.mean():.3f} ± {errors[0]:.3f} in the first 3 steps" in line
    assert f"{last.mean():.3f} ± {errors[1]:.3f} in the last 3" in line
    assert line.endswith(f"{last.mean() - first.mean():+.3f} ± {np.hypot(*errors):.3f}")


def test_report_draws_a_picture_and_ends_with_the_use_of_the_adapter(tmp_path, monkeypatch, capsys):
    write_state(tmp_path / "run", [0.1, 0.2] * 4)
    monkeypatch.setattr("sys.argv", ["plot_reward", str(tmp_path / "run")])
    plot_reward.main()
    assert (tmp_path / "run" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[-1].endswith(f'-m examples.ask {tmp_path / "run"} "8 - 3"')
