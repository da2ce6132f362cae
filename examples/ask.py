"""Asks a model a sum, without and with an adapter trained on it.

python -m examples.ask runs/smollm2/adapter "8 - 3"
"""

from __future__ import annotations

import argparse

from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from examples.prepare_smollm2 import make_prompt


def answer(model: PeftModel, tokenizer: PreTrainedTokenizerBase, problem: str) -> str:
    """Most likely completion for a problem such as `8 - 3`, at most 32 tokens."""
    messages = make_prompt(f"State the final answer to the following arithmetic problem: {problem} =")
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Print both answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", help="folder of the adapter, the output_dir of its run")
    parser.add_argument("problem", help="two numbers from 0 to 9 with + or - between them")
    options = parser.parse_args()

    logging.disable_progress_bar()
    model = AutoPeftModelForCausalLM.from_pretrained(options.adapter)
    tokenizer = AutoTokenizer.from_pretrained(options.adapter)
    with model.disable_adapter():
        print(f"without the adapter: {answer(model, tokenizer, options.problem)!r}")
    print(f"with the adapter:    {answer(model, tokenizer, options.problem)!r}")


if __name__ == "__main__":
    main()
