"""GRPO with real vLLM: what is trained is what samples, whatever happens in between."""

import os
import re

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import TrainerCallback

from tests.testing_utils import make_model
from tests.vllm_utils import lora, make_policy
from trl import GRPOConfig, GRPOTrainer
from trl.generation import SamplingConfig, vllm_worker
from trl.weight_sync import base_tensors, check_logprobs


def low_tokens(completion_ids, **kwargs):
    """Share of tokens from the lower half of the vocabulary."""
    return [sum(4 <= token < 132 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture
def start(tmp_path, tokenizer):
    """Returns `start(**options) -> GRPOTrainer` with vLLM and a tiny model; closes the trainers afterwards."""
    trainers = []

    def start(model=None, peft_config=None, eval_dataset=None, callbacks=None, folder="run", **options):
        options = {
            "use_vllm": True,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "bf16": False,
            "vllm_max_model_length": 128,
            "gradient_checkpointing": False,
        } | options
        trainer = GRPOTrainer(
            model=make_model() if model is None else model,
            reward_funcs=low_tokens,
            args=GRPOConfig(str(tmp_path / folder), **options),
            train_dataset=Dataset.from_dict({"prompt": [f"Count to {'1' * (1 + index % 40)}" for index in range(8)]}),
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            peft_config=peft_config,
            callbacks=callbacks,
        )
        trainers.append(trainer)
        return trainer

    yield start
    for trainer in trainers:
        trainer.close()


def history(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def adapter(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}


class AfterEachStep(TrainerCallback):
    def __init__(self, function):
        self.function = function

    def on_step_end(self, args, state, control, **kwargs):
        self.function(state.global_step)


@pytest.mark.parametrize(
    ("peft_config", "strategy"),
    [
        (lora(), "dynamic"),
        (lora(r=3, use_rslora=True, rank_pattern={"q_proj": 12}, alpha_pattern={"v_proj": 5}), "dynamic"),
        (lora(init_lora_weights="pissa", target_modules=["q_proj", "down_proj"]), "dynamic"),
        (lora(modules_to_save=["lm_head"]), "dynamic"),
        (lora(trainable_token_indices=[40, 50]), "dynamic"),
        pytest.param(
            lora(use_dora=True),
            "full",
            marks=pytest.mark.filterwarnings("ignore:The adapter cannot be served"),
        ),
    ],
    ids=["plain", "patterns", "pissa", "modules_to_save", "trainable tokens", "dora"],
)
def test_training_samples_from_the_policy(start, peft_config, strategy, prompts, tmp_path):
    environment = dict(os.environ)
    trainer = start(model=make_policy(peft_config))
    assert trainer.sync_plan.strategy == strategy
    base = {name: tensor.clone() for name, tensor in base_tensors(trainer.model)}
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}

    trainer.train()

    # The trainer scores every sampled token as the engine did: no stale policy, no base model.
    assert max(history(trainer, "sampling/sampling_logp_difference/max")) < 1e-3
    assert history(trainer, "sync/bytes")[0] > 0
    moved = [name for name, p in trainer.model.named_parameters() if name in before and not p.equal(before[name])]
    assert moved
    trainer.weight_sync.push(trainer.rollout_engine)
    check_logprobs(trainer.rollout_engine, trainer.model, prompts)
    for name, tensor in base_tensors(trainer.model):
        assert torch.equal(tensor, base[name]), name
    assert dict(os.environ) == environment

    trainer.save_model(str(tmp_path / "saved"))
    restored = PeftModel.from_pretrained(make_model(), str(tmp_path / "saved"))
    token_ids = torch.tensor([prompts[2]])
    trainer.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(restored(token_ids).logits, trainer.model(token_ids).logits)


def test_way_of_serving_does_not_change_what_is_learned(start):
    greedy = SamplingConfig(max_tokens=8, temperature=0.0)
    prompts = [list(range(10, 50)), list(range(60, 75))]

    def run(strategy, **options):
        def measure(step):
            trainer.weight_sync.push(trainer.rollout_engine)
            rewards.extend(low_tokens(trainer.rollout_engine.generate(prompts, greedy).completion_ids))

        rewards = []
        trainer = start(peft_config=lora(), max_steps=5, callbacks=[AfterEachStep(measure)], **options)
        assert trainer.sync_plan.strategy == strategy
        trainer.train()
        return rewards + history(trainer, "reward")

    served = run("dynamic", vllm_enable_lora=True)
    assert len(served) == 15
    assert run("full", vllm_enable_lora=False) == pytest.approx(served, abs=1e-3)
    assert run("merged", vllm_lora_mode="merged") == pytest.approx(served, abs=1e-3)


def test_recreating_the_engine_changes_nothing(start):
    def run(recreate_every):
        builds = []
        trainer = start(peft_config=lora(), vllm_recreate_every=recreate_every, max_steps=6)
        build = trainer.rollout_engine._build
        trainer.rollout_engine._build = lambda: (builds.append(1), build())
        trainer.train()
        return len(builds), history(trainer, "reward"), history(trainer, "loss"), adapter(trainer)

    num_builds, rewards, losses, weights = run(recreate_every=1)
    num_builds_kept, rewards_kept, losses_kept, weights_kept = run(recreate_every=None)
    assert (num_builds, num_builds_kept) == (5, 0)
    assert (rewards, losses) == (rewards_kept, losses_kept)
    assert all(torch.equal(weights[name], weights_kept[name]) for name in weights)


def test_resumed_run_samples_from_the_checkpoint(start):
    whole = start(peft_config=lora(), max_steps=4, folder="whole")
    whole.train()
    first = start(peft_config=lora(), max_steps=4, folder="parts", save_strategy="steps", save_steps=2)
    first.train()
    checkpoint = os.path.join(first.args.output_dir, "checkpoint-2")
    resumed = start(peft_config=lora(), max_steps=4, folder="parts")
    resumed.train(resume_from_checkpoint=checkpoint)
    assert history(resumed, "reward")[-2:] == history(whole, "reward")[2:]
    assert max(history(resumed, "sampling/sampling_logp_difference/max")) < 1e-3
    assert all(torch.equal(weights, adapter(whole)[name]) for name, weights in adapter(resumed).items())


def test_best_model_and_second_train_are_pushed(start, prompts):
    trainer = start(
        peft_config=lora(),
        max_steps=4,
        eval_dataset=Dataset.from_dict({"prompt": ["Count to 10", "Say nothing"]}),
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=False,
    )
    trainer.train()
    evaluated = trainer.evaluate()
    assert evaluated["eval_sampling/sampling_logp_difference/max"] < 1e-3
    check_logprobs(trainer.rollout_engine, trainer.model, prompts)
    trainer.train()
    assert max(history(trainer, "sampling/sampling_logp_difference/max")) < 1e-3


def test_adapter_is_learned_with_vllm(start):
    trainer = start(
        peft_config=lora(),
        max_steps=15,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        num_generations=8,
    )
    trainer.train()
    rewards = history(trainer, "reward")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


def test_model_without_adapter(start, prompts):
    trainer = start(max_steps=2, learning_rate=1e-3)
    assert (trainer.sync_plan.strategy, trainer.sync_plan.reasons) == ("full", ("the model has no adapter",))
    trainer.train()
    assert max(history(trainer, "sampling/sampling_logp_difference/max")) < 1e-3


def test_every_reason_is_named_when_the_adapter_cannot_be_served(start):
    with pytest.raises(ValueError, match="vllm_enable_lora=True") as error:
        start(model=make_policy(lora(r=600, use_dora=True, target_modules=["q_proj"])), vllm_enable_lora=True)
    assert "rank 600" in str(error.value)
    assert "DoRA" in str(error.value)


def test_adapter_that_is_merged_says_so_once(start, recwarn):
    start(model=make_policy(lora(use_dora=True)))
    assert [str(w.message) for w in recwarn if "cannot be served by vLLM as it is" in str(w.message)] == [
        "The adapter cannot be served by vLLM as it is, so merged weights are sent: use_dora=True (DoRA) rescales the "
        "merged weights. Set vllm_enable_lora=False to choose this and silence the warning."
    ]


@pytest.mark.parametrize(
    ("version", "message"), [(None, "not installed"), ("0.11.2", r"0\.11\.2 is installed"), ("0.40.0", "0.40.0")]
)
def test_vllm_missing_or_unsupported(start, monkeypatch, version, message):
    found = None if version is None else vllm_worker.Version(version)
    monkeypatch.setattr(vllm_worker, "installed_version", lambda: found)
    with pytest.raises(ImportError, match=message):
        start(peft_config=lora())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True needs a CUDA device"),
        (
            {"generation_kwargs": {"logits_bias": {}}},
            "'logits_bias', which vLLM .* Did you mean logit_bias",
        ),
        ({"generation_kwargs": {"n": 2, "logprobs": 3}}, "'logprobs', 'n', which the engine sets itself"),
        ({"vllm_max_model_length": 600}, "vllm_max_model_length=600 is more than the 512 positions"),
        ({"max_lora_rank": 8}, "max_lora_rank=8 is too small: the adapter has rank 20 and needs max_lora_rank=32"),
        (
            {"vllm_max_model_length": 16},
            r"Row 6 of train_dataset has a prompt of 16 tokens, and the engine's context holds 16",
        ),
        ({"vllm_enable_lora": True, "peft_config": None}, r"the model has no adapter .* Give peft_config=LoraConfig"),
    ],
    ids=str,
)
def test_configuration_that_cannot_work(start, options, message):
    with pytest.raises(ValueError, match=message):
        start(**({"peft_config": lora(r=20)} | options))


def test_stop_strings(start, tokenizer):
    letters = tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"]
    trainer = start(peft_config=lora(), generation_kwargs={"stop": list("aeiou"), "allowed_token_ids": letters})
    trainer.weight_sync.push(trainer.rollout_engine)
    prompts = [[10 + index, 30, 40] for index in range(16)]
    texts = tokenizer.batch_decode(trainer.rollout_engine.generate(prompts, trainer.sampling, seed=0).completion_ids)
    vowels = [[character in "aeiou" for character in text] for text in texts]
    assert any(each[-1] for each in vowels)
    assert not any(any(each[:-1]) for each in vowels)


def test_lora_mode_auto_measures_both_ways_and_decides(start, caplog):
    caplog.set_level("INFO", "trl")
    trainer = start(peft_config=lora(), vllm_lora_mode="auto", max_steps=8)
    trainer.train()
    modes = history(trainer, "sync/mode")
    assert modes[:4] == [0.0, 0.0, 1.0, 1.0]
    assert modes[4:] == [float(trainer.weight_sync.chooser.decision == "merged")] * 4
    assert sum("from now on" in record.message for record in caplog.records) == 1
    assert len(history(trainer, "sync/merge_error")) == sum(modes)
    assert max(history(trainer, "sampling/sampling_logp_difference/max")) < 1e-3
    assert min(history(trainer, "rollout/tokens_per_second")) > 0


@pytest.mark.parametrize("mode", ["dynamic", "merged"])
def test_everything_works_with_a_shared_base(start, mode, monkeypatch, tmp_path):
    """Reference policy, evaluation, checkpoints, resuming and rebuilding, beside an engine that uses the weights."""
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    base = {name: tensor.clone() for name, tensor in base_tensors(make_model())}
    results = []
    for share in (False, True):
        trainer = start(
            peft_config=lora(),
            eval_dataset=Dataset.from_dict({"prompt": ["Count", "Count to 1"] * 4}),
            folder=f"share {share}",
            vllm_lora_mode=mode,
            vllm_share_base=share,
            vllm_recreate_every=2,
            beta=0.1,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
        )
        assert trainer.sync_plan.share_base == share
        trainer.train()
        for name, tensor in base_tensors(trainer.model):
            assert torch.equal(tensor, base[name]), name
        assert max(history(trainer, "sampling/sampling_logp_difference/max")) < 1e-3
        results.append((adapter(trainer), history(trainer, "kl"), history(trainer, "eval_reward")))
        trainer.train(resume_from_checkpoint=str(tmp_path / f"share {share}" / "checkpoint-2"))
        assert all(torch.equal(tensor, results[-1][0][name]) for name, tensor in adapter(trainer).items())
        trainer.close()
    assert results[0][1:] == results[1][1:]
    assert all(torch.equal(tensor, results[1][0][name]) for name, tensor in results[0][0].items())


def test_base_that_cannot_be_shared_is_held_twice_with_a_reason(start, caplog):
    trainer = start(peft_config=lora(), vllm_share_base=True, vllm_enable_lora=False)
    assert not trainer.sync_plan.share_base
    reason = "full weights are sent, which would be written over the trainer's"
    assert reason in trainer.sync_plan.share_reasons
    assert re.search(f"vllm_share_base=True has no effect: .*{reason}", caplog.text)
