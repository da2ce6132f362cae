"""vLLM's own weights with the adapter in them, and base weights that trainer and vLLM hold together."""

from __future__ import annotations

import pytest
import torch

from tests.test_vllm_exactness import Choice
from tests.vllm_utils import lora, make_policy, move
from trl.generation import SamplingConfig
from trl.generation.vllm_worker import LayerWeight, _layer_weights
from trl.weight_sync import PolicyMismatchError, base_tensors, check_logprobs, logprob_difference
from trl.weight_sync.adapter import base_model


GREEDY = SamplingConfig(max_tokens=8, temperature=0.0)


def base_of(model):
    return {name: tensor.clone() for name, tensor in base_tensors(model)}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_merging_a_broken_adapter_changes_nothing(start_engine, prompts):
    model = move(make_policy(lora()))
    engine, sync = start_engine(model, vllm_lora_mode="merged")
    sync.push(engine)
    before = engine.generate(prompts, GREEDY)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name)[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN or infinity in 1 tensors"):
        sync.push(engine)
    assert engine.generate(prompts, GREEDY) == before


def test_weights_that_overflow_are_not_served(start_engine, prompts):
    model = move(make_policy(lora()))
    engine, sync = start_engine(model, vllm_lora_mode="merged")
    sync.push(engine)

    def fill(value):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "layers.0.mlp.up_proj.lora" in name:
                    parameter.fill_(value)

    fill(1e30)  # finite, but not their product
    with pytest.raises(ValueError, match=r"overflow in float32.*vllm_lora_mode='dynamic'"):
        sync.push(engine)
    with pytest.raises(PolicyMismatchError, match="serves no policy"):
        engine.generate(prompts, GREEDY)
    fill(0.01)
    sync.push(engine)
    check_logprobs(engine, model, prompts)


def test_engine_refuses_to_sample_from_weights_that_were_rewritten_half_way(start_engine, prompts, monkeypatch):
    model = move(make_policy(lora()))
    engine, sync = start_engine(model, vllm_lora_mode="auto")
    sync.chooser = Choice("merged")
    sync.push(engine)
    written = []

    def finish(self, weight, original=LayerWeight.finish):
        if len(written) == 3:
            raise RuntimeError("out of memory")
        written.append(self)
        original(self, weight)

    move(model, seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(LayerWeight, "finish", finish)
        with pytest.raises(RuntimeError, match="out of memory"):
            sync.push(engine)
    with pytest.raises(PolicyMismatchError, match="serves no policy"):
        engine.generate(prompts, GREEDY)
    # Whichever way the next policy is served, nothing is left of the one before.
    sync.chooser = Choice("dynamic")
    sync.push(engine)
    check_logprobs(engine, model, prompts)


def test_weights_that_the_engine_keeps_in_another_way_are_refused(start_engine, monkeypatch):
    model = move(make_policy(lora()))
    engine, sync = start_engine(model, vllm_lora_mode="merged")
    monkeypatch.setattr(LayerWeight, "holds", lambda self, weight: False)
    with pytest.raises(PolicyMismatchError, match=r"q_proj.*vllm_lora_mode='dynamic'"):
        sync.push(engine)


def test_merged_weights_come_back_after_a_rebuild(start_engine, prompts):
    model = move(make_policy(lora()))
    engine, sync = start_engine(model, vllm_lora_mode="merged")
    sync.push(engine)
    before = engine.generate(prompts, GREEDY)
    engine.recreate()
    with pytest.raises(PolicyMismatchError, match="serves no policy"):
        engine.generate(prompts, GREEDY)
    sync.push(engine)
    assert engine.generate(prompts, GREEDY) == before


@pytest.mark.parametrize("mode", ["dynamic", "merged"])
def test_engine_whose_weights_are_gone_gets_them_again(start_engine, prompts, mode):
    model = move(make_policy(lora()))
    engine, sync = start_engine(model, vllm_lora_mode=mode)
    sync.push(engine)

    def lose(worker):
        for parameter in worker.model_runner.get_model().parameters():
            parameter.data.fill_(7.0)

    engine._llm.collective_rpc(lose)
    assert logprob_difference(engine, model, prompts) > 1e-2
    with engine._running():
        engine._reload_base()
    with pytest.raises(PolicyMismatchError, match="serves no policy"):
        engine.generate(prompts, GREEDY)
    sync.push(engine)
    check_logprobs(engine, model, prompts)


# One base for both


@pytest.fixture
def unpacked(monkeypatch):
    """A vLLM that computes with its parameters, as on a GPU, and not with packed copies of them."""
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)


def shared_bytes(engine):
    return sum(engine._llm.collective_rpc("trl_shared_bytes", args=(engine._weights.shared,)))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # the second has biases
@pytest.mark.parametrize("tied", [True, False])
def test_base_is_held_once(unpacked, start_engine, prompts, architecture, tied, tmp_path):
    model = move(make_policy(lora(), architecture, tie_word_embeddings=tied))
    base = base_of(model)
    token_ids = torch.tensor([prompts[4]])
    before = model(token_ids).logits
    engine, sync = start_engine(model, vllm_share_base=True)
    assert sync.plan.share_base
    # All but the embeddings, which vLLM pads from 260 to 320 rows.
    embeddings = {tensor.data_ptr(): tensor.nbytes for name, tensor in base_tensors(model) if tensor.shape[0] == 260}
    total = sum({tensor.data_ptr(): tensor.nbytes for _, tensor in base_tensors(model)}.values())
    assert shared_bytes(engine) == total - sum(embeddings.values())

    sync.push(engine)
    check_logprobs(engine, model, prompts)
    assert_same(base_of(model), base)
    assert torch.equal(model(token_ids).logits, before)

    engine.recreate()
    sync.push(engine)
    check_logprobs(engine, model, prompts)
    engine.close()
    assert_same(base_of(model), base)

    model.unload().save_pretrained(tmp_path)
    assert_same(base_of(type(base_model(model)).from_pretrained(tmp_path)), base)


def test_padding_is_no_obstacle_to_sharing_embeddings(unpacked, start_engine):
    model = make_policy(lora(), vocab_size=320)
    engine, _ = start_engine(model, vllm_share_base=True)
    assert shared_bytes(engine) == sum(tensor.nbytes for _, tensor in base_tensors(model))


def test_adapter_is_in_the_shared_weights_only_while_a_rollout_is_sampled(unpacked, start_engine, prompts):
    model = move(make_policy(lora()))
    base = base_of(model)
    engine, sync = start_engine(model, vllm_lora_mode="auto", vllm_share_base=True)
    for seed, mode in enumerate(["merged", "dynamic", "merged", "merged"]):
        move(model, seed)
        if engine.policy_version is not None:
            assert logprob_difference(engine, model, prompts) > 1e-2
        sync.chooser = Choice(mode)
        report = sync.push(engine)
        assert (report.merge_error is None) == (mode == "dynamic")
        assert_same(base_of(model), base)
        check_logprobs(engine, model, prompts)
        assert_same(base_of(model), base)

    # A policy that has moved on since the push does not get into the rollout.
    before = engine.generate(prompts, GREEDY)
    move(model, seed=9)
    assert engine.generate(prompts, GREEDY) == before


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
def test_base_is_pristine_after_a_rollout_that_failed(unpacked, start_engine, prompts, monkeypatch, exception):
    model = move(make_policy(lora()))
    base = base_of(model)
    engine, sync = start_engine(model, vllm_lora_mode="merged", vllm_share_base=True)
    sync.push(engine)

    def fail(*args, **kwargs):
        assert any(not torch.equal(tensor, base[name]) for name, tensor in base_tensors(model))
        raise exception("in the middle of it")

    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "generate", fail)
        with pytest.raises(exception, match="in the middle of it"):
            engine.generate(prompts, GREEDY)
    assert_same(base_of(model), base)
    check_logprobs(engine, model, prompts)


def test_base_that_somebody_has_written_to_is_noticed(unpacked, start_engine, prompts):
    model = move(make_policy(lora()))
    engine, sync = start_engine(model, vllm_lora_mode="merged", vllm_share_base=True)
    sync.push(engine)
    with torch.no_grad():
        base_model(model).model.layers[0].mlp.up_proj.weight[3, 5] += 1
    with pytest.raises(PolicyMismatchError, match=r"1 base weights.*up_proj.*vllm_share_base=False"):
        engine.generate(prompts, GREEDY)


@pytest.fixture
def packed_weight(start_engine):
    """The weight `[64, 128]` of a linear layer that computes with a packed copy, and what it holds."""
    model = make_policy(lora())
    engine, _ = start_engine(model, vllm_lora_mode="merged")
    name = "model.layers.0.mlp.down_proj"
    (weights,) = engine._llm.collective_rpc(lambda worker: _layer_weights(worker.model_runner.get_model(), [name]))
    if not weights[0].is_packed:
        pytest.skip("on a GPU layers compute with their parameters")
    return weights[0], dict(base_tensors(model))[f"{name}.weight"]


def test_kernels_do_not_see_a_weight_of_another_shape(packed_weight, monkeypatch):
    weight, held = packed_weight
    assert weight.holds(held)
    assert not weight.holds(1.01 * held)
    monkeypatch.setattr(LayerWeight, "_computes_with", lambda self, other: pytest.fail(f"ran with {other.shape}"))
    for other in (held.T, held[:, :32], held[:32]):
        assert not weight.holds(other.contiguous())


def test_weights_whose_terms_cancel_are_recognised(packed_weight):
    weight, held = packed_weight
    # A row that is symmetric about its middle times one that is antisymmetric: nothing but rounding is left.
    symmetric = held + held.flip(1)
    weight.finish(symmetric)
    assert weight.holds(symmetric)
    assert not weight.holds(held)
