"""Configuration of GRPO. Types are real, not strings: `HfArgumentParser` on Python 3.10 reads them."""

import math
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accelerate.utils import patch_environment
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from .grpo_loss import AGGREGATIONS, IMPORTANCE_SAMPLING_MODES


SCALE_REWARDS = ("group", "batch", "none")
VLLM_MODES = ("colocate",)
VLLM_LORA_MODES = ("dynamic", "merged", "auto")
VLLM_MODEL_IMPLS = ("vllm", "transformers", "auto")


@dataclass
class GRPOConfig(TrainingArguments):
    """Options of [`GRPOTrainer`], on top of those of [`~transformers.TrainingArguments`].

    Defaults that differ from `TrainingArguments`: `learning_rate=1e-6`, `logging_steps=10`,
    `remove_unused_columns=False`, `bf16`, which is on where the device supports it unless `fp16` or `bf16=False` is
    given, and `gradient_checkpointing` (not re-entrant), on for as many layers as a GPU's memory is short for;
    `True` is for all and `False` for none.

    Completions of one rollout: `generation_batch_size = per_device_train_batch_size * number of processes *
    steps_per_generation`. It must be a multiple of `num_generations`.

    Args:
        model_init_kwargs (`dict` or JSON, *optional*): For `from_pretrained`, where the model is given by name. The
            `dtype` is `"float32"` unless it says otherwise.
        trust_remote_code (`bool`, defaults to `False`): Run code that comes with the model.
        disable_dropout (`bool`, defaults to `False`): Set every dropout of the policy to zero.

        num_generations (`int`, defaults to `8`): Completions sampled for each prompt, at least 2.
        num_generations_eval (`int`, *optional*): The same in evaluation; as `num_generations` if `None`.
        max_completion_length (`int`, defaults to `512`): Most tokens of one completion.
        shuffle_dataset (`bool`, defaults to `True`): Draw prompts in random order.
        generation_batch_size (`int`, *optional*): Completions of one rollout, over all processes.
        steps_per_generation (`int`, *optional*): Micro-batches that one rollout is split into;
            `gradient_accumulation_steps` if `None`. Follows from `generation_batch_size` where that is given.
        temperature (`float`, defaults to `1.0`): Divides the logits, in sampling and in the loss.
        top_p (`float`, defaults to `1.0`): Nucleus mass; `1.0` keeps all tokens.
        top_k (`int`, defaults to `0`): Keep this many most likely tokens; `0` keeps all.
        min_p (`float`, *optional*): Drop tokens less likely than this fraction of the most likely one.
        generation_kwargs (`dict` or JSON, *optional*): Further sampling options, handed to the engine as they are:
            for `SamplingParams` of vLLM, or for `GenerationConfig` of transformers.
        chat_template_kwargs (`dict` or JSON, *optional*): Variables for the chat template.
        repetition_penalty (`float`, defaults to `1.0`): Above 1 discourages tokens that occurred already.

        use_vllm (`bool`, defaults to `False`): Sample with vLLM; otherwise with the model that is trained.
        vllm_mode (`str`, defaults to `"colocate"`): `"colocate"`: vLLM in the trainer's process.
        vllm_model_impl (`str`, defaults to `"vllm"`): Model code that vLLM runs: its own (`"vllm"`), that of
            `"transformers"`, or `"auto"`.
        vllm_enable_sleep_mode (`bool`, defaults to `False`): Give vLLM's GPU memory back between rollouts.
        vllm_sleep_level (`int`, defaults to `1`): Where its weights go meanwhile: to host memory (`1`), or nowhere
            (`2`), which takes no host memory; the trainer's are then copied again when it wakes.
        vllm_gpu_memory_utilization (`float`, defaults to `0.3`): Share of the GPU's memory for vLLM.
        vllm_max_model_length (`int`, *optional*): Most tokens of prompt and completion together; as the model allows
            if `None`.
        vllm_tensor_parallel_size (`int`, defaults to `1`): GPUs that one engine is spread over.
        vllm_enable_lora (`bool`, *optional*): `True`: vLLM serves the adapter, or the start fails with every reason
            why it cannot. `False`: merged weights are sent. `None`: the first where it is exact, else the second
            with one warning.
        vllm_lora_mode (`str`, *optional*): How vLLM applies the adapter that it is sent. `"dynamic"`, which is the
            default: with LoRA kernels while it computes. `"merged"`: put into vLLM's own weights at every update,
            which samples at the speed of the base model, but in half precision rounds a small adapter away. `"auto"`:
            the faster of the two, measured on the run, as long as rounding changes the adapter by less than 5%.
        vllm_share_base (`bool`, defaults to `False`): Hold the frozen base weights once, for trainer and vLLM
            together. For merged weights a copy of the pristine ones is kept in host memory. Where it is not possible
            a warning says why.
        max_lora_rank (`int`, *optional*): Rank of vLLM's LoRA buffers (1, 8, 16, 32, 64, 128, 256, 320 or 512);
            computed from the adapter if `None`.
        vllm_recreate_every (`int`, *optional*): Rebuild the engine after this many policy updates.

        beta (`float`, defaults to `0.0`): Weight of the KL divergence from the reference policy. With `0.0` there is
            no reference. With an adapter the reference is the model without it.
        use_bias_correction_kl (`bool`, defaults to `True`): Multiply the KL term by the probability ratio, which
            keeps it unbiased for samples of an older policy.
        num_iterations (`int`, defaults to `1`): Times that each rollout is trained on.
        epsilon (`float`, defaults to `0.2`): The probability ratio is clipped below `1 - epsilon`.
        epsilon_high (`float`, *optional*): ... and above `1 + epsilon_high`; as `epsilon` if `None`.
        reward_weights (`list[float]`, *optional*): One for each reward function; all one if `None`.
        scale_rewards (`str` or `bool`, defaults to `"group"`): Divide advantages by the standard deviation of the
            rewards of the `"group"` (or `True`), of the `"batch"`, or not at all (`"none"` or `False`).
        loss_type (`str`, defaults to `"dapo"`): `"grpo"`, `"bnpo"`, `"dr_grpo"` or `"dapo"`: how the loss of tokens
            becomes one number.
        mask_truncated_completions (`bool`, defaults to `False`): Leave completions without an end out of the loss.
        vllm_importance_sampling_correction (`bool`, defaults to `True`): Weight the loss by how the trainer's
            probabilities of a completion differ from those of vLLM.
        vllm_importance_sampling_mode (`str`, defaults to `"sequence_mask"`): `"token_truncate"`, `"token_mask"`,
            `"sequence_truncate"` or `"sequence_mask"`: what has a weight of its own, and what happens to weights
            outside the limits.
        vllm_importance_sampling_clip_max (`float`, *optional*, defaults to `3.0`): Upper limit of the weights.
        vllm_importance_sampling_clip_min (`float`, *optional*): Lower limit of the weights.
        vllm_importance_sampling_cap (`float`, *optional*): Old name of `vllm_importance_sampling_clip_max`.

        log_completions (`bool`, defaults to `False`): Print completions with their rewards at every log, and keep
            them as parquet in `output_dir/completions`.
        num_completions_to_print (`int`, *optional*): Print this many; all if `None`.
        log_unique_prompts (`bool`, defaults to `False`): One completion for each prompt in wandb and trackio.

    Raises:
        ValueError: For a value that cannot work, alone or together with others. The message names the option, its
            value, and what would work.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
    ]

    # Defaults of TrainingArguments that GRPO changes
    learning_rate: float = field(default=1e-6, metadata={"help": "Learning rate at the start."})
    logging_steps: float = field(
        default=10, metadata={"help": "Log every so many updates; below 1 it is a share of all updates."}
    )
    gradient_checkpointing: bool | None = field(
        default=None,
        metadata={"help": "Recompute activations in the backward pass to save memory; by default where it is short."},
    )
    bf16: bool | None = field(
        default=None, metadata={"help": "bfloat16 autocast; by default on where the device has it and fp16 is off."}
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Drop every column but prompt; reward functions would not see them."}
    )

    # Model
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments for from_pretrained, as JSON, where the model is given by name."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    disable_dropout: bool = field(default=False, metadata={"help": "Set every dropout of the policy to zero."})

    # Batches
    num_generations: int = field(default=8, metadata={"help": "Completions for each prompt, at least 2."})
    num_generations_eval: int | None = field(
        default=None, metadata={"help": "Completions for each prompt in evaluation; by default num_generations."}
    )
    max_completion_length: int = field(default=512, metadata={"help": "Most tokens of one completion."})
    shuffle_dataset: bool = field(default=True, metadata={"help": "Draw prompts in random order."})
    generation_batch_size: int | None = field(
        default=None, metadata={"help": "Completions of one rollout over all processes."}
    )
    steps_per_generation: int | None = field(
        default=None,
        metadata={"help": "Micro-batches that one rollout feeds; by default gradient_accumulation_steps."},
    )

    # Sampling
    temperature: float = field(default=1.0, metadata={"help": "Divides the logits, in sampling and in the loss."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus mass; 1.0 keeps all tokens."})
    top_k: int = field(default=0, metadata={"help": "Keep this many most likely tokens; 0 keeps all."})
    min_p: float | None = field(
        default=None, metadata={"help": "Drop tokens less likely than this fraction of the most likely one."}
    )
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further sampling options of the engine, as JSON."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Variables for the chat template, as JSON."}
    )
    repetition_penalty: float = field(
        default=1.0, metadata={"help": "Above 1 discourages tokens that occurred already."}
    )

    # vLLM
    use_vllm: bool = field(default=False, metadata={"help": "Sample with vLLM instead of the model being trained."})
    vllm_mode: str = field(default="colocate", metadata={"help": "Where vLLM runs: colocate, in this process."})
    vllm_model_impl: str = field(
        default="vllm", metadata={"help": "Model code that vLLM runs: vllm, transformers or auto."}
    )
    vllm_enable_sleep_mode: bool = field(
        default=False, metadata={"help": "Give vLLM's GPU memory back between rollouts."}
    )
    vllm_sleep_level: int = field(
        default=1, metadata={"help": "Where vLLM's weights go while it sleeps: 1 to host memory, 2 nowhere."}
    )
    vllm_gpu_memory_utilization: float = field(
        default=0.3, metadata={"help": "Share of the GPU's memory that vLLM takes."}
    )
    vllm_max_model_length: int | None = field(
        default=None, metadata={"help": "Most tokens of prompt and completion together in vLLM."}
    )
    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "GPUs that one engine is spread over."})
    vllm_enable_lora: bool | None = field(
        default=None,
        metadata={"help": "True: vLLM serves the adapter or the start fails. False: merged weights. None: choose."},
    )
    vllm_lora_mode: str | None = field(
        default=None,
        metadata={"help": "How vLLM applies the adapter: dynamic, merged into its own weights, or auto, the faster."},
    )
    vllm_share_base: bool = field(
        default=False, metadata={"help": "Hold the base weights once, for trainer and vLLM together."}
    )
    max_lora_rank: int | None = field(
        default=None, metadata={"help": "Rank of vLLM's LoRA buffers; by default computed from the adapter."}
    )
    vllm_recreate_every: int | None = field(
        default=None, metadata={"help": "Rebuild the engine after this many policy updates."}
    )

    # Loss
    beta: float = field(default=0.0, metadata={"help": "Weight of the KL divergence from the reference policy."})
    use_bias_correction_kl: bool = field(
        default=True, metadata={"help": "Multiply the KL term by the probability ratio."}
    )
    num_iterations: int = field(default=1, metadata={"help": "Times that each rollout is trained on."})
    epsilon: float = field(default=0.2, metadata={"help": "The probability ratio is clipped below 1 - epsilon."})
    epsilon_high: float | None = field(
        default=None, metadata={"help": "The ratio is clipped above 1 + epsilon_high; by default epsilon."}
    )
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight for each reward function; by default 1."}
    )
    scale_rewards: str = field(
        default="group",
        metadata={"help": "Divide advantages by the standard deviation of: group (True), batch, or none (False)."},
    )
    loss_type: str = field(default="dapo", metadata={"help": "grpo, bnpo, dr_grpo or dapo."})
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Leave completions without an end out of the loss."}
    )
    vllm_importance_sampling_correction: bool = field(
        default=True, metadata={"help": "Correct for the difference between vLLM's probabilities and the trainer's."}
    )
    vllm_importance_sampling_mode: str = field(
        default="sequence_mask",
        metadata={"help": "token_truncate, token_mask, sequence_truncate or sequence_mask."},
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=3.0, metadata={"help": "Upper limit of the importance weights."}
    )
    vllm_importance_sampling_clip_min: float | None = field(
        default=None, metadata={"help": "Lower limit of the importance weights."}
    )
    vllm_importance_sampling_cap: float | None = field(
        default=None, metadata={"help": "Old name of vllm_importance_sampling_clip_max."}
    )

    # Logging
    log_completions: bool = field(
        default=False, metadata={"help": "Print completions with their rewards, and keep them as parquet."}
    )
    num_completions_to_print: int | None = field(
        default=None, metadata={"help": "Print this many completions; by default all."}
    )
    log_unique_prompts: bool = field(
        default=False, metadata={"help": "One completion for each prompt in wandb and trackio."}
    )

    def __post_init__(self):
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        with accelerate_environment():
            super().__post_init__()
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # there is no device to pin it for, and torch would warn
        if self.gradient_checkpointing is not False:
            kwargs = self.gradient_checkpointing_kwargs or {}
            self.gradient_checkpointing_kwargs = {"use_reentrant": False, **kwargs}
        self.scale_rewards = _scale_rewards(self.scale_rewards)
        self._rename_cap()
        _check_values(self)
        _check_combinations(self)
        _settle_generation_batch(self)
        if self.eval_strategy != "no":
            check_eval_batch(self)

    def _rename_cap(self) -> None:
        if self.vllm_importance_sampling_cap is None:
            return
        warnings.warn(
            "vllm_importance_sampling_cap is the old name of vllm_importance_sampling_clip_max: use the new one.",
            FutureWarning,
            stacklevel=4,
        )
        self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        self.vllm_importance_sampling_cap = None


def accelerate_environment(precision: str | None = None) -> AbstractContextManager[None]:
    """The variables through which transformers up to 4.57 talks to accelerate, for the time of the context.

    `TrainingArguments` would leave them set, and the `Accelerator` knows the precision from there alone. Later
    versions pass it on as an argument, and the variables say the same.

    Args:
        precision (`str`, *optional*): `"bf16"` or `"fp16"`; `None` for what the environment says, or none.
    """
    defaults = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_IPEX": "false"}
    variables = {name: os.environ.get(name, default) for name, default in defaults.items()}
    if precision is not None:
        variables["ACCELERATE_MIXED_PRECISION"] = precision
    return patch_environment(**variables)


def _scale_rewards(value: str | bool) -> str:
    """`True` is the group's standard deviation and `False` none, also as a command line writes them."""
    return {"true": "group", "false": "none"}.get(str(value).lower(), value)


def _one_of(accepted: tuple[str, ...] | dict) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in accepted, f"use one of {', '.join(map(repr, accepted))}"


def _at_least(low: float, why: str = "") -> tuple[Callable[[Any], bool], str]:
    return lambda value: value >= low, f"give at least {low}{why}"


def _whole(low: int, why: str = "") -> tuple[Callable[[Any], bool], str]:
    return lambda value: value == int(value) >= low, f"give a whole number of at least {low}{why}"


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "per_device_train_batch_size": _whole(1),
    "per_device_eval_batch_size": _whole(1),
    "gradient_accumulation_steps": _whole(1),
    "num_generations": _whole(2, ", because an advantage compares the completions of one prompt"),
    "num_generations_eval": _whole(1),
    "max_completion_length": _whole(1),
    "generation_batch_size": _whole(1),
    "steps_per_generation": _whole(1),
    "num_iterations": _whole(1),
    "temperature": (
        lambda value: value > 0,
        "give a value above 0, because the loss divides by it. For the most likely token set top_k=1",
    ),
    "top_p": (lambda value: 0 < value <= 1, "give a value above 0 and at most 1"),
    "top_k": _whole(0, ". 0 keeps all tokens"),
    "min_p": (lambda value: 0 <= value <= 1, "give a value from 0 to 1"),
    "repetition_penalty": (lambda value: value > 0, "give a value above 0; 1 has no effect"),
    "vllm_mode": (
        lambda value: value in VLLM_MODES,
        "only 'colocate' is there so far. Server mode comes later",
    ),
    "vllm_model_impl": _one_of(VLLM_MODEL_IMPLS),
    "vllm_enable_lora": _one_of((True, False)),
    "vllm_lora_mode": _one_of(VLLM_LORA_MODES),
    "vllm_sleep_level": _one_of((1, 2)),
    "vllm_gpu_memory_utilization": (lambda value: 0 < value <= 1, "give a share above 0 and at most 1"),
    "vllm_max_model_length": _whole(2),
    "vllm_tensor_parallel_size": _whole(1),
    "vllm_recreate_every": _whole(1, " policy update, or None to keep the engine"),
    "beta": _at_least(0),
    "epsilon": _at_least(0),
    "epsilon_high": _at_least(0),
    "scale_rewards": _one_of((*SCALE_REWARDS, True, False)),
    "loss_type": _one_of(AGGREGATIONS),
    "vllm_importance_sampling_mode": _one_of(IMPORTANCE_SAMPLING_MODES),
    "vllm_importance_sampling_clip_max": (lambda value: value > 0, "give a value above 0, or None for no limit"),
    "vllm_importance_sampling_clip_min": _at_least(0, ", or None for no limit"),
    "num_completions_to_print": _whole(0),
    "auto_find_batch_size": (
        lambda value: not value,
        "a rollout has a fixed size, which this option would change. Set per_device_train_batch_size",
    ),
}
"""Option to (whether a value can be used, what to do otherwise). `None` is for the option's own type to allow."""


def _check_values(config: GRPOConfig) -> None:
    for name, (accepts, remedy) in _VALUES.items():
        value = getattr(config, name)
        try:
            accepted = value is None or accepts(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}={value!r}, a {type(value).__name__}, cannot be used: {remedy}.") from error
        if not accepted:
            raise ValueError(f"{name}={value!r} cannot be used: {remedy}.")
    for name in ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs"):
        value = getattr(config, name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name}={value!r} is not a dict: give one, or its JSON on a command line.")


def _check_combinations(config: GRPOConfig) -> None:
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low > high:
        raise ValueError(
            f"vllm_importance_sampling_clip_min={low} is above vllm_importance_sampling_clip_max={high}: lower the "
            "first or raise the second."
        )
    if config.vllm_enable_lora and not config.use_vllm:
        raise ValueError(
            "vllm_enable_lora=True has no effect with use_vllm=False: set use_vllm=True, or leave vllm_enable_lora "
            "unset."
        )
    if config.vllm_lora_mode is not None and not config.use_vllm:
        raise ValueError(
            f"vllm_lora_mode={config.vllm_lora_mode!r} has no effect with use_vllm=False: set use_vllm=True, or leave "
            "vllm_lora_mode unset."
        )
    if config.vllm_share_base and not config.use_vllm:
        raise ValueError(
            "vllm_share_base=True has no effect with use_vllm=False: set use_vllm=True, or leave vllm_share_base "
            "unset."
        )
    if config.vllm_enable_lora is False and config.vllm_lora_mode not in (None, "merged"):
        raise ValueError(
            f"vllm_lora_mode={config.vllm_lora_mode!r} contradicts vllm_enable_lora=False, which asks for merged "
            "weights: set vllm_lora_mode='merged', or leave vllm_enable_lora unset."
        )
    if config.max_lora_rank is not None:
        from ..weight_sync.adapter import VLLM_LORA_RANKS  # imports PEFT, which takes its time

        if config.max_lora_rank not in VLLM_LORA_RANKS:
            raise ValueError(
                f"max_lora_rank={config.max_lora_rank} is not a size of vLLM's LoRA buffers: use one of "
                f"{', '.join(map(str, VLLM_LORA_RANKS))}, or leave it unset to have it computed."
            )


def _settle_generation_batch(config: GRPOConfig) -> None:
    """Compute `steps_per_generation` and `generation_batch_size` from each other, and check that they fit."""
    micro_batch = config.per_device_train_batch_size * config.world_size
    described = (
        f"per_device_train_batch_size={config.per_device_train_batch_size} on {config.world_size} process"
        f"{'es' if config.world_size > 1 else ''}"
    )
    group = config.num_generations
    if config.generation_batch_size is None:
        config.steps_per_generation = config.steps_per_generation or config.gradient_accumulation_steps
        config.generation_batch_size = micro_batch * config.steps_per_generation
    elif config.generation_batch_size % micro_batch:
        nearest = _nearest_multiples(config.generation_batch_size, math.lcm(micro_batch, group))
        raise ValueError(
            f"generation_batch_size={config.generation_batch_size} does not divide into micro-batches of "
            f"{micro_batch} ({described}): the nearest that work are {nearest}."
        )
    else:
        steps = config.generation_batch_size // micro_batch
        if config.steps_per_generation not in (None, steps):
            raise ValueError(
                f"generation_batch_size={config.generation_batch_size} and steps_per_generation="
                f"{config.steps_per_generation} contradict each other: with {described} the first means "
                f"steps_per_generation={steps}. Give one of them."
            )
        config.steps_per_generation = steps

    if config.generation_batch_size % group:
        batches = _nearest_multiples(config.generation_batch_size, math.lcm(micro_batch, group))
        groups = [
            size for size in range(2, config.generation_batch_size + 1) if not config.generation_batch_size % size
        ]
        raise ValueError(
            f"A rollout of generation_batch_size={config.generation_batch_size} ({described}, steps_per_generation="
            f"{config.steps_per_generation}) does not hold whole groups of num_generations={group}: the nearest "
            f"generation_batch_size that work are {batches}"
            + (f"; num_generations that work: {', '.join(map(str, groups))}." if groups else ".")
        )


def check_eval_batch(config: GRPOConfig) -> None:
    """Raise unless a batch of evaluation holds whole groups."""
    name = "num_generations" if config.num_generations_eval is None else "num_generations_eval"
    group = getattr(config, name)
    batch = config.per_device_eval_batch_size * config.world_size
    if batch % group:
        step = math.lcm(config.world_size, group) // config.world_size
        nearest = _nearest_multiples(config.per_device_eval_batch_size, step)
        raise ValueError(
            f"per_device_eval_batch_size={config.per_device_eval_batch_size} on {config.world_size} process"
            f"{'es' if config.world_size > 1 else ''} does not hold whole groups of {name}={group}: the nearest "
            f"per_device_eval_batch_size that work are {nearest}."
        )


def _nearest_multiples(value: int, step: int) -> str:
    below, above = value // step * step, -(-value // step) * step
    return " and ".join(str(multiple) for multiple in dict.fromkeys((below, above)) if multiple)
