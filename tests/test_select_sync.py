"""The table that decides how a policy reaches the engine. Pure: no vLLM, no engine."""

from types import SimpleNamespace

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.testing_utils import make_model
from tests.vllm_utils import lora, make_policy, move
from trl.weight_sync import EngineCapabilities, select_sync
from trl.weight_sync.adapter import VLLM_LORA_RANKS, round_up_rank
from trl.weight_sync.select import announce, fused_siblings


LLAMA = EngineCapabilities(
    fused_modules=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")), architecture="LlamaForCausalLM"
)


def config(vllm_enable_lora=None, max_lora_rank=None, vllm_lora_mode=None, vllm_share_base=False):
    return SimpleNamespace(
        vllm_enable_lora=vllm_enable_lora,
        vllm_lora_mode=vllm_lora_mode,
        max_lora_rank=max_lora_rank,
        vllm_share_base=vllm_share_base,
    )


@pytest.mark.parametrize(
    ("arguments", "rank"),
    [
        ({"r": 1}, 1),
        ({"r": 3}, 8),
        ({"r": 16}, 16),
        ({"r": 17}, 32),
        ({"r": 300}, 320),
        ({"r": 8, "rank_pattern": {"q_proj": 40}}, 64),
        ({"r": 8, "rank_pattern": {"q_proj": 2}}, 8),
        ({"r": 8, "rank_pattern": {"no_such_module": 400}}, 8),
        ({"r": 8, "target_modules": ["v_proj"], "rank_pattern": {"q_proj": 400}}, 8),
        # PEFT matches a key at the end of a module's name, after a dot, as a regular expression.
        ({"r": 8, "rank_pattern": {"proj": 400}}, 8),
        ({"r": 8, "rank_pattern": {r".*\.0\.self_attn\.(q|k)_proj": 24}}, 32),
        ({"r": 8, "rank_pattern": {"layers.1.mlp.up_proj": 12, "up_proj": 200}}, 256),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")
def test_rank_is_computed_as_peft_matches_its_patterns(arguments, rank):
    plan = select_sync(make_policy(lora(**arguments)), config(), LLAMA)
    assert (plan.strategy, plan.max_lora_rank) == ("dynamic", rank)


@pytest.mark.parametrize("rank", [*VLLM_LORA_RANKS, 2, 9, 257, 511])
def test_rank_rounds_up_to_the_next_size(rank):
    assert round_up_rank(rank) == min(size for size in VLLM_LORA_RANKS if size >= rank)
    assert round_up_rank(513) is None


def test_larger_max_lora_rank_is_kept():
    assert select_sync(make_policy(lora()), config(max_lora_rank=64), LLAMA).max_lora_rank == 64


@pytest.mark.parametrize("enable", [None, True])
def test_max_lora_rank_too_small_names_the_rank_needed(enable):
    model = make_policy(lora(r=8, rank_pattern={"down_proj": 20}))
    with pytest.raises(ValueError, match=r"max_lora_rank=16 .* rank 20 and needs max_lora_rank=32"):
        select_sync(model, config(enable, max_lora_rank=16), LLAMA)


REFUSED = {
    "DoRA": (lora(use_dora=True), ["use_dora=True"]),
    "bias": (lora(bias="all"), ["bias='all'"]),
    "IA3": (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), ["type IA3"]),
    "AdaLoRA": (AdaLoraConfig(target_modules=["q_proj"], total_step=10), ["type ADALORA"]),
    "rank": (lora(r=600, target_modules=["q_proj"]), ["rank 600", "at most 512"]),
    "several": (lora(r=600, use_dora=True, bias="lora_only"), ["rank 600", "bias='lora_only'", "use_dora=True"]),
    "fused": (lora(target_modules=["q_proj"], modules_to_save=["v_proj"]), ["v_proj is trained in full"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unservable_adapter(name):
    peft_config, fragments = REFUSED[name]
    model = make_policy(peft_config)
    plan = select_sync(model, config(), LLAMA)
    assert plan.strategy == "full"
    assert len(plan.reasons) == (3 if name == "several" else len(plan.reasons))
    with pytest.raises(ValueError, match="vllm_enable_lora=True") as error:
        select_sync(model, config(True), LLAMA)
    for fragment in fragments:
        assert any(fragment in reason for reason in plan.reasons)
        assert fragment in str(error.value)


def test_no_adapter():
    model = make_model()
    assert select_sync(model, config(), LLAMA).reasons == ("the model has no adapter",)
    with pytest.raises(ValueError, match=r"the model has no adapter that vLLM could serve\. Give peft_config"):
        select_sync(model, config(True), LLAMA)


def test_trained_base_parameter_is_not_left_behind():
    model = make_policy(lora())
    model.get_base_model().model.norm.weight.requires_grad_(True)
    plan = select_sync(model, config(), LLAMA)
    assert plan.strategy == "full"
    assert "1 parameters of the base model are trained too (model.norm.weight" in plan.reasons[0]


def test_architecture_without_lora():
    plan = select_sync(make_policy(lora()), config(), EngineCapabilities(supports_lora=False, architecture="Other"))
    assert plan.reasons == ("vLLM serves no adapters for Other",)


def test_kernels_without_float32():
    model = make_policy(lora())
    half = frozenset({torch.float16, torch.bfloat16})
    reasons = select_sync(model, config(), EngineCapabilities(dtype=torch.float32, lora_dtypes=half)).reasons
    assert reasons == ("vLLM's LoRA kernels compute in bfloat16 and float16 here, training is in float32",)
    assert not select_sync(model, config(), EngineCapabilities(dtype=torch.bfloat16, lora_dtypes=half)).reasons


def test_architecture_without_embedding_adapters():
    capabilities = EngineCapabilities(embedding_modules=frozenset(), architecture="Qwen2ForCausalLM")
    plan = select_sync(make_policy(lora(target_modules=["lm_head", "q_proj"])), config(), capabilities)
    assert plan.reasons == ("vLLM serves no adapter on lm_head for Qwen2ForCausalLM",)


DORA = {"use_dora": True}
LARGE = {"r": 600, "target_modules": ["q_proj"]}  # too large for LoRA kernels


@pytest.mark.parametrize(
    ("arguments", "mode", "strategy", "num_reasons"),
    [
        ({}, None, "dynamic", 0),
        ({}, "dynamic", "dynamic", 0),
        ({}, "merged", "merged", 0),
        ({}, "auto", "auto", 0),
        (LARGE, "dynamic", "full", 1),
        (LARGE, "merged", "merged", 0),
        (LARGE, "auto", "merged", 1),
        (DORA, "merged", "full", 1),
        (DORA, "auto", "full", 1),
    ],
)
def test_strategy_follows_the_mode(arguments, mode, strategy, num_reasons):
    model = make_policy(lora(**arguments))
    plan = select_sync(model, config(vllm_lora_mode=mode), LLAMA)
    assert (plan.strategy, len(plan.reasons)) == (strategy, num_reasons)
    assert plan.max_lora_rank == (8 if strategy in ("dynamic", "auto") else None)
    if strategy == "full":
        with pytest.raises(ValueError, match="vllm_enable_lora=True"):
            select_sync(model, config(True, vllm_lora_mode=mode), LLAMA)
    else:
        assert select_sync(model, config(True, vllm_lora_mode=mode), LLAMA) == plan


def test_merged_in_the_engine_without_lora():
    assert select_sync(make_policy(lora()), config(False, vllm_lora_mode="merged"), LLAMA).strategy == "merged"


def on_meta(model):
    model.get_base_model().lm_head.to("meta")
    return model


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: make_policy(lora()), {"vllm_enable_lora": False}, "full weights are sent"),
        (lambda: make_policy(lora(modules_to_save=["norm"])), {}, "some modules are trained in full"),
        (
            lambda: make_policy(lora()).bfloat16(),
            {},
            "in bfloat16, vLLM computes in float32",
        ),
        (lambda: on_meta(make_policy(lora())), {}, "spread over devices (cpu, meta)"),
    ],
)
def test_base_that_cannot_be_shared(make, options, words):
    plan = select_sync(make(), config(**options, vllm_share_base=True), LLAMA)
    assert not plan.share_base
    assert [words in reason for reason in plan.share_reasons] == [True]


def test_packed_base_cannot_be_shared():
    capabilities = EngineCapabilities(packs_weights=True)
    plan = select_sync(make_policy(lora()), config(vllm_share_base=True), capabilities)
    assert plan.share_reasons == ("vLLM computes with packed copies of its weights on the CPU",)


def test_base_is_shared_only_on_demand():
    model = make_policy(lora())
    assert select_sync(model, config(vllm_share_base=True), LLAMA).share_base
    plan = select_sync(model, config(), LLAMA)
    assert (plan.share_base, plan.share_reasons) == (False, ())


def test_merged_on_demand():
    plan = select_sync(make_policy(lora()), config(False), LLAMA)
    assert (plan.strategy, plan.reasons) == ("full", ("vllm_enable_lora=False",))


@pytest.mark.parametrize(
    ("arguments", "tied", "untie"),
    [
        ({"target_modules": ["q_proj"]}, True, False),
        ({"target_modules": ["lm_head"]}, True, True),
        ({"target_modules": ["lm_head"]}, False, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, True, True),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [5]}, True, True),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_embeddings_are_untied_where_the_adapter_parts_them(arguments, tied, untie):
    model = make_policy(lora(**arguments), tie_word_embeddings=tied)
    assert select_sync(model, config(), LLAMA).untie_embeddings is untie


@pytest.mark.parametrize("peft_config", [PromptTuningConfig, PrefixTuningConfig])
def test_prompt_learning_cannot_be_served_at_all(peft_config):
    model = get_peft_model(make_model(), peft_config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="changes the model's input, not its weights"):
        select_sync(model, config(), LLAMA)


def test_lora_bias_without_a_bias_to_add_it_to():
    with pytest.raises(ValueError, match=r"lora_bias=True on 'model\.layers\.0\.self_attn\.q_proj'"):
        select_sync(make_policy(lora(lora_bias=True)), config(), LLAMA)


def test_merged_adapter_has_to_be_unmerged():
    model = move(make_policy(lora()))
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        select_sync(model, config(), LLAMA)


def test_selection_changes_nothing():
    model = make_policy(lora(modules_to_save=["lm_head"]))
    before = {name: (parameter.data_ptr(), parameter._version) for name, parameter in model.named_parameters()}
    select_sync(model, config(), LLAMA)
    after = {name: (parameter.data_ptr(), parameter._version) for name, parameter in model.named_parameters()}
    assert before == after


def test_merging_an_adapter_warns_once_and_names_the_reason(recwarn):
    logger = SimpleNamespace(info=lambda message: messages.append(message))
    messages = []
    model = make_policy(lora(use_dora=True))
    announce(select_sync(model, config(), LLAMA), has_adapter=True, logger=logger)
    assert [str(warning.message) for warning in recwarn if "DoRA" in str(warning.message)]
    recwarn.clear()
    for plan, has_adapter in [
        (select_sync(model, config(False), LLAMA), True),
        (select_sync(make_model(), config(), LLAMA), False),
        (select_sync(make_policy(lora()), config(), LLAMA), True),
    ]:
        announce(plan, has_adapter, logger)
    assert not recwarn.list
    assert len(messages) == 3


def test_fused_siblings():
    fused = (("q_proj", "k_proj", "v_proj"),)
    assert fused_siblings("model.layers.0.self_attn.k_proj", fused) == [
        f"model.layers.0.self_attn.{part}_proj" for part in "qkv"
    ]
    assert fused_siblings("lm_head", fused) == ["lm_head"]


def test_transposed_weights_are_not_rewritten():
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=260))
    model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    plan = select_sync(model, config(vllm_lora_mode="merged"), EngineCapabilities())
    assert plan.strategy == "full"
    assert plan.reasons == ("c_attn is a Conv1D, whose weight vLLM keeps transposed",)


@pytest.mark.parametrize(("targets", "shared"), [(["q_proj"], True), (["q_proj", "embed_tokens"], False)], ids=str)
def test_adapter_is_not_put_into_a_tensor_that_two_modules_share(targets, shared):
    model = make_policy(lora(target_modules=targets), tie_word_embeddings=True)
    plan = select_sync(model, config(vllm_lora_mode="merged", vllm_share_base=True), LLAMA)
    assert (plan.strategy, plan.share_base) == ("merged", shared)
    if not shared:
        assert plan.share_reasons == (
            "model.embed_tokens and lm_head are one tensor in the trainer, into which the adapter of one would be put "
            "for all",
        )


def make_mixture():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 260}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_attention_heads=2, num_key_value_heads=1, **sizes, **experts))


def test_mixture_of_experts_is_served_merged_without_a_gpu():
    model = get_peft_model(make_mixture(), lora(target_modules=["q_proj"]))
    for packs_weights, strategy in ((False, "auto"), (True, "merged")):
        plan = select_sync(model, config(vllm_lora_mode="auto"), EngineCapabilities(packs_weights=packs_weights))
        assert plan.strategy == strategy
    assert "kernels that need a GPU" in plan.reasons[0]


def test_trained_experts_are_refused_without_a_gpu():
    with pytest.raises(ValueError, match="The experts are trained"):
        select_sync(make_mixture(), config(), EngineCapabilities(packs_weights=True))
