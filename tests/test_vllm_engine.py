"""The in-process engine on real vLLM: failures never serve a wrong policy, and the process is left as it was."""

import gc
import os
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.testing_utils import make_model
from tests.vllm_utils import build_engine, lora, make_policy, move
from trl.generation.engine import SamplingConfig
from trl.generation.vllm_worker import AdapterSlot, _adapter_manager
from trl.weight_sync import PolicyMismatchError, check_logprobs, logprob_difference
from trl.weight_sync.verify import trainer_logprobs


GREEDY = SamplingConfig(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def served():
    """A policy and the engine that serves it. Tests that harm it push again."""
    model = move(make_policy(lora()))
    engine, sync = build_engine(model)
    sync.push(engine)
    yield model, engine, sync
    engine.close()


@pytest.fixture
def policy(served):
    model, engine, sync = served
    sync.policy_changed()
    sync.push(engine)
    return model, engine, sync


def test_push_is_due_only_when_the_policy_changed(policy):
    model, engine, sync = policy
    assert sync.push(engine) is None
    move(model, seed=3)
    report = sync.push(engine)
    assert report.version == sync.version == engine.policy_version
    assert report.num_bytes == 2 * (9 * 64 + 2 * 32 + 3 * 128) * 8 * 4
    assert sync.push(engine) is None


def test_rollouts_name_the_version_that_sampled_them(policy, prompts):
    model, engine, sync = policy
    assert engine.generate(prompts, GREEDY).policy_version == sync.version
    move(model, seed=4)
    sync.push(engine)
    assert engine.generate(prompts, GREEDY).policy_version == sync.version


def test_dropped_adapter_is_refused_not_answered_by_the_base(policy, prompts):
    model, engine, sync = policy
    engine._llm.collective_rpc(lambda worker: _adapter_manager(worker.model_runner).remove_all_adapters())
    with pytest.raises(PolicyMismatchError, match="dropped the adapter"):
        engine.generate(prompts, GREEDY)
    sync.push(engine)
    check_logprobs(engine, model, prompts)


def test_base_model_would_fail_the_check(policy, prompts):
    model, engine, _ = policy
    with model.disable_adapter():
        assert logprob_difference(engine, model, prompts) > 0.1


def test_nan_in_the_adapter_is_refused_and_the_old_policy_served(policy, prompts):
    model, engine, sync = policy
    before = engine.generate(prompts, GREEDY)
    weight = next(parameter for name, parameter in model.named_parameters() if "layers.1.mlp.up_proj.lora_B" in name)
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3, 2] = float("nan")
    with pytest.raises(ValueError, match=r"NaN or infinity in 1 tensors \(model\.layers\.1\.mlp\.up_proj"):
        sync.push(engine)
    assert engine.generate(prompts, GREEDY) == before
    with torch.no_grad():
        weight.copy_(kept)
    sync.push(engine)
    check_logprobs(engine, model, prompts)


def test_push_that_breaks_half_way_is_not_served(policy, prompts, monkeypatch):
    model, engine, sync = policy
    move(model, seed=5)
    with monkeypatch.context() as patch:
        # One module keeps the adapter of the version before.
        patch.setattr(AdapterSlot, "switch", lambda slot: torch._foreach_copy_(slot.held[:-1], slot.sent[:-1]))
        with pytest.raises(PolicyMismatchError, match=r"1 of 28 adapter tensors .*lora_B"):
            sync.push(engine)
    with pytest.raises(PolicyMismatchError, match="serves no policy"):
        engine.generate(prompts, GREEDY)
    sync.push(engine)
    check_logprobs(engine, model, prompts)


def test_failure_before_the_switch_leaves_the_old_policy(policy, prompts, monkeypatch):
    model, engine, sync = policy
    before = engine.generate(prompts, GREEDY)
    move(model, seed=6)

    def fail(slot):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AdapterSlot, "switch", fail)
        with pytest.raises(KeyboardInterrupt):
            sync.push(engine)
    assert engine.generate(prompts, GREEDY) == before
    sync.push(engine)
    check_logprobs(engine, model, prompts)


def test_failed_rollout_does_not_wedge_the_engine(policy, prompts):
    model, engine, _ = policy

    def fail_once(worker):
        runner, execute = worker.model_runner, worker.model_runner.execute_model

        def execute_model(*args, **kwargs):
            runner.execute_model = execute
            raise RuntimeError("device lost")

        runner.execute_model = execute_model

    engine._llm.collective_rpc(fail_once)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.generate(prompts, GREEDY)
    check_logprobs(engine, model, prompts)


@pytest.mark.parametrize("length", [0, 512, 600])
def test_prompt_without_room_in_the_context(policy, length, prompts):
    model, engine, _ = policy
    with pytest.raises(ValueError, match=rf"Prompt 1 has {length} tokens; the engine's context holds 512"):
        engine.generate([[5, 6], [5] * length], GREEDY)
    check_logprobs(engine, model, prompts)


def test_seeded_rollouts_repeat(policy, prompts):
    _, engine, _ = policy
    sampling = SamplingConfig(max_tokens=8)
    first, second = engine.generate(prompts, sampling, seed=1), engine.generate(prompts, sampling, seed=1)
    assert first == second
    assert engine.generate(prompts, sampling, seed=2).completion_ids != first.completion_ids


def test_process_is_left_as_it_was(prompts, start_engine):
    model = move(make_policy(lora()))
    environment = dict(os.environ)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    def interpreter():
        defaults = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
        return defaults, torch.set_num_threads, sys.excepthook, list(sys.path), gc.get_freeze_count()

    before = interpreter()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine, sync = start_engine(model)
        sync.push(engine)
        engine.generate(prompts, SamplingConfig(max_tokens=4), seed=7)
        engine.recreate()
        engine.close()
        engine.close()

    assert dict(os.environ) == environment
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == state
    assert interpreter() == before
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(prompts, GREEDY)


def test_recreated_engine_samples_the_same(prompts, start_engine):
    model = move(make_policy(lora()))
    engine, sync = start_engine(model, recreate_every=2)
    sampling = SamplingConfig(max_tokens=8)
    built = engine._llm
    sync.push(engine)
    first = engine.generate(prompts, sampling, seed=3)
    sync.policy_changed()
    sync.push(engine)
    assert engine._llm is built
    sync.policy_changed()
    sync.push(engine)
    assert engine._llm is not built
    again = engine.generate(prompts, sampling, seed=3)
    assert again.completion_ids == first.completion_ids
    assert again.logprobs == first.logprobs


def test_two_engines_in_one_process(policy, prompts, start_engine):
    model, engine, _ = policy
    other_model = move(make_policy(lora(r=4), "qwen2"), seed=8)
    other, sync = start_engine(other_model)
    sync.push(other)
    check_logprobs(other, other_model, prompts)
    check_logprobs(engine, model, prompts)
    other.close()
    check_logprobs(engine, model, prompts)


def reference_logprobs(logits, sampling, seen):
    """Log probabilities after repetition penalty, temperature, top-k, top-p and min-p, token by token."""
    values = logits.clone()
    for token in seen:
        values[token] = (
            values[token] / sampling.repetition_penalty
            if values[token] > 0
            else (values[token] * sampling.repetition_penalty)
        )
    values = values / sampling.temperature
    order = values.argsort(descending=True)
    probabilities = values.softmax(-1)
    if sampling.min_p:
        values[probabilities < sampling.min_p * probabilities.max()] = -float("inf")
    if sampling.top_k:
        values[order[sampling.top_k :]] = -float("inf")
    if sampling.top_p < 1:
        probabilities, total = values.softmax(-1), 0.0
        for token in order.tolist():
            if total >= sampling.top_p:
                values[token] = -float("inf")
            total += probabilities[token].item()
    return values.log_softmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_sampled_from(policy, prompts, options):
    model, engine, _ = policy
    sampling = SamplingConfig(max_tokens=6, **options)
    rollout = engine.generate(prompts, sampling, seed=11)
    for prompt, completion, logprobs in zip(prompts, rollout.completion_ids, rollout.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0]
        for position, (token, logprob) in enumerate(zip(completion, logprobs, strict=True)):
            seen = set(prompt + completion[:position])
            expected = reference_logprobs(logits[len(prompt) + position - 1], sampling, seen)
            assert logprob == pytest.approx(expected[token].item(), abs=1e-3)


def test_completion_ends_with_its_stop_token(policy, prompts):
    _, engine, _ = policy
    free = engine.generate(prompts[:1], GREEDY).completion_ids[0]
    sampling = SamplingConfig(max_tokens=8, temperature=0.0, stop_token_ids=(free[3],))
    assert engine.generate(prompts[:1], sampling).completion_ids == [free[: free.index(free[3]) + 1]]


def test_generation_kwargs_reach_vllm(policy, prompts):
    _, engine, _ = policy
    sampling = SamplingConfig(max_tokens=3, temperature=0.0, extra={"logit_bias": {42: 1000.0}})
    assert engine.generate(prompts, sampling).completion_ids == [[42] * 3] * len(prompts)


def test_base_changed_in_memory_and_resized(prompts, start_engine):
    """An adapter merged into the base, then embeddings resized, then a new adapter: none of it is on a disk."""
    model = move(make_policy(lora())).merge_and_unload()
    model.resize_token_embeddings(300, mean_resizing=False)
    model = move(get_peft_model(model, lora(r=4)), seed=9)
    engine, sync = start_engine(model)
    sync.push(engine)
    check_logprobs(engine, model, [[*prompt, 280, 299] for prompt in prompts])


def test_active_one_of_several_adapters_is_served(prompts, start_engine):
    model = make_model()
    model = get_peft_model(model, lora(r=4), adapter_name="frozen")
    model.add_adapter("policy", lora(r=12, lora_alpha=5, target_modules=["q_proj", "o_proj"]))
    model.set_adapter("frozen")
    move(model, seed=1)
    model.set_adapter("policy")
    move(model, seed=2)
    engine, sync = start_engine(model)
    assert (sync.plan.strategy, sync.plan.adapter) == ("dynamic", "policy")
    sync.push(engine)
    check_logprobs(engine, model, prompts)


def test_two_active_adapters_are_merged(prompts, start_engine):
    model = get_peft_model(make_model(), lora(r=4), adapter_name="first")
    model.add_adapter("second", lora(r=8, target_modules=["q_proj", "k_proj"]))
    model.base_model.set_adapter(["first", "second"])
    move(model)
    engine, sync = start_engine(model)
    assert sync.plan.strategy == "full"
    sync.push(engine)
    check_logprobs(engine, model, prompts)


def test_adapter_served_merged_on_demand(prompts, start_engine):
    model = move(make_policy(lora()))
    engine, sync = start_engine(model, vllm_enable_lora=False)
    assert sync.plan.strategy == "full"
    sync.push(engine)
    check_logprobs(engine, model, prompts)


def test_full_tensors_that_arrive_wrong_are_noticed(prompts, start_engine):
    model = move(make_policy(lora(target_modules=["q_proj"], modules_to_save=["model.norm"])))
    engine, sync = start_engine(model)

    def halve_what_arrives(worker):
        runner, reload_weights = worker.model_runner, worker.model_runner.reload_weights

        def reload_half(weights_iterator):
            runner.reload_weights = reload_weights
            reload_weights(weights_iterator=((name, tensor / 2) for name, tensor in weights_iterator))

        runner.reload_weights = reload_half

    engine._llm.collective_rpc(halve_what_arrives)
    with pytest.raises(PolicyMismatchError, match=r"1 tensors .*model\.norm\.weight"):
        sync.push(engine)
    with pytest.raises(PolicyMismatchError, match="serves no policy"):
        engine.generate(prompts, GREEDY)
    sync.push(engine)
    check_logprobs(engine, model, prompts)


def test_adapter_on_a_module_the_engine_has_not(served):
    _, engine, sync = served
    update = sync.export()
    update.adapter["model.layers.7.self_attn.q_proj"] = next(iter(update.adapter.values()))
    with pytest.raises(PolicyMismatchError, match=r"no LoRA buffers for 1 modules .*layers\.7"):
        engine.push(update)
    sync.policy_changed()
    sync.push(engine)


def test_bfloat16_engine_folds_the_scaling_before_rounding(prompts, start_engine):
    model = move(make_policy(LoraConfig(r=8, lora_alpha=11, target_modules=["q_proj"], use_rslora=True)))
    engine, sync = start_engine(model, dtype=torch.bfloat16)
    sync.push(engine)
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    expected = (layer.lora_B["default"].weight.double() * layer.scaling["default"]).to(torch.bfloat16)

    def held(worker):
        manager = _adapter_manager(worker.model_runner)
        return manager.modules["model.layers.1.self_attn.qkv_proj"].lora_b_stacked[0][0, 0]

    assert torch.equal(engine._llm.collective_rpc(held)[0], expected)


def test_trainer_logprobs_restore_the_mode(served):
    model, _, _ = served
    model.train()
    trainer_logprobs(model, [5, 6], [7])
    assert model.training
    model.eval()
