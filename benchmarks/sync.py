"""How long a push takes, what it moves, and what the adapter costs while decoding.

    python benchmarks/sync.py --device cpu                 # SmolLM2-135M on the CPU
    python benchmarks/sync.py --device cuda --shape 7b     # Qwen2-7B shapes with random weights

Everything is measured in one process: compare the figures of one run with each other, not with another run.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from common import agreement, build_engine
from measure import device_milliseconds, milliseconds, provenance, summary, write
from models import random_qwen2, smollm2, with_adapter

from trl.generation.engine import SamplingConfig
from trl.weight_sync.strategies import base_tensors


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=["smollm2", "tiny", "1.5b", "7b"], default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--sequences", type=int, default=None, help="completions of a rollout (default 8, on a GPU 64)"
    )
    parser.add_argument("--tokens", type=int, default=None, help="tokens of a completion (default 32, on a GPU 128)")
    parser.add_argument("--output", default=None, help="write the JSON here too")
    return parser.parse_args()


def load(arguments: argparse.Namespace) -> tuple[torch.nn.Module, torch.dtype]:
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    if arguments.shape == "smollm2":
        return smollm2(dtype).to(arguments.device), dtype
    return random_qwen2(arguments.shape, dtype, arguments.device), dtype


def moved(model: torch.nn.Module, sync) -> None:
    """A policy update: every adapter parameter changes a little, so that the next push is due."""
    with torch.no_grad():
        torch._foreach_mul_([p for p in model.parameters() if p.requires_grad], 1.0001)
    sync.policy_changed()


def measure_push(model, engine, sync, arguments) -> dict:
    device, repeats = arguments.device, arguments.repeats

    def push():
        sync.policy_changed()
        return sync.push(engine)

    moved(model, sync)
    report = push()
    result = {"bytes": report.num_bytes, "host_ms": summary(milliseconds(push, repeats, device))}
    if device == "cuda":
        result["gpu_ms"] = summary(device_milliseconds(push, repeats))
    return result


def measure_generate(engine, prompts, arguments) -> dict:
    tokens = arguments.tokens or (128 if arguments.device == "cuda" else 32)
    sampling = SamplingConfig(max_tokens=tokens, extra={"ignore_eos": True})
    times = milliseconds(lambda: engine.generate(prompts, sampling, seed=0), 3, arguments.device, warm_up=1)
    return {"sequences": len(prompts), "tokens": tokens, "host_ms": summary(times)}


def measure_peft_save(model, arguments) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        return {"host_ms": summary(milliseconds(lambda: model.save_pretrained(folder), 5, arguments.device, 1))}


def measure_merge_load_unmerge(model, engine, arguments) -> dict:
    """What a library does that merges into its own weights: merge_adapter, load_weights, unmerge_adapter."""

    def load_into(worker, tensors):
        worker.model_runner.get_model().load_weights(tensors)

    def push():
        model.merge_adapter()
        engine._llm.collective_rpc(load_into, args=(base_tensors(model),))
        model.unmerge_adapter()

    result = {"host_ms": summary(milliseconds(push, 5, arguments.device, 1))}
    result["gpu_ms"] = summary(device_milliseconds(push, 3))
    return result


def main() -> None:
    arguments = parse_arguments()
    cuda = arguments.device == "cuda"
    base, dtype = load(arguments)
    model = with_adapter(base, arguments.rank)
    count = arguments.sequences or (64 if cuda else 8)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(10, 1000, (64,), generator=generator).tolist() for _ in range(count)]
    settings = {"max_model_length": 1024, "max_num_seqs": max(count, 16), "gpu_memory_utilization": 0.4}
    result = {"shape": arguments.shape, "rank": arguments.rank, "dtype": str(dtype), **provenance()}
    result["peft_save"] = measure_peft_save(model, arguments)

    start = time.perf_counter()
    engine, sync = build_engine(model, arguments.device, dtype, **settings)
    result["engine_build_s"] = round(time.perf_counter() - start, 1)
    result["dynamic"] = measure_push(model, engine, sync, arguments)
    result["dynamic"]["generate"] = measure_generate(engine, prompts, arguments)
    result["dynamic"]["logprob_difference"] = agreement(engine, model, prompts[:8])
    engine.close()

    engine, sync = build_engine(model, arguments.device, dtype, vllm_enable_lora=False, **settings)
    result["full"] = measure_push(model, engine, sync, arguments)
    result["full"]["generate"] = measure_generate(engine, prompts, arguments)
    result["full"]["logprob_difference"] = agreement(engine, model, prompts[:8])
    if cuda:
        result["merge_load_unmerge"] = measure_merge_load_unmerge(model, engine, arguments)
        ratio = result["merge_load_unmerge"]["host_ms"]["median"] / result["dynamic"]["host_ms"]["median"]
        result["dynamic_push_is_faster_than_merging_by"] = round(ratio, 1)
    engine.close()

    result["dynamic_push_is_faster_than_peft_save_by"] = round(
        result["peft_save"]["host_ms"]["median"] / result["dynamic"]["host_ms"]["median"], 1
    )
    write(result, arguments.output)


if __name__ == "__main__":
    main()
