"""What an engine leaves behind when it is rebuilt: host memory (and GPU memory) after each of many rebuilds.

    python benchmarks/recreate.py --rebuilds 10

Prints the memory after each rebuild and its slope, least squares over the second half, where allocators have settled.
"""

from __future__ import annotations

import argparse
import gc
import os
import time

import torch
from common import build_engine
from measure import provenance, summary, write
from models import random_qwen2, smollm2, with_adapter

from trl.generation.engine import SamplingConfig


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=["smollm2", "tiny", "1.5b", "7b"], default="tiny")
    parser.add_argument("--rebuilds", type=int, default=10)
    parser.add_argument("--output", default=None, help="write the JSON here too")
    return parser.parse_args()


def resident_megabytes() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def device_megabytes(device: str) -> float:
    return torch.cuda.memory_reserved() / 2**20 if device == "cuda" else 0.0


def slope(values: list[float]) -> float:
    """Least-squares slope over the second half, per rebuild."""
    values = values[len(values) // 2 :]
    centre, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((index - centre) ** 2 for index in range(len(values)))
    return sum((index - centre) * (value - mean) for index, value in enumerate(values)) / spread


def main() -> None:
    arguments = parse_arguments()
    device = arguments.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    base = smollm2(dtype) if arguments.shape == "smollm2" else random_qwen2(arguments.shape, dtype, device)
    model = with_adapter(base.to(device), rank=16)
    prompts = [list(range(10, 60))] * 4
    sampling = SamplingConfig(max_tokens=16)

    engine, sync = build_engine(model, device, dtype, max_model_length=512, max_num_seqs=8)
    sync.push(engine)
    first = engine.generate(prompts, sampling, seed=0)
    with_engine, device_memory, times, same = [resident_megabytes()], [device_megabytes(device)], [], True
    for _ in range(arguments.rebuilds):
        start = time.perf_counter()
        engine.recreate()
        times.append(1000 * (time.perf_counter() - start))
        sync.push(engine)
        same &= engine.generate(prompts, sampling, seed=0) == first
        with_engine.append(resident_megabytes())
        device_memory.append(device_megabytes(device))
    engine.close()
    result = {
        "shape": arguments.shape,
        **provenance(),
        "rebuild_ms": summary(times),
        "host_mb": [round(value, 1) for value in with_engine],
        "host_mb_per_rebuild": round(slope(with_engine), 2),
        "host_mb_after_close": round(resident_megabytes(), 1),
        "same_rollouts": same,
    }
    if device == "cuda":
        result["device_mb"] = [round(value, 1) for value in device_memory]
        result["device_mb_per_rebuild"] = round(slope(device_memory), 2)
    write(result, arguments.output)


if __name__ == "__main__":
    main()
