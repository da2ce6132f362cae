"""What each way of serving an adapter costs: pushes and rollouts, beside a bare vLLM that has no adapter at all.

    python benchmarks/modes.py --device cpu --sequences 1 8
    python benchmarks/modes.py --device cuda --shape 7b --sequences 1 64 512 --tokens 256

One engine with LoRA buffers serves both ways in turn; one without is the base speed. All in one process.
"""

from __future__ import annotations

import argparse
import json

import tables
import torch
from common import agreement, build_engine, set_mode
from measure import device_milliseconds, milliseconds, provenance, summary, write
from models import random_qwen2, smollm2, with_adapter

from trl.generation.engine import SamplingConfig


MODES = ("dynamic", "merged")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=["smollm2", "tiny", "0.5b", "1.5b", "7b"], default="smollm2")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, default=3, help="rollouts of each kind; 5 times as many pushes")
    parser.add_argument("--output", default=None, help="write the JSON here too")
    return parser.parse_args()


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(10, 1000, (length,), generator=generator).tolist() for _ in range(count)]


def rollout_ms(engine, count: int, arguments) -> dict:
    sampling = SamplingConfig(max_tokens=arguments.tokens, extra={"ignore_eos": True})
    rows = prompts(count, arguments.prompt_tokens)
    call = milliseconds(
        lambda: engine.generate(rows, sampling, seed=0), arguments.repeats, arguments.device, warm_up=1
    )
    return summary(call)


def bare_rollout_ms(engine, count: int, arguments) -> dict:
    """vLLM's own `generate` for the same prompts and number of tokens, with nothing asked for but the tokens."""
    with engine._running():
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, detokenize=False, temperature=1.0)
        rows = [{"prompt_token_ids": row} for row in prompts(count, arguments.prompt_tokens)]
        call = milliseconds(
            lambda: engine._llm.generate(rows, parameters, use_tqdm=False),
            arguments.repeats,
            arguments.device,
            warm_up=1,
        )
    return summary(call)


def push_ms(engine, sync, mode: str, arguments) -> dict:
    report = set_mode(sync, engine, mode)
    repeats = 5 * arguments.repeats
    times = milliseconds(lambda: set_mode(sync, engine, mode), repeats, arguments.device)
    result = {"host_ms": summary(times), "bytes": report.num_bytes, "merge_error": report.merge_error}
    if arguments.device == "cuda":
        result["gpu_ms"] = summary(device_milliseconds(lambda: set_mode(sync, engine, mode), repeats))
    return result


def settings(arguments) -> dict:
    most = max(arguments.sequences)
    length = arguments.prompt_tokens + arguments.tokens
    return {"max_model_length": length + 16, "max_num_seqs": max(most, 8), "gpu_memory_utilization": 0.45}


def load(arguments) -> tuple[torch.nn.Module, torch.dtype]:
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    if arguments.shape == "smollm2":
        return smollm2(dtype).to(arguments.device), dtype
    return random_qwen2(arguments.shape, dtype, arguments.device), dtype


def measure_base(arguments) -> dict:
    model, dtype = load(arguments)
    engine, sync = build_engine(model, arguments.device, dtype, **settings(arguments))
    sync.push(engine)
    rollouts = {
        count: {"bare": bare_rollout_ms(engine, count, arguments), "base": rollout_ms(engine, count, arguments)}
        for count in arguments.sequences
    }
    engine.close()
    return rollouts


def measure_adapter(rank: int, arguments) -> dict:
    base, dtype = load(arguments)
    model = with_adapter(base, rank)
    engine, sync = build_engine(model, arguments.device, dtype, vllm_lora_mode="auto", **settings(arguments))
    results = {}
    for mode in MODES:
        results[mode] = {"push": push_ms(engine, sync, mode, arguments)}
        results[mode]["rollout"] = {count: rollout_ms(engine, count, arguments) for count in arguments.sequences}
        results[mode]["logprob_difference"] = agreement(engine, model, prompts(4, 24))
    engine.close()
    return results


def main() -> None:
    arguments = parse_arguments()
    result = {"shape": arguments.shape, "prompt_tokens": arguments.prompt_tokens, "tokens": arguments.tokens}
    result |= provenance()
    result["base"] = measure_base(arguments)
    result["ranks"] = {rank: measure_adapter(rank, arguments) for rank in arguments.ranks}
    write(result, arguments.output)
    print(f"\n{tables.modes(json.loads(json.dumps(result)))}")


if __name__ == "__main__":
    main()
