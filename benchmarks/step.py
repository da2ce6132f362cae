"""A step of GRPO, phase by phase: this library beside upstream TRL on the same GPU.

    python benchmarks/step.py --peer SITE/peer --shape 7b --micro-batch 16        # both, one after the other
    python benchmarks/step.py --variants dynamic merged --device cpu --shape tiny --prompts 4 --tokens 16

Qwen2 shapes with random weights, LoRA of rank 16 on all linear layers, vLLM in the trainer's process, every completion
of full length. Each library runs in a process of its own, so their peaks of memory do not mix.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import tables
import torch
from measure import provenance, write
from models import KEY_VALUE_HEADS, filled_tokenizer, lora_config, random_qwen2


VARIANTS = {
    "peer": ("peer", {}),
    "dynamic": ("ours", {"vllm_lora_mode": "dynamic"}),
    "merged": ("ours", {"vllm_lora_mode": "merged"}),
    "merged, base shared": ("ours", {"vllm_lora_mode": "merged", "vllm_share_base": True}),
    "dynamic, checkpoints": ("ours", {"vllm_lora_mode": "dynamic", "gradient_checkpointing": True}),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=None, help="folder with upstream TRL, to compare with")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["peer", "dynamic", "merged"])
    parser.add_argument("--run", choices=list(VARIANTS), default=None, help="only this one, in this process")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--shape", choices=list(KEY_VALUE_HEADS), default="7b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6, help="the first is warm-up")
    parser.add_argument("--memory", type=float, default=0.4, help="vllm_gpu_memory_utilization")
    parser.add_argument("--model", default=None, help="folder of a saved model, made by the comparison")
    parser.add_argument("--output", default=None, help="write the JSON here too")
    return parser.parse_args()


class Clock:
    """Seconds spent in functions, the device waited for, by phase and step."""

    def __init__(self, device: str):
        self.device = device
        self.steps: list[dict[str, float]] = []
        self.current: dict[str, float] = defaultdict(float)

    def wrap(self, owner: object, name: str, phase: str) -> None:
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            start = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.current[phase] += self.now() - start

        setattr(owner, name, timed)

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def end_step(self) -> None:
        self.steps.append(dict(self.current))
        self.current.clear()


def wrap_phases(trainer, clock: Clock, library: str) -> None:
    if library == "ours":
        clock.wrap(trainer.weight_sync, "push", "sync")
        clock.wrap(trainer.rollout_engine, "generate", "generate")
        clock.wrap(trainer, "_add_fixed_logprobs", "old logprobs")
        clock.wrap(trainer, "_roll_out", "rollout")
    else:
        clock.wrap(trainer.vllm_generation, "sync_weights", "sync")
        clock.wrap(trainer.vllm_generation, "generate", "generate")
        clock.wrap(trainer, "_generate_and_score_completions", "rollout")
        score = trainer._get_per_token_logps_and_entropies

        def scored(*args, **kwargs):
            if torch.is_grad_enabled():  # of the training step itself
                return score(*args, **kwargs)
            start = clock.now()
            result = score(*args, **kwargs)
            clock.current["old logprobs"] += clock.now() - start
            return result

        trainer._get_per_token_logps_and_entropies = scored


def options(arguments: argparse.Namespace, folder: str) -> dict:
    return {
        "output_dir": folder,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": arguments.memory,
        "vllm_max_model_length": arguments.prompt_tokens + arguments.tokens + 16,
        "num_generations": arguments.generations,
        "per_device_train_batch_size": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.prompts * arguments.generations // arguments.micro_batch,
        "max_completion_length": arguments.tokens,
        "generation_kwargs": {"ignore_eos": True},
        "max_steps": arguments.steps,
        "learning_rate": 1e-5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": arguments.device == "cpu",
        "bf16": arguments.device == "cuda",
    }


def measure(arguments: argparse.Namespace) -> dict:
    """Train for some steps with whichever library is called `trl` here."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback

    from trl import GRPOConfig, GRPOTrainer

    library, extra = VARIANTS[arguments.run]
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, device_map=arguments.device)
    tokenizer = filled_tokenizer(model.config.vocab_size)
    text = "the quick brown fox jumps over the lazy dog " * 100
    rows = [text[start : start + arguments.prompt_tokens] for start in range(arguments.prompts)]
    clock = Clock(arguments.device)

    class EachStep(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = clock.now()

        def on_step_end(self, *args, **kwargs):
            clock.current["step"] = clock.now() - self.start
            clock.current["peak_gib"] = peak_gib(arguments.device)
            clock.end_step()

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **kwargs: [float(hash(each) % 7) for each in completions],
            args=GRPOConfig(**options(arguments, folder), **extra),
            train_dataset=Dataset.from_dict({"prompt": rows}),
            processing_class=tokenizer,
            peft_config=lora_config(16),
            callbacks=[EachStep()],
        )
        wrap_phases(trainer, clock, library)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    result = summarise(clock.steps[1:])
    result["completion_tokens"] = logged[-1]["completions/mean_length"]
    result["logp_difference_mean"] = logged[-1].get("sampling/sampling_logp_difference/mean")
    result["gradient_checkpointing"] = trainer.args.gradient_checkpointing
    return result


def peak_gib(device: str) -> dict | None:
    """Largest memory of torch since the start, and what is in use on the whole device now."""
    if device == "cpu":
        return None
    free, total = torch.cuda.mem_get_info()
    return {"torch": torch.cuda.max_memory_allocated() / 2**30, "device": (total - free) / 2**30}


def summarise(steps: list[dict]) -> dict:
    """Medians in seconds. What is left of a step beside its rollout is forward and backward pass and optimizer."""
    for step in steps:
        step["other rollout"] = step["rollout"] - sum(
            step.get(each, 0) for each in ("sync", "generate", "old logprobs")
        )
        step["train"] = step["step"] - step["rollout"]
    result = {phase: round(statistics.median(step.get(phase, 0.0) for step in steps), 3) for phase in tables.PHASES}
    if steps[-1]["peak_gib"] is not None:
        result["peak_torch_gib"] = round(steps[-1]["peak_gib"]["torch"], 1)
        result["peak_device_gib"] = round(max(step["peak_gib"]["device"] for step in steps), 1)
    return result


def save_model(arguments: argparse.Namespace, folder: str) -> None:
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    model = random_qwen2(arguments.shape, dtype, arguments.device)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    filled_tokenizer(model.config.vocab_size).save_pretrained(folder)


def compare(arguments: argparse.Namespace) -> dict:
    """Every variant in a process of its own, on the same saved model."""
    results = {}
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=root) as folder:
        save_model(arguments, folder)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        for variant in arguments.variants:
            path = arguments.peer if VARIANTS[variant][0] == "peer" else str(Path(__file__).parents[1])
            results[variant] = run_self(["--run", variant, "--model", folder], path)
    return results


def run_self(extra: list[str], path: str | None) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        environment = dict(os.environ)
        if path is not None:
            environment["PYTHONPATH"] = os.pathsep.join([path, *environment.get("PYTHONPATH", "").split(os.pathsep)])
        subprocess.run([sys.executable, *sys.argv, *extra, "--output", file.name], env=environment, check=True)
        return json.loads(Path(file.name).read_text())


def main() -> None:
    arguments = parse_arguments()
    if arguments.run is not None:
        write(measure(arguments), arguments.output)
        return
    shape = {name: getattr(arguments, name) for name in ("shape", "prompts", "generations", "prompt_tokens", "tokens")}
    result = {**shape, "micro_batch": arguments.micro_batch, "memory": arguments.memory, **provenance()}
    result["variants"] = compare(arguments)
    write(result, arguments.output)
    print(f"\n{tables.step(result)}")


if __name__ == "__main__":
    main()
