"""vLLM in the trainer's own process (`vllm_mode="colocate"`)."""

from __future__ import annotations

import gc
import inspect
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig

from ..weight_sync.select import SyncPlan
from . import vllm_worker
from .engine import (
    AdapterModule,
    PolicyMismatchError,
    PolicyUpdate,
    PushReport,
    Rollout,
    SamplingConfig,
    adapter_bytes,
    check_known,
)
from .merged_weights import PristineCopy, merge_error
from .process_state import globals_kept, random_state_kept, vllm_process
from .rewrite import relative_error


@dataclass(frozen=True)
class VllmSettings:
    """How the engine is built. The `vllm_*` fields of [`GRPOConfig`] say what each is for.

    Attributes:
        dtype (`torch.dtype`): Of weights, KV cache and adapter: the trainer's.
        device (`torch.device`): Where it runs.
        seed (`int`): Seed of the engine; each rollout brings one of its own.
        max_num_seqs (`int`): Most sequences decoded at a time.
        stop_strings (`bool`): Whether completions may end at strings, for which vLLM has to turn tokens into text.
    """

    dtype: torch.dtype
    device: torch.device
    seed: int = 0
    max_num_seqs: int = 256
    max_model_length: int | None = None
    gpu_memory_utilization: float = 0.3
    enable_sleep_mode: bool = False
    sleep_level: int = 1
    model_impl: str = "vllm"
    trust_remote_code: bool = False
    stop_strings: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


class VllmEngine:
    """An in-process vLLM that serves the trainer's policy.

    Its weights come from the trainer, never from disk, so whatever base the trainer holds (a revision, weights changed
    in memory, resized embeddings, an initialisation that rewrites the base) is the base that is served. What vLLM sets
    in the process (environment variables, random state) is put back after every call.

    Args:
        plan ([`~trl.weight_sync.SyncPlan`]): How policies arrive.
        config (`PretrainedConfig`): The model's configuration.
        weights ([`~trl.generation.vllm_worker.InitialWeights`]): The base weights, read at every build.
        settings ([`VllmSettings`]): How to build it.
        tokenizer (*optional*): Saved beside the configuration for what vLLM needs a tokenizer for.
    """

    def __init__(
        self,
        plan: SyncPlan,
        config: PretrainedConfig,
        weights: vllm_worker.InitialWeights,
        settings: VllmSettings,
        tokenizer: Any = None,
    ):
        vllm_worker.check_installed()
        self.plan = plan
        self.settings = settings
        self.policy_version: int | None = None
        self._config = config
        self._weights = weights
        self._tokenizer = tokenizer
        # Pristine weights, while what is served is these with the adapter in them.
        self._merged: dict[str, torch.Tensor] | None = None
        # The same where these are the trainer's own: what to put into them while a rollout is sampled, and a copy.
        self._borrowed: dict[str, AdapterModule] | None = None
        self._pristine: PristineCopy | None = None
        self._environment: dict[str, str] = {}
        self._llm: Any = None
        self._build()

    # -- life ---------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self._environment = _engine_variables(self._config, self.settings)
        with (
            tempfile.TemporaryDirectory(prefix="trl-vllm-") as folder,
            globals_kept(),
            self._running(),
            random_state_kept(self.settings.device),
        ):
            _save_config(self._config, self.plan, folder)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(folder)
            from vllm import LLM

            if not _live_engines:
                vllm_worker.note_process_state()
            with vllm_worker.loading_from(self._weights):
                self._llm = LLM(**_llm_arguments(folder, self.plan, self.settings))
        self.max_model_length: int = self._llm.model_config.max_model_len
        _live_engines.add(id(self))

    def recreate(self) -> None:
        """Build the engine anew from the trainer's base weights. The next push brings the policy back."""
        self.close()
        self._build()

    def close(self) -> None:
        """Shut vLLM down and release its memory. May be called twice."""
        if self._llm is None:
            return
        self.policy_version = self._merged = self._borrowed = None
        with self._running():
            llm, self._llm = self._llm, None
            vllm_worker.release(llm)
            del llm
            _live_engines.discard(id(self))
            if not _live_engines:
                vllm_worker.release_process_state()
            gc.collect()
            if self.settings.device.type == "cuda":
                # torch keeps a cuBLAS workspace for every stream there was, and each engine has streams of its own.
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()

    def sleep(self) -> None:
        """Give device memory back, where `vllm_enable_sleep_mode` asks for it: the KV cache and the engine's weights.

        The weights go to host memory (level 1) or nowhere (level 2). What the trainer shares stays where it is.
        """
        if self.settings.enable_sleep_mode:
            with self._running():
                self._llm.sleep(level=self.settings.sleep_level)

    def wake(self) -> None:
        """Undo [`sleep`]. The adapter is checked again: memory that came back wrong is not served."""
        if not self.settings.enable_sleep_mode or not self._llm.llm_engine.is_sleeping():
            return
        with self._running():
            self._llm.wake_up()
            if self.settings.sleep_level == 2:
                self._reload_base()
            elif self.policy_version is not None and self._serves_adapter:
                self._llm.collective_rpc("trl_check_adapter")

    def _reload_base(self) -> None:
        """Fill weights that hold nothing any more, from the trainer. The next push brings the policy back."""
        self.policy_version = self._merged = self._borrowed = None
        shared = {name for each in self._weights.shared for name in each.names}
        tensors = ((name, tensor) for name, tensor in self._weights.tensors() if name not in shared)
        self._llm.collective_rpc("trl_load_tensors", args=(tensors,))
        self._llm.reset_prefix_cache()

    # -- policy -------------------------------------------------------------------------------------------------------

    def push(self, update: PolicyUpdate) -> PushReport:
        """Serve `update` from now on.

        Raises:
            ValueError: When the adapter holds NaN or infinity; the policy before it is still served. When weights with
                the adapter in them would; nothing is served until a push succeeds.
            PolicyMismatchError: When the engine does not hold what was sent. Nothing is served until a push succeeds.
        """
        start = time.perf_counter()
        num_bytes, merge_error = 0, None
        with self._running():
            if update.tensors is not None:
                self.policy_version = None
                num_bytes += sum(self._llm.collective_rpc("trl_load_tensors", args=(update.tensors(),)))
                self._llm.reset_prefix_cache()
            if update.base is not None:
                moved, merge_error = self._merge_adapter(update)
                num_bytes += moved
            elif update.adapter:
                num_bytes += self._push_adapter(update)
        self.policy_version = update.version
        return PushReport(update.version, num_bytes, time.perf_counter() - start, merge_error)

    def _push_adapter(self, update: PolicyUpdate) -> int:
        try:
            num_bytes = sum(self._llm.collective_rpc("trl_push_adapter", args=(update.adapter,)))
        except PolicyMismatchError:
            self.policy_version = None
            raise
        if self._merged is not None:
            self.policy_version = None
            if self._borrowed is None:
                self._llm.collective_rpc("trl_unmerge_adapter", args=(self._merged,))
            self._merged = self._borrowed = None
        return num_bytes

    def _merge_adapter(self, update: PolicyUpdate) -> tuple[int, float]:
        self._llm.collective_rpc("trl_check_finite", args=(update.adapter,))
        self.policy_version = None
        self._merged = update.base
        if self.plan.share_base:
            error = self._borrow(update)
        else:
            sums = self._llm.collective_rpc("trl_merge_adapter", args=(update.adapter, update.base))
            error = relative_error(torch.tensor(sums))
        self._llm.reset_prefix_cache()  # which tells adapters apart, not weights
        return adapter_bytes(update.adapter), error

    def _borrow(self, update: PolicyUpdate) -> float:
        """Get ready to put the adapter into weights that are the trainer's too. Returns the error of doing so."""
        if self._pristine is None:
            self._pristine = PristineCopy(update.base)
        self._borrowed = {
            name: module._replace(lora_a=module.lora_a.clone(), lora_b=module.lora_b.clone())
            for name, module in update.adapter.items()
        }
        return merge_error(update.adapter, update.base, self.settings.dtype)

    @contextmanager
    def _weights_borrowed(self) -> Iterator[None]:
        """While a rollout is sampled, the adapter is in the trainer's weights. Nobody else ever sees it there."""
        if self._borrowed is None:
            yield
            return
        self._pristine.check(self._merged)
        try:
            self._llm.collective_rpc("trl_merge_adapter", args=(self._borrowed, self._merged))
            yield
        finally:
            self._llm.collective_rpc("trl_unmerge_adapter", args=(self._pristine.tensors,))

    @property
    def _serves_adapter(self) -> bool:
        """Whether requests are served by the base weights and the adapter in its slot."""
        return self.plan.has_lora_slots and self._merged is None

    def _adapter_request(self) -> Any:
        """What a request names to be served with the adapter. A name per version keeps the prefix cache apart."""
        if not self._serves_adapter:
            return None
        from vllm.lora.request import LoRARequest

        name = f"policy@{self.policy_version}"
        return LoRARequest(lora_name=name, lora_int_id=vllm_worker.ADAPTER_ID, lora_path=name)

    def _check_policy(self) -> None:
        if self._llm is None:
            raise RuntimeError("The engine is closed.")
        if self.policy_version is None:
            raise PolicyMismatchError(
                "The engine serves no policy: none was pushed since it was built, or the last push failed half way. "
                "Push one first (`trainer.weight_sync.push(trainer.rollout_engine)`)."
            )
        if self._serves_adapter and not all(self._llm.collective_rpc("trl_adapter_present")):
            self.policy_version = None
            raise PolicyMismatchError(
                "vLLM has dropped the adapter, so it would answer with the base model. Push the policy again."
            )

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise `ValueError` for options in `sampling.extra` that vLLM does not have."""
        with self._running():
            from vllm import SamplingParams

            check_known(sampling.extra, inspect.signature(SamplingParams).parameters.keys(), "vLLM")
        taken = sorted(sampling.extra.keys() & _SET_BY_ENGINE)
        if taken:
            raise ValueError(
                f"generation_kwargs has {', '.join(map(repr, taken))}, which the engine sets itself, to get one "
                "completion for each prompt with the log probability of every token. Leave it out (num_generations "
                "asks for several completions)."
            )

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def generate(
        self, prompt_token_ids: Sequence[Sequence[int]], sampling: SamplingConfig, seed: int | None = None
    ) -> Rollout:
        """Sample one completion for each prompt.

        Args:
            prompt_token_ids (`Sequence[Sequence[int]]`): Prompts without padding.
            sampling ([`SamplingConfig`]): How to sample.
            seed (`int`, *optional*): Makes the call repeatable, also after a rebuild.

        Raises:
            ValueError: When a prompt leaves no room in the engine's context.
            PolicyMismatchError: When the engine does not serve the policy that was pushed last.
        """
        self._check_prompts(prompt_token_ids)
        with self._running(), random_state_kept(self.settings.device, seed), self._weights_borrowed():
            self._check_policy()
            prompts = [{"prompt_token_ids": list(token_ids)} for token_ids in prompt_token_ids]
            parameters = _sampling_parameters(sampling)
            try:
                outputs = self._llm.generate(prompts, parameters, lora_request=self._adapter_request(), use_tqdm=False)
            except BaseException:
                vllm_worker.abort_unfinished(self._llm)
                raise
        completions = [output.outputs[0] for output in outputs]
        return Rollout(
            completion_ids=[list(completion.token_ids) for completion in completions],
            logprobs=[list(completion.logprobs.logprobs) for completion in completions],
            policy_version=self.policy_version,
        )

    def _check_prompts(self, prompt_token_ids: Sequence[Sequence[int]]) -> None:
        for index, token_ids in enumerate(prompt_token_ids):
            if not 0 < len(token_ids) < self.max_model_length:
                raise ValueError(
                    f"Prompt {index} has {len(token_ids)} tokens; the engine's context holds {self.max_model_length}, "
                    "completion included. Shorten or filter the prompts, or raise vllm_max_model_length."
                )

    @contextmanager
    def _running(self) -> Iterator[None]:
        """vLLM's surroundings: its environment variables, and its device as the current one."""
        with ExitStack() as stack:
            stack.enter_context(vllm_process(self._environment))
            if self.settings.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.settings.device))
            yield


# Engines of this process that are alive; vLLM's process-wide state may go only with the last of them.
_live_engines: set[int] = set()


def _llm_arguments(folder: str, plan: SyncPlan, settings: VllmSettings) -> dict[str, Any]:
    arguments = {
        "model": folder,
        "load_format": vllm_worker.LOAD_FORMAT,
        "worker_extension_cls": f"{vllm_worker.WorkerExtension.__module__}.{vllm_worker.WorkerExtension.__qualname__}",
        "skip_tokenizer_init": not settings.stop_strings,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "seed": settings.seed,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.max_model_length,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_sleep_mode": settings.enable_sleep_mode,
        "model_impl": settings.model_impl,
        "trust_remote_code": settings.trust_remote_code,
        # The log probability that a token was really sampled with, after temperature and truncation.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if plan.has_lora_slots:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": plan.max_lora_rank,
            # LoRA kernels cost time in every module that has them, so only the adapter's own modules get them.
            "lora_target_modules": list(plan.target_modules),
        }
    if settings.device.type == "cpu":
        # The CPU's default block is so large that short prompts never share a prefix.
        arguments |= {"enforce_eager": True, "block_size": 32}
    return arguments | dict(settings.extra)


# What a rollout depends on.
_SET_BY_ENGINE = frozenset(
    {"n", "logprobs", "prompt_logprobs", "flat_logprobs", "logprob_token_ids", "output_kind", "seed"}
)


def _sampling_parameters(sampling: SamplingConfig) -> Any:
    from vllm import SamplingParams

    arguments = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": "stop" in sampling.extra,  # which is looked for in the text
    }
    return SamplingParams(**(arguments | dict(sampling.extra)))


def _save_config(config: PretrainedConfig, plan: SyncPlan, folder: str) -> None:
    config = type(config).from_dict(config.to_dict())
    # A quantised base (GGUF, bitsandbytes) is sent as the trainer computes with it: dequantised.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if plan.untie_embeddings:
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)


def _engine_variables(config: PretrainedConfig, settings: VllmSettings) -> dict[str, str]:
    """Environment variables that the engine needs. A cache size that the user has set stays as set."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if settings.device.type == "cpu" and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(_cpu_cache_gigabytes(config, settings))
    return variables


def _cpu_cache_gigabytes(config: PretrainedConfig, settings: VllmSettings) -> int:
    """KV cache for every sequence at full length, but no more than `gpu_memory_utilization` of the host's memory."""
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * heads * head_size * settings.dtype.itemsize
    length = settings.max_model_length or text.max_position_embeddings
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = min(per_token * length * settings.max_num_seqs, settings.gpu_memory_utilization * host)
    return max(1, round(wanted / 2**30))
