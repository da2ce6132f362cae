"""Group relative policy optimisation: the order of things in a training step.

rows of the dataset -> [`GRPOTrainer._sample`] -> [`GRPOTrainer._reward`] -> advantages -> micro-batches ->
[`GRPOTrainer.compute_loss`]. The arithmetic is in `grpo_loss.py`, what becomes of rows and tokens in `rollouts.py`.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, gather_object
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    set_seed,
)

from ..generation import PushReport, SamplingConfig, check_engine, create_rollout_engine
from ..rewards.evaluate import RewardEvaluator, RewardFunc
from ..weight_sync import WeightSync
from . import memory
from .callbacks import CompletionsCallback, show_rewards_on_progress_bar
from .grpo_config import GRPOConfig, accelerate_environment, check_eval_batch
from .grpo_loss import LossConfig, LossInputs, aggregate_rewards, group_advantages, grpo_loss
from .lean_layers import LeanLayers
from .model_loading import (
    check_types,
    frozen_copy,
    inputs_not_cast,
    let_gradients_through_checkpoints,
    load_policy,
    load_tokenizer,
    settle_padding,
    short_name,
    stop_token_ids,
    tuner_layers,
)
from .rollouts import (
    MicroBatch,
    Samples,
    check_prompts_fit,
    decode_completions,
    longest_prompt,
    micro_batch_order,
    split_into_micro_batches,
    tokenize_prompts,
)
from .token_logprobs import TokenScorer
from .utils import MetricBuffer, RepeatSampler, check_datasets, derived_seed


if TYPE_CHECKING:
    import datasets


logger = logging.getLogger(__name__)


class GRPOTrainer(Trainer):
    """Trains a model with GRPO (https://huggingface.co/papers/2402.03300).

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`): Hub id, path, or the model itself.
        reward_funcs (one or a list of): Function, coroutine function, sequence-classification model, or hub id or path
            of one. See [`~trl.rewards.evaluate.RewardEvaluator`] for what a function is called with.
        args ([`GRPOConfig`], *optional*): Options; by default those of `GRPOConfig("{model}-GRPO")`.
        train_dataset (`Dataset`): Has a column `prompt`, text or messages. All columns go to the reward functions.
        eval_dataset (`Dataset` or `dict`, *optional*): The same for evaluation.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The tokenizer; by default that of the model's name.
        reward_processing_classes (tokenizer or list, *optional*): Tokenizers of reward models.
        callbacks (`list[TrainerCallback]`, *optional*): In addition to the default ones.
        optimizers (`tuple`, defaults to `(None, None)`): Optimizer and scheduler; by default as `args` says.
        quantization_config (*optional*): For loading the model by name.
        peft_config (`PeftConfig`, *optional*): Adapter to train; by default what the model has trainable is trained.

    Attributes:
        rollout_engine ([`~trl.generation.RolloutEngine`]): Samples the completions.
        sync_plan ([`~trl.weight_sync.SyncPlan`] or `None`): How the policy gets there; `None` without vLLM.
        weight_sync ([`~trl.weight_sync.WeightSync`]): Brings it there.
        ref_model (`PreTrainedModel` or `None`): Frozen copy of a model that is trained whole with `beta` above 0.

    Raises:
        ValueError, TypeError: For arguments that cannot work, before anything is loaded where that is possible.
        ImportError: When `use_vllm=True` and vLLM is missing or of an unsupported version.

    Example:

    ```python
    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=lambda completions, **kwargs: [-float(len(completion)) for completion in completions],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["The sky is", "The sun is"] * 100}),
        peft_config=LoraConfig(),
    )
    trainer.train()
    ```
    """

    _tag_names = ("trl", "grpo")

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        args: GRPOConfig | None = None,
        train_dataset: datasets.Dataset | None = None,
        eval_dataset: datasets.Dataset | dict[str, datasets.Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        args = args or GRPOConfig(f"{short_name(model)}-GRPO")
        check_types(args, peft_config)
        check_engine(args)
        check_datasets(train_dataset, eval_dataset, args.generation_batch_size, args.num_generations)
        set_seed(args.seed)  # as Trainer will, but a new adapter draws its start before
        policy = load_policy(model, args, peft_config, quantization_config)
        tokenizer = load_tokenizer(policy, args) if processing_class is None else processing_class
        settle_padding(tokenizer, policy)
        reference = frozen_copy(policy) if args.beta > 0 and not isinstance(policy, PeftModel) else None
        args._n_gpu = min(args.n_gpu, 1)  # one process, one GPU: never torch.nn.DataParallel
        super().__init__(
            model=policy,
            args=args,
            data_collator=_rows,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        # The loss is not scaled by a number of items: transformers takes the mean over the micro-batches of an update.
        self.model_accepts_loss_kwargs = False
        if hasattr(policy, "add_model_tags"):
            policy.add_model_tags(list(self._tag_names))
        self.ref_model = None
        if reference is not None:
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)
        self.reward_evaluator = RewardEvaluator(
            reward_funcs, reward_processing_classes, args.reward_weights, device=self.accelerator.device
        )
        self.loss_config = _loss_config(args)
        self.sampling = _sampling_config(args, stop_token_ids(policy, tokenizer))
        self._scorer = TokenScorer(policy, args.temperature, fused=not args.torch_compile)
        self._ref_scorer = self._scorer if reference is None else TokenScorer(reference, args.temperature)
        self._kept_layers: list[nn.Module] = []  # that keep their activations although others are recomputed
        self._layers_under_autocast = tuner_layers(policy) if args.bf16 or args.fp16 else []
        self._lean_layers = None
        sharded = self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)
        if not sharded and not args.torch_compile:
            self._lean_layers = LeanLayers(policy, under_autocast=args.bf16 or args.fp16)
        self._metrics = {"train": MetricBuffer(), "eval": MetricBuffer()}
        self._micro_batches: list[MicroBatch] = []
        self._position = 0  # micro-batches of this epoch that were trained on
        self._epoch = 0
        self._num_eval_rollouts = 0
        self._add_callbacks()
        self._start_engine(policy, tokenizer)
        self._settle_checkpointing(policy)

    def _add_callbacks(self) -> None:
        self.add_callback(_TrainingEvents(self))
        show_rewards_on_progress_bar(self)
        self._completions = None
        if self.args.log_completions:
            self._completions = CompletionsCallback(
                self.args.generation_batch_size, self.args.num_completions_to_print, self.args.log_unique_prompts
            )
            self.add_callback(self._completions)

    def _start_engine(self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        policy = self.accelerator.unwrap_model(policy)
        # Before the engine is built, where that can be known: building it takes its time.
        context = self.args.vllm_max_model_length if self.args.use_vllm else None
        if context is not None:
            self._check_prompts_fit(tokenizer, context)
        self.rollout_engine, self.sync_plan = create_rollout_engine(policy, self.args, tokenizer, self.accelerator)
        self.weight_sync = WeightSync(policy, self.sync_plan, recreate_every=self.args.vllm_recreate_every)
        self._close = weakref.finalize(self, _close_all, self.rollout_engine, self.reward_evaluator)
        self.rollout_engine.check_sampling(self.sampling)
        if context is None and self.rollout_engine.max_model_length is not None:
            self._check_prompts_fit(tokenizer, self.rollout_engine.max_model_length)

    def _check_prompts_fit(self, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
        datasets = {"train_dataset": self.train_dataset}
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        datasets |= {f"eval_dataset[{name!r}]" if name else "eval_dataset": each for name, each in evaluated.items()}
        for argument, dataset in datasets.items():
            if dataset is not None:
                check_prompts_fit(argument, dataset, tokenizer, context, self.args.chat_template_kwargs)

    def _settle_checkpointing(self, policy: nn.Module) -> None:
        """Decide on gradient checkpointing where the user has not: by the memory that is left beside the engine."""
        if self.args.gradient_checkpointing is None:
            self.rollout_engine.sleep()  # as while training
            layers = memory.checkpointing_layers(policy)
            number = self._layers_to_checkpoint(policy, layers)
            # The first ones recompute: when the backward pass reaches them, the others have let go of theirs.
            self._kept_layers = layers[number:]
            self.args.gradient_checkpointing = number > 0
        if self.args.gradient_checkpointing:
            let_gradients_through_checkpoints(policy, self.args.gradient_checkpointing_kwargs)

    def _layers_to_checkpoint(self, policy: nn.Module, layers: list[nn.Module]) -> int:
        device = self.accelerator.device
        free = memory.free_bytes(device)
        # Shares of a sharded model are gathered in the backward pass, which processes must not disagree on.
        if free is None or not layers or self.accelerator.num_processes > 1:
            return max(1, len(layers))

        def forward(length: int) -> Any:
            with self.accelerator.autocast(), self._layers_for_training():
                return self._scorer(policy, MicroBatch.of_zeros(1, length, device), with_entropy=True)

        was_training = policy.training
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            estimate = memory.estimate_activations(policy.train(), forward)
        policy.train(was_training)
        prompt = longest_prompt(self.train_dataset, self.processing_class, self.args.chat_template_kwargs)
        sequences, length = self.args.per_device_train_batch_size, prompt + self.args.max_completion_length
        number, why = memory.layers_to_checkpoint(estimate, free, sequences, length, len(layers))
        logger.info(why)
        return number

    def close(self) -> None:
        """Close the rollout engine and release what it holds. May be called twice; the trainer cannot sample then."""
        self._close()

    def create_accelerator_and_postprocess(self) -> None:
        """As `Trainer` does, with the precision where every version of it looks."""
        with accelerate_environment("fp16" if self.args.fp16 else "bf16" if self.args.bf16 else None):
            super().create_accelerator_and_postprocess()

    # -- data ---------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Batches of rows: the whole rollout of a process, again and again for each of its micro-batches."""
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self._train_batch_size * self.args.steps_per_generation,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> RepeatSampler:
        self._train_sampler = RepeatSampler(
            self.train_dataset if train_dataset is None else train_dataset,
            mini_repeat_count=self.args.num_generations,
            batch_size=self.args.generation_batch_size // self.args.num_generations,
            repeat_count=self._uses_of_rollout,
            shuffle=self.args.shuffle_dataset,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )
        return self._train_sampler

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of rows, each prompt as often as it gets completions."""
        check_eval_batch(self.args)
        self._num_eval_rollouts = 0
        return super().get_eval_dataloader(eval_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> RepeatSampler:
        return RepeatSampler(eval_dataset, self._group_size("eval"), shuffle=False)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["prompt"]

    @property
    def _uses_of_rollout(self) -> int:
        """Micro-batches that one rollout feeds, repetitions included."""
        return self.args.steps_per_generation * self.args.num_iterations

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _group_size(self, mode: str) -> int:
        if mode == "eval" and self.args.num_generations_eval is not None:
            return self.args.num_generations_eval
        return self.args.num_generations

    # -- a step -------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: list[dict[str, Any]], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward pass of the next micro-batch."""
        model.train()
        batch = self._prepare_inputs(inputs)
        with self._layers_for_training():
            return super().training_step(model, batch, num_items_in_batch)

    @contextmanager
    def _layers_for_training(self) -> Iterator[None]:
        with inputs_not_cast(self._layers_under_autocast):
            with nullcontext() if self._lean_layers is None else self._lean_layers.active():
                yield

    def _prepare_inputs(self, rows: list[dict[str, Any]] | MicroBatch) -> MicroBatch:
        """The next micro-batch; samples a new rollout from `rows` when the one before is used up."""
        if isinstance(rows, MicroBatch):
            return rows
        if self._mode == "eval":
            self._num_eval_rollouts += 1
            seed = derived_seed(self.args.seed, 1, self._num_eval_rollouts, self.args.process_index)
            return self._roll_out(rows, seed, num_micro_batches=1)[0]
        use = self._position % self._uses_of_rollout
        if use == 0 or not self._micro_batches:
            rollout = self._position // self._uses_of_rollout
            seed = derived_seed(self.args.seed, 0, self._epoch, rollout, self.args.process_index)
            self._micro_batches = self._roll_out(rows, seed, self.args.steps_per_generation)
        self._position += 1
        return self._micro_batches[use % self.args.steps_per_generation]

    def _roll_out(self, rows: list[dict[str, Any]], seed: int, num_micro_batches: int) -> list[MicroBatch]:
        """Sample completions for `rows`, reward them, and make micro-batches of them."""
        mode = self._mode
        samples = self._sample([row["prompt"] for row in rows], seed)
        advantages, num_tokens = self._reward(samples, rows)
        batches = split_into_micro_batches(
            samples,
            advantages,
            num_tokens / (self.accelerator.num_processes * num_micro_batches),
            num_micro_batches,
            self._order(samples, seed) if num_micro_batches > 1 else range(len(rows)),
            self.processing_class.pad_token_id,
            self.args.mask_truncated_completions,
        )
        batches = [batch.to(self.accelerator.device) for batch in batches]
        self._add_fixed_logprobs(batches, mode)
        return batches

    def _order(self, samples: Samples, seed: int) -> list[int]:
        lengths = [
            len(prompt) + len(completion)
            for prompt, completion in zip(samples.prompt_ids, samples.completion_ids, strict=True)
        ]
        size_of_update = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return micro_batch_order(lengths, seed, size_of_update, by_length=self.args.loss_type != "bnpo")

    def _sample(self, prompts: list[Any], seed: int) -> Samples:
        """Bring the engine to the current policy and sample one completion for each prompt."""
        prompt_ids = tokenize_prompts(prompts, self.processing_class, self.args.chat_template_kwargs)
        self.rollout_engine.wake()
        report = self.weight_sync.push(self.rollout_engine)
        start = time.perf_counter()
        rollout = self.rollout_engine.generate(prompt_ids, self.sampling, seed)
        seconds = time.perf_counter() - start
        self.rollout_engine.sleep()
        num_tokens = sum(len(token_ids) for token_ids in rollout.completion_ids)
        self.weight_sync.rolled_out(seconds, num_tokens, len(prompts))
        self._record_rollout(report, num_tokens / seconds)
        asked, completions = decode_completions(prompts, rollout.completion_ids, self.processing_class)
        ends = {*self.sampling.stop_token_ids, self.processing_class.pad_token_id}
        truncated = [not token_ids or token_ids[-1] not in ends for token_ids in rollout.completion_ids]
        return Samples(asked, prompt_ids, completions, rollout.completion_ids, rollout.logprobs, truncated)

    def _reward(self, samples: Samples, rows: list[dict[str, Any]]) -> tuple[Tensor, int]:
        """Advantages `[N]` of this process's samples, and how many tokens count in the loss of all processes."""
        mode = self._mode
        extra: dict[str, list[Any]] = {}
        rewards_per_func = self.reward_evaluator.evaluate(
            samples.prompts,
            samples.completions,
            samples.completion_ids,
            {name: [row[name] for row in rows] for name in rows[0]},
            self.state,
            log_extra=extra.__setitem__,
            log_metric=lambda name, value: self._metrics[mode].add({name: value}),
        )
        lengths = [
            [len(prompt), len(completion), truncated]
            for prompt, completion, truncated in zip(
                samples.prompt_ids, samples.completion_ids, samples.truncated, strict=True
            )
        ]
        # One collective and one wait for the device in a rollout; float32 holds lengths exactly.
        table = torch.cat([rewards_per_func, torch.tensor(lengths).to(rewards_per_func)], dim=1)
        table = self.accelerator.gather(table).cpu()
        rewards_per_func, lengths = table[:, :-3], table[:, -3:]

        group = self._group_size(mode)
        rewards = aggregate_rewards(rewards_per_func, self.reward_evaluator.weights.cpu())
        advantages, std = group_advantages(rewards, group, self.args.scale_rewards)
        self._record(mode, rewards_per_func, rewards, std, lengths)
        start = self.accelerator.process_index * len(rows)
        local = slice(start, start + len(rows))
        if self._completions is not None:
            self._record_completions(mode, samples, rewards_per_func[local], advantages[local], extra)
        counted = lengths[:, 1] * (1 - lengths[:, 2]) if self.args.mask_truncated_completions else lengths[:, 1]
        return advantages[local], int(counted.sum())

    @torch.no_grad()
    def _add_fixed_logprobs(self, batches: list[MicroBatch], mode: str) -> None:
        """Log probabilities that stay as they are while the samples are used: of the old policy and the reference.

        The old policy's are needed where a sample is still used after an update. Until then it is the current policy,
        and the loss takes its own.
        """
        needs_old = mode == "train" and self.args.gradient_accumulation_steps % self._uses_of_rollout != 0
        if not needs_old and self.args.beta == 0:
            return
        self.model.eval()  # no dropout, as in the engine
        for batch in batches:
            if needs_old:
                batch.old_logprobs = self._logprobs(batch)
            if self.args.beta != 0:
                batch.ref_logprobs = self._reference_logprobs(batch)
        self.model.train(mode == "train")

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        with self.compute_loss_context_manager(), self._layers_for_training():
            return self._scorer(self.model, batch)[0]

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        if self.ref_model is None:
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                return self._logprobs(batch)
        with self.compute_loss_context_manager():
            return self._ref_scorer(self.ref_model, batch)[0]

    def compute_loss(
        self, model: nn.Module, inputs: MicroBatch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Loss of one micro-batch; the mean over the micro-batches of an update is what the optimizer sees."""
        if return_outputs:
            raise ValueError("return_outputs=True is not possible: GRPO computes a loss only.")
        logprobs, entropies = self._scorer(model, inputs, with_entropy=True)
        outputs = grpo_loss(
            LossInputs(
                logprobs=logprobs,
                mask=inputs.loss_mask,
                advantages=inputs.advantages,
                old_logprobs=inputs.old_logprobs,
                sampling_logprobs=inputs.sampling_logprobs,
                ref_logprobs=inputs.ref_logprobs,
                entropies=entropies,
                normalizer=inputs.normalizer,
            ),
            self.loss_config,
        )
        self._metrics[self._mode].add(outputs.metrics)
        return outputs.loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Loss of one batch of evaluation; there are no predictions."""
        batch = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, batch), None, None

    def floating_point_ops(self, inputs: Any) -> int:
        """Zero: what is counted would be rows of text."""
        return 0

    # -- metrics ------------------------------------------------------------------------------------------------------

    def _record_rollout(self, report: PushReport | None, tokens_per_second: float) -> None:
        metrics = {"rollout/tokens_per_second": tokens_per_second}
        if report is not None and self.sync_plan is not None:
            metrics |= {"sync/push_time": report.seconds, "sync/bytes": report.num_bytes}
            if self.sync_plan.sends_adapter:
                metrics["sync/mode"] = float(report.merge_error is not None)
            if report.merge_error is not None:
                metrics["sync/merge_error"] = report.merge_error
        self._metrics[self._mode].add(metrics)

    def _record(self, mode: str, rewards_per_func: Tensor, rewards: Tensor, std: Tensor, lengths: Tensor) -> None:
        prompt_lengths, completion_lengths, truncated = lengths.unbind(dim=1)
        if mode == "train":
            self.state.num_input_tokens_seen += int(prompt_lengths.sum() + completion_lengths.sum())
        ended = completion_lengths[truncated == 0]
        ended = ended if len(ended) else torch.zeros(1)
        metrics = {
            "num_tokens": float(self.state.num_input_tokens_seen),
            "reward": rewards.mean(),
            "reward_std": std.mean(),
            "frac_reward_zero_std": torch.isclose(std, torch.zeros_like(std)).float().mean(),
            "completions/clipped_ratio": truncated.mean(),
        }
        for name, values in (("length", completion_lengths), ("terminated_length", ended)):
            metrics[f"completions/mean_{name}"] = values.mean()
            metrics[f"completions/min_{name}"] = values.min()
            metrics[f"completions/max_{name}"] = values.max()
        for name, values in zip(self.reward_evaluator.names, rewards_per_func.unbind(dim=1), strict=True):
            given = values[~values.isnan()]
            metrics[f"rewards/{name}/mean"] = given.mean()
            metrics[f"rewards/{name}/std"] = given.std() if len(given) > 1 else torch.zeros(())
        self._metrics[mode].add(metrics)

    def _record_completions(
        self, mode: str, samples: Samples, rewards: Tensor, advantages: Tensor, extra: dict[str, list[Any]]
    ) -> None:
        decode = self.processing_class.batch_decode
        columns = {
            "prompts": decode(samples.prompt_ids, skip_special_tokens=True),
            "completions": decode(samples.completion_ids, skip_special_tokens=True),
            "advantages": advantages.tolist(),
        }
        named = dict(zip(self.reward_evaluator.names, rewards.T.tolist(), strict=True))
        # Every process gives what it has; the table is made on the main one.
        parts = gather_object([{"columns": columns, "rewards": named, "extra": extra}])
        if self.accelerator.is_main_process:
            self._completions.record(
                mode,
                rewards=_joined([part["rewards"] for part in parts]),
                extra=_joined([part["extra"] for part in parts]),
                **_joined([part["columns"] for part in parts]),
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `logs`, and with the loss of training the metrics collected since it was last logged."""
        if "loss" in logs or "train_loss" in logs:
            logs = {**logs, **self._metrics["train"].pop()}
        super().log(logs, start_time)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate. The metrics come with the result, so that one can choose the best model by them."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self._metrics["eval"].pop()
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    # -- life of the policy -------------------------------------------------------------------------------------------

    def _start_training(self, dataloader: DataLoader) -> None:
        """Find out where in the data a run goes on. The policy may have come from a checkpoint."""
        for layer in self._kept_layers:
            layer.gradient_checkpointing = False  # which transformers has just set for all
        self.weight_sync.policy_changed()
        accumulated = self.args.gradient_accumulation_steps
        epochs, updates = divmod(self.state.global_step, -(-len(dataloader) // accumulated))
        self._epoch = epochs - 1
        self._next_position = 0 if self.args.ignore_data_skip else updates * accumulated

    def _start_epoch(self) -> None:
        self._epoch += 1
        self._position, self._next_position = self._next_position, 0
        self._train_sampler.epoch = self._epoch
        if self._position % self._uses_of_rollout == 0:
            self._micro_batches = []

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.weight_sync.policy_changed()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._position % self._uses_of_rollout:
            folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            torch.save([asdict(batch) for batch in self._micro_batches], self._rollout_file(folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.weight_sync.policy_changed()
        path = self._rollout_file(resume_from_checkpoint)
        self._micro_batches = []
        if os.path.isfile(path):
            saved = torch.load(path, map_location="cpu", weights_only=True)
            self._micro_batches = [MicroBatch(**batch).to(self.accelerator.device) for batch in saved]

    def _rollout_file(self, folder: str) -> str:
        """Where a checkpoint keeps a rollout that is not used up, so that a resumed run goes on with it."""
        return os.path.join(folder, f"rollout_{self.args.process_index}.pt")


class _TrainingEvents(TrainerCallback):
    """Tells the trainer what `transformers.Trainer` only tells to callbacks."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = weakref.proxy(trainer)

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self._trainer._start_training(train_dataloader)

    def on_epoch_begin(self, args, state, control, **kwargs):
        self._trainer._start_epoch()

    def on_step_begin(self, args, state, control, **kwargs):
        self._started = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._trainer.weight_sync.policy_changed()

    def on_step_end(self, args, state, control, **kwargs):
        self._trainer._metrics["train"].add({"step_time": time.perf_counter() - self._started})


def _rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows


def _joined(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Columns of all processes, one below the other."""
    joined = defaultdict(list)
    for part in parts:
        for name, values in part.items():
            joined[name] += values
    return dict(joined)


def _close_all(*closed: Any) -> None:
    for each in closed:
        each.close()


def _loss_config(args: GRPOConfig) -> LossConfig:
    return LossConfig(
        max_completion_length=args.max_completion_length,
        loss_type=args.loss_type,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        beta=args.beta,
        use_bias_correction_kl=args.use_bias_correction_kl,
        importance_sampling_correction=args.vllm_importance_sampling_correction,
        importance_sampling_mode=args.vllm_importance_sampling_mode,
        importance_sampling_clip_max=args.vllm_importance_sampling_clip_max,
        importance_sampling_clip_min=args.vllm_importance_sampling_clip_min,
    )


def _sampling_config(args: GRPOConfig, stop_token_ids: tuple[int, ...]) -> SamplingConfig:
    return SamplingConfig(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=stop_token_ids,
        extra=args.generation_kwargs or {},
    )
