"""What a push sends, compared with what PEFT computes. No vLLM."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoKrConfig

from tests.testing_utils import make_model
from tests.vllm_utils import lora, make_policy, move
from trl.generation.engine import PolicyUpdate, PushReport, fold_scaling
from trl.weight_sync import EngineCapabilities, WeightSync, base_tensors, select_sync
from trl.weight_sync.adapter import canonical_adapter, lora_layers


LLAMA = EngineCapabilities(fused_modules=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")))


def sync_of(model, enable=None, mode=None):
    config = SimpleNamespace(vllm_enable_lora=enable, vllm_lora_mode=mode, max_lora_rank=None, vllm_share_base=False)
    return WeightSync(model, select_sync(model, config, LLAMA))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"use_rslora": True},
        {"lora_alpha": 5, "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 11}},
        {"alpha_pattern": {"v_proj": 2, r"layers\.0\..*": 31}, "use_rslora": True},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]},
    ],
    ids=str,
)
def test_canonical_adapter_is_the_delta_of_peft(arguments):
    model = move(make_policy(lora(**arguments)))
    layers = lora_layers(model, "default")
    adapter = canonical_adapter(layers, "default")
    assert adapter.keys() == layers.keys()
    assert adapter
    for (name, module), scaled_b in zip(adapter.items(), fold_scaling(adapter), strict=True):
        delta = scaled_b @ module.lora_a
        expected = layers[name].get_delta_weight("default")
        torch.testing.assert_close(delta.T if "embed" in name else delta, expected, msg=name)


def test_scaling_is_folded_in_float32():
    model = move(make_policy(lora(lora_alpha=11, r=3))).to(torch.bfloat16)
    adapter = canonical_adapter(lora_layers(model, "default"), "default")
    for module, scaled_b in zip(adapter.values(), fold_scaling(adapter), strict=True):
        assert scaled_b.dtype == torch.float32
        torch.testing.assert_close(scaled_b.double(), module.lora_b.double() * (11 / 3))


@pytest.mark.parametrize(
    "peft_config",
    [
        None,
        lora(),
        lora(modules_to_save=["lm_head", "norm"], target_modules=["q_proj"]),
        lora(trainable_token_indices=[1, 2]),
        lora(target_modules=["v_proj"], target_parameters=["q_proj.weight", "o_proj.weight"]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ],
    ids=["none", "lora", "modules_to_save", "tokens", "parameters", "ia3"],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_base_tensors_are_the_checkpoint(peft_config, architecture):
    expected = make_model(architecture).state_dict()
    model = move(make_policy(peft_config, architecture)) if peft_config else make_model(architecture)
    tensors = dict(base_tensors(model))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("peft_config", "architecture"),
    [
        (lora(), "llama"),
        (lora(use_dora=True), "llama"),
        (lora(bias="lora_only"), "qwen2"),
        (lora(bias="all", target_modules=["down_proj"]), "qwen2"),
        (lora(lora_bias=True, target_modules=["q_proj", "v_proj"]), "qwen2"),
        (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "llama"),
        (LoHaConfig(r=4, target_modules=["q_proj", "up_proj"]), "llama"),
        (LoKrConfig(r=4, target_modules=["o_proj"]), "llama"),
        (lora(target_modules=["v_proj"], target_parameters=["q_proj.weight", "o_proj.weight"]), "llama"),
    ],
    ids=["lora", "dora", "lora_only", "bias", "lora_bias", "ia3", "loha", "lokr", "parameters"],
)
def test_full_tensors_are_what_peft_merges(peft_config, architecture):
    model = move(make_policy(peft_config, architecture))
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    before = {name: (tensor.clone(), tensor._version) for name, tensor in model.named_parameters()}

    sent = dict(sync_of(model, enable=False).export().tensors())

    assert sent
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, merged[name], msg=name)
    # Whatever differs from the base is among them, and nothing of the trainer's was written to.
    base = make_model(architecture).state_dict()
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    assert changed <= sent.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0]), name
        assert parameter._version == before[name][1], name


def test_only_changed_layers_and_their_fused_siblings_are_sent():
    model = move(make_policy(lora(target_modules=["q_proj"], layers_to_transform=[1])))
    sent = dict(sync_of(model, enable=False).export().tensors())
    assert set(sent) == {f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"}


def test_merging_is_done_in_float32():
    model = move(make_policy(lora(target_modules=["o_proj"])), scale=0.01).to(torch.bfloat16)
    layer = model.get_base_model().model.layers[0].self_attn.o_proj
    expected = layer.get_base_layer().weight.double() + (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double() * layer.scaling["default"]
    )
    sent = dict(sync_of(model, enable=False).export().tensors())["model.layers.0.self_attn.o_proj.weight"]
    torch.testing.assert_close(sent.double(), expected, rtol=1e-6, atol=1e-7)


def test_another_adapter_or_a_merged_one_is_not_sent():
    model = move(make_policy(lora()))
    sync = sync_of(model)
    model.merge_adapter()
    with pytest.raises(ValueError, match="was merged into the base weights"):
        sync.export()
    model.unmerge_adapter()
    model.add_adapter("other", lora(r=4))
    model.set_adapter("other")
    with pytest.raises(ValueError, match=r"active adapters are \['other'\], .* built to serve 'default'"):
        sync.export()
    model.set_adapter("default")
    assert sync.export().adapter


@pytest.mark.parametrize("arguments", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_full_tensors_with_nan_are_not_sent(arguments):
    model = move(make_policy(lora(**arguments)))
    name, parameter = next(
        (n, p) for n, p in model.named_parameters() if p.requires_grad and "lora_A" not in n and "lora_B" not in n
    )
    with torch.no_grad():
        parameter.view(-1)[3] = float("inf")
    engine = RecordingEngine()
    with pytest.raises(ValueError, match="1 trained parameters hold NaN or infinity") as error:
        sync_of(model).push(engine)
    assert name in str(error.value)
    assert not engine.calls


class RecordingEngine:
    """Keeps what is pushed to it. Stands for any engine: these tests are about when a push is due."""

    def __init__(self):
        self.policy_version, self.calls = None, []

    def push(self, update: PolicyUpdate) -> PushReport:
        self.policy_version = update.version
        self.calls.append(f"push {update.version}")
        return PushReport(update.version, 0, 0.0)

    def recreate(self):
        self.policy_version = None
        self.calls.append("recreate")


def test_version_rises_with_every_kind_of_change():
    model = make_policy(lora())
    sync = sync_of(model)
    seen = [sync.version, sync.version]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    optimizer.step()
    seen.append(sync.version)
    state = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    model.load_state_dict(state, strict=False)
    seen.append(sync.version)
    next(p for p in model.parameters() if p.requires_grad).data = torch.zeros(8, 64)
    seen.append(sync.version)
    sync.policy_changed()
    seen.append(sync.version)
    assert seen == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("recreate_every", "calls"),
    [
        (None, ["push 0", "push 1", "push 2", "push 3"]),
        (1, ["push 0", "recreate", "push 1", "recreate", "push 2", "recreate", "push 3"]),
        (2, ["push 0", "push 1", "recreate", "push 2", "push 3"]),
    ],
)
def test_engine_is_recreated_after_so_many_updates(recreate_every, calls):
    sync, engine = WeightSync(make_policy(lora()), None, recreate_every), RecordingEngine()
    for update in range(4):
        sync.push(engine)
        assert sync.push(engine) is None
        if update < 3:
            sync.policy_changed()
    assert engine.calls == calls


def test_updates_between_two_rollouts_all_count():
    sync, engine = WeightSync(make_policy(lora()), None, recreate_every=4), RecordingEngine()
    for _ in range(4):
        sync.push(engine)
        for _ in range(3):
            sync.policy_changed()
    assert engine.calls == ["push 0", "push 3", "recreate", "push 6", "push 9"]


def test_engine_that_lost_its_policy_gets_it_again():
    sync, engine = WeightSync(make_policy(lora()), None), RecordingEngine()
    sync.push(engine)
    engine.policy_version = None
    assert sync.push(engine).version == 0


@pytest.mark.parametrize(("targets", "tied"), [(["q_proj"], True), (["lm_head"], False)], ids=str)
def test_tied_output_layer_is_sent_only_where_an_adapter_parts_it(targets, tied):
    model = make_policy(lora(target_modules=targets), tie_word_embeddings=True)
    assert ("lm_head.weight" not in dict(base_tensors(model))) is tied


def test_output_layer_that_vllm_does_not_tie_is_sent():
    model = make_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    assert "lm_head.weight" in dict(base_tensors(model))
