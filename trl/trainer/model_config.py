"""Which model is trained, and as which adapter, from the command line or a YAML file."""

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig


DTYPES = ("auto", "bfloat16", "float16", "float32")
QUANT_TYPES = ("fp4", "nf4")
QUANT_STORAGES = ("uint8", "bfloat16", "float16", "float32", "float64")


@dataclass
class ModelConfig:
    """The model and its LoRA adapter, as options of a script.

    Args:
        model_name_or_path (`str`, *optional*): Hub id or local folder of the base model.
        model_revision (`str`, defaults to `"main"`): Branch, tag or commit of the model on the hub.
        dtype (`str`, *optional*, defaults to `"float32"`): Type that the weights are loaded in: `"float32"`,
            `"bfloat16"`, `"float16"`, or `"auto"` for the one they are stored in.
        attn_implementation (`str`, *optional*): Attention of the trainer's model, `"sdpa"` or
            `"flash_attention_2"` for example. `None` leaves the choice to transformers.
        use_peft (`bool`, defaults to `False`): Train a LoRA adapter. Without it every weight is trained and the
            `lora_*` options have no effect.
        lora_r (`int`, defaults to `16`): Rank of the adapter.
        lora_alpha (`int`, defaults to `32`): The adapter's output is multiplied by `lora_alpha / lora_r`.
        lora_dropout (`float`, defaults to `0.05`): Dropout on the adapter's input.
        lora_target_modules (`list[str]` or `str`, *optional*): Names of the modules that get an adapter.
            `"all-linear"` alone, or a regular expression alone, is handed to PEFT as a string. `None` takes PEFT's
            choice for the architecture.
        lora_target_parameters (`list[str]`, *optional*): Parameters that get an adapter without being modules of
            their own, such as the experts of a mixture model.
        lora_modules_to_save (`list[str]`, *optional*): Modules that are trained whole and saved beside the adapter.
        lora_task_type (`str`, defaults to `"CAUSAL_LM"`): PEFT's task type.
        use_rslora (`bool`, defaults to `False`): Scale by `lora_alpha / sqrt(lora_r)`
            ([rank-stabilised LoRA](https://arxiv.org/abs/2312.03732)).
        use_dora (`bool`, defaults to `False`): Learn magnitude and direction apart
            ([DoRA](https://arxiv.org/abs/2402.09353)).
        load_in_8bit (`bool`, defaults to `False`): Hold the base weights in 8 bits (bitsandbytes).
        load_in_4bit (`bool`, defaults to `False`): Hold the base weights in 4 bits (bitsandbytes).
        bnb_4bit_quant_type (`str`, defaults to `"nf4"`): `"nf4"` or `"fp4"`.
        use_bnb_nested_quant (`bool`, defaults to `False`): Quantise the quantisation constants as well.
        bnb_4bit_quant_storage (`str`, *optional*): Type that the packed 4-bit weights are stored as. FSDP needs it to
            be the type of the other weights.

    Raises:
        ValueError: For 8 and 4 bits at once, and for a value that is not among those listed.
    """

    _argument_group_name = "model and adapter"

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or local folder of the base model."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model on the hub."})
    dtype: str | None = field(
        default="float32",
        metadata={"help": "Type that the weights are loaded in; auto: as stored.", "choices": DTYPES},
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention implementation of the trainer's model, e.g. sdpa."}
    )
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter instead of every weight."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(
        default=32, metadata={"help": "The adapter's output is multiplied by lora_alpha / lora_r."}
    )
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout on the adapter's input."})
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Modules that get an adapter: names, or all-linear, or one regular expression."},
    )
    lora_target_parameters: list[str] | None = field(
        default=None, metadata={"help": "Parameters that get an adapter without being modules, e.g. experts."}
    )
    lora_modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained whole and saved beside the adapter."}
    )
    lora_task_type: str = field(default="CAUSAL_LM", metadata={"help": "Task type for PEFT."})
    use_rslora: bool = field(default=False, metadata={"help": "Scale by lora_alpha / sqrt(lora_r)."})
    use_dora: bool = field(default=False, metadata={"help": "Weight-decomposed adapter (DoRA)."})
    load_in_8bit: bool = field(default=False, metadata={"help": "Base weights in 8 bits (bitsandbytes)."})
    load_in_4bit: bool = field(default=False, metadata={"help": "Base weights in 4 bits (bitsandbytes)."})
    bnb_4bit_quant_type: str = field(
        default="nf4", metadata={"help": "Data type of 4-bit weights.", "choices": QUANT_TYPES}
    )
    use_bnb_nested_quant: bool = field(
        default=False, metadata={"help": "Quantise the quantisation constants too (4 bits)."}
    )
    bnb_4bit_quant_storage: str | None = field(
        default=None, metadata={"help": "Type that packed 4-bit weights are stored as.", "choices": QUANT_STORAGES}
    )

    def __post_init__(self):
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit are both set. Keep one of them.")
        for name, accepted in (
            ("dtype", (None, *DTYPES)),
            ("bnb_4bit_quant_type", QUANT_TYPES),
            ("bnb_4bit_quant_storage", (None, *QUANT_STORAGES)),
        ):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(str, accepted))}.")
        self.lora_target_modules = target_modules(self.lora_target_modules)


def target_modules(names: list[str] | str | None) -> list[str] | str | None:
    """Tell PEFT's two readings apart: a list holds names of modules, a string is `all-linear` or a regular expression.

    The command line always gives a list, so a lone item that cannot be the name of a module becomes a string.
    """
    if isinstance(names, str) or names is None or len(names) != 1:
        return names
    return list(names) if re.fullmatch(r"[\w.]+", names[0]) else names[0]


def get_peft_config(model_args: ModelConfig) -> "LoraConfig | None":
    """LoRA configuration that the options describe, or `None` without `use_peft`."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        task_type=model_args.lora_task_type,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        bias="none",
    )


def get_quantization_config(model_args: ModelConfig) -> "BitsAndBytesConfig | None":
    """Quantisation of the base weights that the options describe, or `None` without one.

    Raises:
        ImportError: If bitsandbytes is not installed.
    """
    if not (model_args.load_in_8bit or model_args.load_in_4bit):
        return None
    if find_spec("bitsandbytes") is None:
        bits = "load_in_8bit" if model_args.load_in_8bit else "load_in_4bit"
        raise ImportError(f'{bits}=True needs bitsandbytes, which is not installed: pip install "trl[quantization]"')
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        # Matrix products run in the type of the weights that are not quantised; "auto" is left to bitsandbytes.
        bnb_4bit_compute_dtype=None if model_args.dtype == "auto" else model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_model_init_kwargs(model_args: ModelConfig) -> dict[str, Any]:
    """Keyword arguments for `from_pretrained` that the options describe. What is `None` is left to transformers."""
    kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    return {name: value for name, value in kwargs.items() if value is not None}
