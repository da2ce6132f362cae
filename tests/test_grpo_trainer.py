from __future__ import annotations

import gc
import logging
import math
import os
import warnings
import weakref
from dataclasses import replace

import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import GenerationConfig, TrainingArguments

from tests.testing_utils import make_model, make_tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import PolicyUpdate, SamplingConfig
from trl.generation.transformers_engine import TransformersEngine
from trl.trainer import memory
from trl.trainer.grpo_loss import LossConfig
from trl.trainer.model_loading import inputs_not_cast
from trl.trainer.rollouts import MicroBatch
from trl.trainer.token_logprobs import TokenScorer
from trl.trainer.utils import MetricBuffer, RepeatSampler, pad


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

METRICS = [
    "loss",
    "grad_norm",
    "num_tokens",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "rewards/low_tokens/mean",
    "rewards/low_tokens/std",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    "entropy",
    "step_time",
]


def low_tokens(completion_ids, **kwargs):
    """Share of tokens from the lower half of the vocabulary, end of text left out."""
    return [sum(4 <= token < 132 for token in ids) / len(ids) for ids in completion_ids]


def lora(**arguments):
    return LoraConfig(**({"r": 4, "lora_alpha": 16, "target_modules": TARGETS} | arguments))


def prompts(count=8):
    return Dataset.from_dict({"prompt": [f"Count to {'1' * (1 + index % 5)}{index}" for index in range(count)]})


@pytest.fixture
def start(tmp_path, tokenizer):
    """Returns `start(**options) -> GRPOTrainer` for a tiny model; options of the trainer or of its configuration."""

    def start(
        model=None,
        reward_funcs=low_tokens,
        train_dataset=None,
        eval_dataset=None,
        processing_class=tokenizer,
        peft_config="lora",
        callbacks=None,
        optimizers=(None, None),
        **options,
    ):
        defaults = {
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 6,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "max_steps": 2,
            "save_strategy": "no",
        }
        return GRPOTrainer(
            model=model or make_model(),
            reward_funcs=reward_funcs,
            args=GRPOConfig(**(defaults | options)),
            train_dataset=prompts() if train_dataset is None else train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            peft_config=lora() if peft_config == "lora" else peft_config,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    return start


def trained(trainer):
    """Copies of the trained parameters."""
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_equal(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_moves_the_adapter_and_nothing_else(start, tmp_path, tokenizer):
    environment = dict(os.environ)
    trainer = start()
    base = {name: each.clone() for name, each in trainer.model.named_parameters() if not each.requires_grad}
    before = trained(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of PEFT 0.18 and before, for a model that has no name.
        warnings.filterwarnings("ignore", "Could not find a config file")
        trainer.train()
        trainer.save_model(str(tmp_path / "adapter"))

    after = trained(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before if "lora_B" in name)
    assert_equal(base, {name: each for name, each in trainer.model.named_parameters() if not each.requires_grad})
    assert dict(os.environ) == environment
    entry = trainer.state.log_history[0]
    assert [name for name in METRICS if not math.isfinite(entry.get(name, math.nan))] == []

    assert "model.safetensors" not in os.listdir(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(make_model(), tmp_path / "adapter")
    inputs = tokenizer("Count to 3", return_tensors="pt")
    torch.testing.assert_close(loaded(**inputs).logits, trainer.model.eval()(**inputs).logits)


def test_reward_rises(start):
    trainer = start(
        max_steps=15,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        num_generations=8,
        train_dataset=prompts(64),
    )
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_same_seed_gives_the_same_run(start):
    first = start()
    first.train()
    torch.rand(7)  # whatever else draws random numbers
    second = start()
    torch.rand(7)
    second.train()
    assert_equal(trained(first), trained(second))
    assert logged(first, "reward") == logged(second, "reward")


def test_without_adapter_the_whole_model_is_trained(start):
    trainer = start(peft_config=None, learning_rate=1e-3)
    before = trained(trainer)
    trainer.train()
    after = trained(trainer)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_bf16_computes_in_bf16(start):
    environment = dict(os.environ)
    trainer = start(bf16=True)
    trainer.train()
    assert trainer.accelerator.mixed_precision == "bf16"
    assert {each.dtype for each in trainer.model.parameters()} == {torch.float32}
    assert dict(os.environ) == environment
    assert start().accelerator.mixed_precision == "no"


@pytest.mark.parametrize("checkpointing", [True, False])
def test_inputs_are_not_copied_for_each_adapter(start, monkeypatch, checkpointing):
    options = {"model": make_model().bfloat16(), "bf16": True, "gradient_checkpointing": checkpointing}
    lean = start(**options)
    lean.train()
    assert all(layer.cast_input_dtype_enabled for layer in lean._layers_under_autocast)

    options["model"] = make_model().bfloat16()
    usual = start(**options)
    usual._layers_under_autocast = []
    usual.train()
    assert_equal(trained(lean), trained(usual))

    def kept(trainer):
        with trainer.accelerator.autocast(), inputs_not_cast(trainer._layers_under_autocast):
            batch = MicroBatch.of_zeros(2, 32, torch.device("cpu"))
            return memory.saved_bytes(trainer.model, lambda: trainer._scorer(trainer.model, batch))

    if not checkpointing:
        assert kept(lean) < 0.9 * kept(usual)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(start, use_reentrant):
    plain = start(gradient_checkpointing=False)
    checkpointed = start(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    plain.train()
    checkpointed.train()
    assert checkpointed.model.is_gradient_checkpointing
    assert_equal(trained(plain), trained(checkpointed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "free", "settled", "recomputed"),
    [
        (None, None, True, 2),
        (None, 2**40, False, 0),
        (None, 2**10, True, 2),
        (None, "enough for half", True, 1),
        (True, 2**40, True, 2),
        (False, 2**10, False, 0),
    ],
)
def test_trainer_settles_checkpointing(start, monkeypatch, caplog, given, free, settled, recomputed):
    caplog.set_level(logging.INFO, "trl")
    if free == "enough for half":
        measured = []
        total = memory.ActivationEstimate.total
        monkeypatch.setattr(
            memory.ActivationEstimate, "total", lambda *args: measured.append(total(*args)) or measured[-1]
        )
        monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
        start()
        free = 0.75 * measured[-1] / 0.8
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    caplog.clear()
    trainer = start(gradient_checkpointing=given)
    assert trainer.args.gradient_checkpointing is settled
    assert ("Gradient checkpointing: " in caplog.text) == (given is None and free is not None)
    trainer.train()
    flags = [layer.gradient_checkpointing for layer in memory.checkpointing_layers(trainer.model)]
    assert flags == [True] * recomputed + [False] * (2 - recomputed)


def test_measuring_activations_changes_nothing(start, monkeypatch):
    results = []
    for free in (None, 2**10):  # the first is not measured
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        trainer = start(peft_config=lora(lora_dropout=0.5))
        trainer.train()
        results.append(trained(trainer))
    assert_equal(*results)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_micro_batches_add_up_to_the_whole_batch(start, loss_type):
    # `grpo` is a mean over sequences and `dapo` one over tokens: both must survive being cut in two. Plain gradient
    # descent, for Adam would hide a wrong scale.
    options = {"loss_type": loss_type, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1}
    whole = start(**options)
    halves = start(per_device_train_batch_size=4, gradient_accumulation_steps=2, **options)
    before = trained(whole)
    whole.train()
    halves.train()
    assert_equal(trained(whole), trained(halves), rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(before[name], each) for name, each in trained(whole).items())


def test_dapo_is_the_mean_over_the_tokens_of_an_update(start):
    # One rollout feeds two updates here, so a rollout's tokens are not an update's.
    trainer = start(per_device_train_batch_size=4, gradient_accumulation_steps=1, steps_per_generation=2)
    trainer.model.train()
    trainer._start_training(trainer.get_train_dataloader())
    trainer._start_epoch()
    rows = [trainer.train_dataset[index] for index in (0, 0, 0, 0, 1, 1, 1, 1)]
    batches = [trainer._prepare_inputs(rows) for _ in range(2)]
    tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
    assert [batch.normalizer for batch in batches] == [tokens / 2] * 2


# -- rollouts and the old policy --------------------------------------------------------------------------------------


def first_batch(trainer):
    trainer.model.train()
    dataloader = trainer.get_train_dataloader()
    trainer._start_training(dataloader)
    trainer._start_epoch()
    return trainer._prepare_inputs(next(iter(dataloader)))


def loss_and_gradients(trainer, batch):
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in trainer.model.named_parameters() if each.requires_grad}


def test_one_pass_equals_two_passes(start):
    trainer = start()
    batch = first_batch(trainer)
    assert batch.old_logprobs is None
    noise = torch.randn(batch.completion_ids.shape, generator=torch.Generator().manual_seed(0))
    current = trainer._scorer(trainer.model, batch)[0].detach()
    batch.sampling_logprobs = current + 0.3 * noise  # an engine with rounding of its own

    loss, gradients = loss_and_gradients(trainer, batch)
    with torch.no_grad():
        batch.old_logprobs = trainer._logprobs(batch)
    loss_of_two, gradients_of_two = loss_and_gradients(trainer, batch)
    torch.testing.assert_close(loss, loss_of_two, rtol=0, atol=1e-6)
    assert_equal(gradients, gradients_of_two, rtol=0, atol=1e-6)
    assert max(each.abs().max() for each in gradients.values()) > 1e-3


@pytest.mark.parametrize(
    ("options", "computed"),
    [
        ({}, False),
        ({"gradient_accumulation_steps": 2}, False),
        ({"gradient_accumulation_steps": 2, "num_iterations": 2, "steps_per_generation": 1}, False),
        ({"num_iterations": 2}, True),
        ({"steps_per_generation": 2}, True),
    ],
)
def test_old_logprobs_are_computed_only_where_an_update_comes_between(start, options, computed):
    batch = first_batch(start(**options))
    assert (batch.old_logprobs is not None) == computed


def test_each_rollout_is_used_num_iterations_times(start):
    asked = []

    def reward(prompts, completions, **kwargs):
        asked.append(prompts[::4])
        return [float(len(completion)) for completion in completions]

    trainer = start(
        reward_funcs=reward,
        num_iterations=2,
        steps_per_generation=2,
        per_device_train_batch_size=4,
        max_steps=8,
        learning_rate=5e-2,
        shuffle_dataset=False,
    )
    trainer.train()
    assert asked == [prompts()["prompt"][:2], prompts()["prompt"][2:4]]
    assert max(logged(trainer, "clip_ratio/region_mean")) > 0  # the policy has left the one that sampled


def test_old_logprobs_are_those_of_the_distribution_that_was_sampled_from(start):
    # Dropout must not blur them, and the temperature belongs to them.
    trainer = start(num_iterations=2, temperature=0.5, peft_config=lora(lora_dropout=0.5))
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batch = first_batch(trainer)
    assert trainer.model.training
    trainer.model.eval()
    width, length = batch.prompt_ids.shape[1], batch.completion_ids.shape[1]
    logits = trainer.model(
        input_ids=torch.cat([batch.prompt_ids, batch.completion_ids], dim=1),
        attention_mask=torch.cat([batch.prompt_mask, batch.completion_mask], dim=1),
    ).logits[:, width - 1 : width + length - 1]
    expected = (logits / 0.5).log_softmax(dim=-1).gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    counted = batch.completion_mask.bool()
    torch.testing.assert_close(batch.old_logprobs[counted], expected[counted], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", False])
def test_advantages(start, scale_rewards):
    seen = []
    trainer = start(
        reward_funcs=lambda **kwargs: seen.extend(low_tokens(**kwargs)) or seen, scale_rewards=scale_rewards
    )
    batch = first_batch(trainer)
    groups = torch.tensor(seen).view(2, 4)
    expected = groups - groups.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        expected = expected / (groups.std(dim=1, keepdim=True) + 1e-4)
    elif scale_rewards == "batch":
        expected = expected / (groups.std() + 1e-4)
    torch.testing.assert_close(batch.advantages, expected.flatten())


def test_order_of_prompts_changes_with_the_epoch_and_survives_a_resume(start, tmp_path):
    seen = []

    def reward(prompts, **kwargs):
        seen.append(tuple(prompts[::4]))
        return [0.0] * len(prompts)

    options = {"reward_funcs": reward, "max_steps": 8, "save_strategy": "steps", "save_steps": 6}
    start(**options).train()
    first, second = seen[:4], seen[4:]
    assert sorted(sum(first, ())) == sorted(sum(second, ())) == sorted(prompts()["prompt"])
    assert first != second
    seen.clear()
    start(**options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert seen == second[2:]


def test_options_reach_engine_and_loss(start):
    options = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "max_completion_length": 4,
        "generation_kwargs": {"no_repeat_ngram_size": 2},
        "epsilon": 0.1,
        "epsilon_high": 0.3,
        "beta": 0.5,
        "loss_type": "bnpo",
        "use_bias_correction_kl": False,
        "vllm_importance_sampling_correction": False,
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.5,
        "vllm_importance_sampling_clip_max": 2.0,
    }
    trainer = start(**options)
    assert trainer.sampling == SamplingConfig(4, 0.7, 0.9, 5, 0.1, 1.2, (3,), {"no_repeat_ngram_size": 2})
    assert trainer.loss_config == LossConfig(4, "bnpo", 0.1, 0.3, 0.5, False, False, "token_mask", 2.0, 0.5)


def test_all_ends_of_text_stop_a_completion(start):
    model = make_model()
    model.generation_config.eos_token_id = [7, 9]
    assert start(model=model).sampling.stop_token_ids == (7, 9, 3)


def test_dropout_can_be_switched_off(start):
    trainer = start(disable_dropout=True, peft_config=lora(lora_dropout=0.5))
    assert {each.p for each in trainer.model.modules() if isinstance(each, torch.nn.Dropout)} == {0.0}


def test_truncated_completions_are_masked(start):
    masked = first_batch(start(mask_truncated_completions=True, max_completion_length=40))
    ended = (masked.completion_ids == 3).any(dim=1)
    assert 0 < ended.sum() < len(ended)  # some of each, or the test shows nothing
    assert torch.equal(masked.loss_mask.sum(dim=1) > 0, ended)
    assert masked.normalizer == masked.loss_mask.sum()


# -- reference --------------------------------------------------------------------------------------------------------


def test_reference_is_the_model_without_its_adapter(start):
    trainer = start(beta=0.1, max_steps=3)
    trainer.train()
    assert trainer.ref_model is None
    batch = first_batch(trainer)
    base = make_model()
    expected = TokenScorer(base, fused=False)(base, batch)[0]
    torch.testing.assert_close(batch.ref_logprobs, expected)
    kl = logged(trainer, "kl")
    assert abs(kl[0]) < 1e-6 < kl[-1]


def test_reference_of_a_whole_model_is_a_copy_that_stays(start):
    trainer = start(beta=0.1, peft_config=None, max_steps=3, learning_rate=1e-3)
    trainer.train()
    assert_equal(trainer.ref_model.state_dict(), make_model().state_dict())
    kl = logged(trainer, "kl")
    assert abs(kl[0]) < 1e-6 < kl[-1]


@pytest.mark.parametrize(("adapter", "word"), [({"init_lora_weights": "pissa"}, "pissa"), ({"bias": "all"}, "bias")])
def test_reference_needs_an_untouched_base(start, adapter, word):
    with pytest.raises(ValueError, match=f"beta=0.1 with .*{word}"):
        start(beta=0.1, peft_config=lora(**adapter))


# -- prompts and rewards ----------------------------------------------------------------------------------------------


def test_conversational_prompts(start, tokenizer):
    seen = {}

    def reward(prompts, completions, **kwargs):
        seen.update(prompt=prompts[0], completion=completions[0])
        return [0.0] * len(completions)

    conversation = [{"role": "user", "content": "Hi"}]
    trainer = start(reward_funcs=reward, train_dataset=Dataset.from_dict({"prompt": [conversation] * 4}), max_steps=1)
    batch = first_batch(trainer)
    assert seen["prompt"] == conversation
    assert [message["role"] for message in seen["completion"]] == ["assistant"]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(batch.prompt_ids[0]) == expected


def test_variables_of_the_chat_template(start):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ mode }}:{{ messages[0]['content'] }}"
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Hi"}]] * 4})
    trainer = start(processing_class=tokenizer, train_dataset=dataset, chat_template_kwargs={"mode": "quiet"})
    assert tokenizer.decode(first_batch(trainer).prompt_ids[0]) == "quiet:Hi"


def test_prompt_that_begins_the_answer(start):
    seen = {}

    def reward(prompts, completions, **kwargs):
        seen.update(prompt=prompts[0], completion=completions[0])
        return [0.0] * len(completions)

    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello,"}]
    first_batch(start(reward_funcs=reward, train_dataset=Dataset.from_dict({"prompt": [conversation] * 4})))
    assert seen["prompt"] == conversation[:1]
    assert seen["completion"][0]["content"].startswith("Hello,")


def test_rewards_are_weighted_and_none_is_left_out(start, tmp_path):
    async def constant(completions, bonus, **kwargs):
        return [float(each) for each in bonus]

    def abstains(completions, log_extra, log_metric, trainer_state, **kwargs):
        log_metric("seen", float(trainer_state.global_step))
        log_extra("index", list(range(len(completions))))
        return [1.0 if index % 2 else None for index in range(len(completions))]

    dataset = prompts(4).add_column("bonus", [2.0] * 4)
    trainer = start(
        reward_funcs=[constant, abstains], reward_weights=[1.0, 10.0], train_dataset=dataset, log_completions=True
    )
    trainer.train()
    entry = trainer.state.log_history[1]
    assert (entry["rewards/constant/mean"], entry["rewards/abstains/mean"]) == (2.0, 1.0)
    assert entry["rewards/abstains/std"] == 0.0
    assert entry["reward"] == 2.0 + 10.0 / 2
    assert entry["seen"] == 1.0
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert table["index"].tolist() == list(range(8))
    assert table["abstains"].isna().tolist() == [True, False] * 4


def test_completions_are_kept(start, tmp_path):
    trainer = start(log_completions=True, num_completions_to_print=0, eval_dataset=prompts(2), eval_strategy="epoch")
    trainer.train()
    assert sorted(os.listdir(tmp_path / "completions")) == [
        "completions_00001.parquet",
        "completions_00002.parquet",
        "completions_00002_eval.parquet",
    ]
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert list(table.columns) == ["step", "prompt", "completion", "low_tokens", "advantage"]
    assert table["low_tokens"].mean() == pytest.approx(logged(trainer, "reward")[0])
    assert table.groupby("prompt")["advantage"].mean().abs().max() < 1e-6


def test_bad_reward_stops_the_run(start):
    with pytest.raises(ValueError, match="returned 1 rewards for 8 completions"):
        start(reward_funcs=lambda **kwargs: [0.0]).train()


# -- evaluation and checkpoints ---------------------------------------------------------------------------------------


def test_evaluation(start):
    trainer = start(eval_dataset=prompts(3), num_generations_eval=2, per_device_eval_batch_size=4)
    sizes = []
    evaluate = trainer.reward_evaluator.evaluate
    trainer.reward_evaluator.evaluate = lambda *args, **kwargs: sizes.append(len(args[0])) or evaluate(*args, **kwargs)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert sizes == [4, 2] * 2
    assert 0 < first["eval_reward"] < 1
    assert first["eval_reward"] == second["eval_reward"]  # the same policy, the same random numbers
    trainer.train()
    assert trainer.evaluate(metric_key_prefix="test")["test_reward"] != first["eval_reward"]
    assert len(logged(trainer, "eval_reward")) == 0  # a new run has a log of its own
    assert len(logged(trainer, "reward")) == 2


def test_best_model_by_reward(start):
    trainer = start(
        eval_dataset=prompts(2),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="reward",
        greater_is_better=False,
        learning_rate=2e-2,
    )
    trainer.train()
    rewards = logged(trainer, "eval_reward")
    best = 1 + rewards.index(min(rewards))
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert trainer.evaluate()["eval_reward"] == rewards[best - 1]


@pytest.mark.parametrize(
    ("options", "resumed_at"),
    [
        ({"max_steps": 5}, 3),  # an epoch has 4 steps
        ({"max_steps": 6}, 4),
        ({"max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, 1),
        ({"max_steps": 7, "num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4}, 5),
    ],
)
def test_resumed_run_ends_as_if_never_interrupted(start, tmp_path, options, resumed_at):
    options = {"save_strategy": "steps", "save_steps": 1, "max_completion_length": 4, **options}
    whole = start(**options)
    whole.train()
    resumed = start(**options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{resumed_at}"))
    assert_equal(trained(whole), trained(resumed))
    for name in [name for name in METRICS if name != "step_time"]:
        assert logged(whole, name) == logged(resumed, name)

    saved = load_file(tmp_path / f"checkpoint-{options['max_steps']}" / "adapter_model.safetensors")
    assert {name.replace(".weight", "") for name in saved} == {
        name.replace(".default.weight", "") for name in trained(whole)
    }


def test_policy_version_counts_every_change(start):
    trainer = start(max_steps=3)
    served = []
    engine = trainer.rollout_engine
    generate = engine.generate
    engine.generate = lambda *args: (
        served.append((engine.policy_version, trainer.weight_sync.version)) or generate(*args)
    )
    trainer.train()
    assert all(in_engine == in_trainer for in_engine, in_trainer in served)
    served = [version for version, _ in served]
    assert served == sorted(set(served))
    assert trainer.weight_sync.version > served[-1]


# -- construction and end ---------------------------------------------------------------------------------------------


def adapted_model():
    return get_peft_model(make_model(), lora())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"train_dataset": Dataset.from_dict({"prompt": []})}, ValueError, "train_dataset is empty"),
        ({"train_dataset": Dataset.from_dict({"question": ["a"]})}, ValueError, "'prompt', only 'question'"),
        ({"train_dataset": prompts(1)}, ValueError, "has 1 prompts, and one rollout needs 2"),
        ({"train_dataset": prompts(4).to_iterable_dataset()}, ValueError, "IterableDataset"),
        ({"eval_dataset": Dataset.from_dict({"question": ["a"]})}, ValueError, "eval_dataset has no column 'prompt'"),
        ({"model": 3}, TypeError, "model is a int"),
        ({"reward_weights": [1.0, 2.0]}, ValueError, "reward_weights has 2 elements for 1"),
        ({"model_init_kwargs": {"revision": "main"}}, ValueError, "model is loaded already"),
        ({"processing_class": None}, ValueError, "give processing_class"),
        ({"peft_config": {"r": 8}}, TypeError, "peft_config is a dict: give a PeftConfig"),
        ({"train_dataset": prompts(7).add_item({"prompt": 600 * "x"})}, ValueError, "Row 7 of train_.*600 tokens"),
    ],
)
def test_bad_arguments_are_refused(start, arguments, error, words):
    with pytest.raises(error, match=words):
        start(**arguments)


def test_options_have_to_be_of_grpo(tmp_path):
    with pytest.raises(TypeError, match="args is a TrainingArguments: give a GRPOConfig"):
        GRPOTrainer(make_model(), low_tokens, TrainingArguments(str(tmp_path)), prompts())


def test_peft_model_with_peft_config_is_refused(start):
    with pytest.raises(ValueError, match="PeftModel and peft_config"):
        start(model=adapted_model())


def test_frozen_adapter_is_refused(start):
    with pytest.raises(ValueError, match="is_trainable=True"):
        start(model=adapted_model().requires_grad_(False), peft_config=None)


def test_train_dataset_is_needed(tmp_path):
    with pytest.raises(ValueError, match="train_dataset is missing"):
        GRPOTrainer(make_model(), low_tokens, GRPOConfig(str(tmp_path), use_cpu=True))


def test_quantization_config_needs_a_model_to_load(tmp_path):
    with pytest.raises(ValueError, match="model is loaded already"):
        GRPOTrainer(
            make_model(),
            low_tokens,
            GRPOConfig(str(tmp_path), use_cpu=True),
            prompts(),
            quantization_config={"load_in_4bit": True},
        )


def test_output_goes_to_a_folder_of_the_models_name(tmp_path, monkeypatch):
    make_model().save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    trainer = GRPOTrainer("./tiny/", low_tokens, train_dataset=prompts(), processing_class=make_tokenizer())
    assert trainer.args.output_dir == "tiny-GRPO"


def test_batch_of_evaluation_holds_whole_groups(start):
    with pytest.raises(ValueError, match="per_device_eval_batch_size=6"):
        start(eval_dataset=prompts(2), per_device_eval_batch_size=6).evaluate()


def test_model_by_path(start, tmp_path):
    tokenizer = make_tokenizer()
    make_model().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    trainer = start(model=str(tmp_path / "model"), processing_class=None, output_dir=str(tmp_path / "out"))
    assert {each.dtype for each in trainer.model.parameters()} == {torch.float32}
    assert trainer.processing_class.get_vocab() == tokenizer.get_vocab()
    trainer.train()
    low = start(
        model=str(tmp_path / "model"),
        peft_config=None,
        model_init_kwargs={"dtype": "bfloat16"},
        output_dir=str(tmp_path / "low"),
    )
    assert {each.dtype for each in low.model.parameters()} == {torch.bfloat16}


def test_peft_model_is_trained_as_it_is(start):
    trainer = start(model=adapted_model(), peft_config=None)
    trainer.train()
    assert any(each.abs().sum() > 0 for name, each in trained(trainer).items() if "lora_B" in name)


def test_tokenizer_without_padding_gets_one(start):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    start(processing_class=tokenizer).train()
    assert tokenizer.pad_token == tokenizer.eos_token


def test_close_and_garbage_collection(start):
    trainer = start()
    trainer.train()
    engine, reference = trainer.rollout_engine, weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None
    assert engine.policy_version is None
    other = start()
    other.close()
    other.close()


# -- sampler, padding, metrics ----------------------------------------------------------------------------------------


def test_sampler_repeats_prompts_and_rollouts():
    sampler = RepeatSampler(range(5), mini_repeat_count=2, batch_size=2, repeat_count=3, shuffle=False)
    assert list(sampler) == [0, 0, 1, 1] * 3 + [2, 2, 3, 3] * 3  # 4 does not fill a rollout
    assert len(sampler) == len(list(sampler))


def test_sampler_shuffles_by_seed_and_epoch():
    def order(seed, epoch):
        sampler = RepeatSampler(range(50), mini_repeat_count=1, seed=seed)
        sampler.epoch = epoch
        return list(sampler)

    assert sorted(order(1, 0)) == list(range(50))
    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_pad():
    assert pad([[1, 2], [3]], 0).tolist() == [[1, 2], [3, 0]]
    assert pad([[1, 2], [3]], 0, side="left").tolist() == [[1, 2], [0, 3]]
    assert pad([[]], 9).tolist() == [[9]]


def test_metrics_are_reduced_as_their_names_say():
    metrics = MetricBuffer()
    metrics.add({"length": torch.tensor(1.0), "ratio_min": 1.0, "max": torch.tensor(1), "none": float("nan")})
    metrics.add({"length": 4.0, "ratio_min": 3.0, "max": torch.tensor(5)})
    assert metrics.pop() == {"length": 2.5, "ratio_min": 1.0, "max": 5.0}
    assert metrics.pop() == {}


# -- the engine without vLLM ------------------------------------------------------------------------------------------


GREEDY = SamplingConfig(max_tokens=5, temperature=0.0, stop_token_ids=(3,))


def start_engine(model):
    engine = TransformersEngine(model, pad_token_id=0)
    engine.push(PolicyUpdate(version=7))
    return engine


def test_engine_decodes_greedily(tokenizer):
    model = make_model()
    rows = [[5, 6, 7, 8, 9], [20]]
    rollout = start_engine(model).generate(rows, GREEDY)
    expected = []
    for row in rows:
        token_ids = list(row)
        while len(token_ids) < len(row) + 5 and token_ids[-1] != 3:
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
        expected.append(token_ids[len(row) :])
    assert rollout.completion_ids == expected
    assert (rollout.policy_version, rollout.logprobs) == (7, None)


def test_engine_stops_at_every_stop_token():
    model = make_model()
    free = start_engine(model).generate([[5, 6]], GREEDY).completion_ids[0]
    stopped = SamplingConfig(max_tokens=5, temperature=0.0, stop_token_ids=(3, free[2]))
    assert start_engine(model).generate([[5, 6], [9]], stopped).completion_ids[0] == free[: free.index(free[2]) + 1]


def test_engine_samples_what_it_is_asked_for_and_leaves_everything_as_it_was():
    sampling = SamplingConfig(max_tokens=5, stop_token_ids=(3,))
    rows = [[5, 6, 7], [8]] * 4
    plain = start_engine(make_model()).generate(rows, sampling, seed=1)

    model = make_model().train()
    model.model.layers[0].eval()
    own = GenerationConfig(do_sample=True, temperature=0.1, top_k=1, min_p=0.9, repetition_penalty=2.0, max_length=9)
    model.generation_config = own
    state = torch.get_rng_state()
    engine = start_engine(model)
    assert engine.generate(rows, sampling, seed=1).completion_ids == plain.completion_ids
    assert engine.generate(rows, sampling, seed=2).completion_ids != plain.completion_ids
    assert torch.equal(torch.get_rng_state(), state)
    assert model.generation_config is own
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training


@pytest.mark.parametrize("prompt", [[], [5] * 600])
def test_engine_refuses_prompts_that_do_not_fit(prompt):
    with pytest.raises(ValueError, match=f"Prompt 1 has {len(prompt)} tokens.*512"):
        start_engine(make_model()).generate([[5], prompt], GREEDY)


def test_engine_stops_at_strings(tokenizer):
    letters = tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"]
    only_letters = {"suppress_tokens": [token for token in range(260) if token not in letters]}
    engine = TransformersEngine(make_model(), 0, tokenizer)
    engine.push(PolicyUpdate(version=0))
    (whole,) = engine.generate([[5, 6, 7]], replace(GREEDY, extra=only_letters)).completion_ids
    stop = {"stop_strings": [tokenizer.decode(whole[2:3])]}
    (stopped,) = engine.generate([[5, 6, 7]], replace(GREEDY, extra=only_letters | stop)).completion_ids
    assert stopped == whole[: whole.index(whole[2]) + 1]


def test_closed_engine_says_so():
    engine = start_engine(make_model())
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([[5]], GREEDY)


@pytest.mark.parametrize("column", ["prompts", "completions", "trainer_state", "log_extra"])
def test_column_that_hides_an_argument_of_reward_functions(start, column):
    with pytest.raises(ValueError, match=f"train_dataset has the columns '{column}'"):
        start(train_dataset=prompts().add_column(column, ["x"] * 8))


@pytest.mark.parametrize("prompt", [None, 3, b"bytes", ["text"]], ids=repr)
def test_prompt_that_is_no_prompt(start, prompt):
    rows = [{"prompt": prompt}] * 8
    with pytest.raises(TypeError, match=f"of type {type(prompt).__name__}: a prompt is text or a list of messages"):
        start(train_dataset=rows).train()


def test_generation_kwargs_that_do_not_exist(start):
    with pytest.raises(ValueError, match=r"generation_kwargs has 'typical', .* Did you mean typical_p\?"):
        start(generation_kwargs={"typical": 0.9})
