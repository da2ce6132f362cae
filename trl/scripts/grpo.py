"""`trl grpo`: GRPO from a command line or a YAML file."""

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..trainer.grpo_config import GRPOConfig
from ..trainer.model_config import ModelConfig, get_model_init_kwargs, get_peft_config, get_quantization_config
from .launch import launcher_keys
from .utils import ScriptArguments, TrlParser, get_dataset


if TYPE_CHECKING:
    import datasets


@dataclass
class GRPOScriptArguments(ScriptArguments):
    """The dataset and the rewards of a GRPO run, besides the options of [`ScriptArguments`].

    Args:
        reward_model_name_or_path (`str`, *optional*): Hub id or local folder of a sequence classification model with
            one output, used as a reward.
        reward_funcs (`list[str]`, *optional*): Reward functions by import path, `package.module.function` or
            `package.module:function`. Modules in the current directory are found.
    """

    _argument_group_name = "dataset and rewards"

    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or local folder of a reward model with one output."}
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={"help": "Reward functions by import path: package.module.function or package.module:function."},
    )


def make_parser() -> TrlParser:
    """Parser of all options of `trl grpo`."""
    return TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig), prog="trl grpo")


def load_function(path: str) -> Callable:
    """Import a reward function.

    Args:
        path (`str`): `package.module.function` or `package.module:function`.

    Raises:
        ValueError: If the path has no module, or the module no such function.
        ModuleNotFoundError: If there is no such module.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise ValueError(
            f"reward_funcs={path!r} is not an import path. Write package.module:function, for example "
            f"my_rewards:{name} for a function in my_rewards.py of the current directory."
        )
    function = getattr(importlib.import_module(module_name), name, None)
    if not callable(function):
        raise ValueError(f"reward_funcs={path!r}: module {module_name!r} has no function {name!r}.")
    return function


def load_rewards(script_args: GRPOScriptArguments) -> list[str | Callable]:
    """Name of the reward model, if there is one, and the reward functions, in this order.

    Raises:
        ValueError: If there is neither.
    """
    model = script_args.reward_model_name_or_path
    rewards = [] if model is None else [model]
    rewards += [load_function(path) for path in script_args.reward_funcs or []]
    if not rewards:
        raise ValueError("No reward: give reward_funcs, reward_model_name_or_path, or both.")
    return rewards


def pick_split(dataset: "datasets.DatasetDict", option: str, name: str) -> "datasets.Dataset":
    """Split `name` of the dataset, which `option` asked for."""
    if name not in dataset:
        raise ValueError(f"{option}={name!r} is not a split of the dataset, which has {', '.join(dataset)}.")
    return dataset[name]


def resume_point(value: str | bool | None) -> str | bool | None:
    """Read `resume_from_checkpoint` as written on a command line: a folder, or `true` for the latest checkpoint."""
    return {"true": True, "false": None}.get(str(value).lower(), value)


def usage_line(output_dir: str, model_args: ModelConfig) -> str:
    """The line that ends a run: what was saved, and how it is used."""
    if not model_args.use_peft:
        return f'Saved the model: AutoModelForCausalLM.from_pretrained("{output_dir}")'
    from ..weight_sync.adapter import round_up_rank

    line = f'Saved the adapter: AutoPeftModelForCausalLM.from_pretrained("{output_dir}")'
    max_lora_rank = round_up_rank(model_args.lora_r)
    if max_lora_rank is None or model_args.use_dora or model_args.lora_modules_to_save:
        return line  # vLLM loads no such adapter
    return (
        f"{line}, or: vllm serve {model_args.model_name_or_path} --enable-lora --max-lora-rank {max_lora_rank} "
        f"--lora-modules policy={output_dir}"
    )


def main(script_args: GRPOScriptArguments, training_args: GRPOConfig, model_args: ModelConfig) -> None:
    """Train and save.

    Raises:
        ValueError: For a missing model, dataset, split or reward, and for what [`GRPOTrainer`] refuses.
    """
    import torch

    from ..trainer.grpo_trainer import GRPOTrainer

    if model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing: a hub id or a local folder.")
    rewards = load_rewards(script_args)
    dataset = get_dataset(script_args)
    evaluates = training_args.eval_strategy != "no"
    training_args.model_init_kwargs = {**get_model_init_kwargs(model_args), **(training_args.model_init_kwargs or {})}

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=rewards,
        args=training_args,
        train_dataset=pick_split(dataset, "dataset_train_split", script_args.dataset_train_split),
        eval_dataset=pick_split(dataset, "dataset_test_split", script_args.dataset_test_split) if evaluates else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if script_args.ignore_bias_buffers:
        trainer.model._ddp_params_and_buffers_to_ignore = [
            name for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool
        ]

    trainer.train(resume_from_checkpoint=resume_point(training_args.resume_from_checkpoint))
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.close()
    if trainer.is_world_process_zero():
        print(usage_line(os.path.normpath(training_args.output_dir), model_args))


def run(args: Sequence[str] | None = None) -> None:
    """Train with a command line, `sys.argv[1:]` by default. A bad option ends the program with exit code 2."""
    parser = make_parser()
    with parser.environment:
        try:
            parsed = parser.parse_args_and_config(args, ignored_keys=launcher_keys(parser.flags()))
        except (OSError, ValueError) as error:
            parser.error(str(error))
        main(*parsed)


if __name__ == "__main__":
    run()
