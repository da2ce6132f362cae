"""Whether the way of serving changes what is learned: the demo with each, several seeds, one plot.

    python -m examples.prepare_smollm2
    python benchmarks/learning.py --steps 32 --seeds 42 1 2

Each run is a process of its own. Runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import yaml
from measure import provenance, write


DEMO = Path("examples/grpo_smollm2_cpu.yaml")
WAYS = {
    "dynamic": {"vllm_enable_lora": True, "vllm_lora_mode": "dynamic"},
    "merged": {"vllm_enable_lora": True, "vllm_lora_mode": "merged"},
    "full": {"vllm_enable_lora": False, "vllm_lora_mode": None},
}
WINDOW = 4
"""Steps of a curve that are averaged: a step has only 32 completions."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--plot", type=Path, default=None, help="draw the curves here")
    parser.add_argument("--output", default=None, help="write the JSON here too")
    return parser.parse_args()


def run(way: str, seed: int, arguments: argparse.Namespace) -> list[dict]:
    """Log of one run of the demo."""
    folder = arguments.folder / f"{way}-{seed}"
    state = folder / f"checkpoint-{arguments.steps}" / "trainer_state.json"
    if not state.exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = yaml.safe_load(DEMO.read_text()) | WAYS[way]
        options |= {"seed": seed, "max_steps": arguments.steps, "output_dir": str(folder)}
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump({name: value for name, value in options.items() if value is not None}))
        with open(folder / "log.txt", "w") as log:
            command = [str(Path(sys.executable).parent / "trl"), "grpo", "--config", str(config)]
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    return [entry for entry in json.loads(state.read_text())["log_history"] if "reward" in entry]


def smoothed(rewards: list[float]) -> list[float]:
    return [statistics.mean(rewards[start : start + WINDOW]) for start in range(len(rewards) - WINDOW + 1)]


def summarise(logs: dict[int, list[dict]]) -> dict:
    rewards = [[entry["reward"] for entry in log] for log in logs.values()]
    last = [statistics.mean(each[-len(each) // 4 :]) for each in rewards]
    entries = [entry for log in logs.values() for entry in log[1:]]
    return {
        "rewards": {str(seed): [round(value, 4) for value in each] for seed, each in zip(logs, rewards, strict=True)},
        "last_quarter": [round(value, 3) for value in last],
        "mean": round(statistics.mean(last), 3),
        "standard_error": round(statistics.stdev(last) / len(last) ** 0.5, 3) if len(last) > 1 else None,
        "step_time_s": round(statistics.median(entry["step_time"] for entry in entries), 2),
        "push_time_s": round(statistics.median(entry["sync/push_time"] for entry in entries), 4),
        "tokens_per_second": round(statistics.median(entry["rollout/tokens_per_second"] for entry in entries)),
        "logp_difference_mean": statistics.median(
            entry["sampling/sampling_logp_difference/mean"] for entry in entries
        ),
    }


def plot(results: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for way, result in results.items():
        curves = [smoothed(rewards) for rewards in result["rewards"].values()]
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        band = [statistics.pstdev(values) for values in zip(*curves, strict=True)]
        steps = range(WINDOW, WINDOW + len(mean))
        (line,) = axes.plot(steps, mean, label=way)
        low, high = ([m + sign * b for m, b in zip(mean, band, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel=f"reward (mean of {WINDOW} steps)", title="Mean and spread over seeds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    arguments = parse_arguments()
    results = {}
    # All ways with one seed before the next, so that a run cut short compares.
    logs: dict[str, dict[int, list[dict]]] = {way: {} for way in WAYS}
    for seed in arguments.seeds:
        for way in WAYS:
            logs[way][seed] = run(way, seed, arguments)
    for way in WAYS:
        results[way] = summarise(logs[way])
    write({"model": "SmolLM2-135M", "steps": arguments.steps, **provenance(), "ways": results}, arguments.output)
    if arguments.plot is not None:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
