"""Options of a training script: from flags and a YAML file to dataclasses, and the dataset that they name."""

import difflib
import json
import os
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import yaml
from accelerate.utils import patch_environment
from transformers import HfArgumentParser


if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict


# File name endings of datasets to the `datasets` builder that reads them.
DATASET_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class ScriptArguments:
    """The dataset that a script trains on.

    Args:
        dataset_name (`str`, *optional*): Hub id; or a folder written by `save_to_disk`; or a `.json`, `.jsonl`,
            `.parquet` or `.csv` file, or a folder of such files.
        dataset_config (`str`, *optional*): Configuration of the dataset on the hub.
        dataset_train_split (`str`, defaults to `"train"`): Split to train on.
        dataset_test_split (`str`, defaults to `"test"`): Split to evaluate on, where the trainer evaluates.
        dataset_streaming (`bool`, defaults to `False`): Read rows when they are needed instead of all at the start.
        ignore_bias_buffers (`bool`, defaults to `False`): Keep boolean buffers, such as attention masks, out of what
            DDP broadcasts.
    """

    _argument_group_name = "dataset"

    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Hub id, folder written by save_to_disk, or json, jsonl, parquet or csv files."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset on the hub."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    dataset_streaming: bool = field(
        default=False, metadata={"help": "Read rows when they are needed instead of all at the start."}
    )
    ignore_bias_buffers: bool = field(
        default=False, metadata={"help": "Keep boolean buffers out of what DDP broadcasts."}
    )


class TrlParser(HfArgumentParser):
    """Reads dataclasses from command-line flags and from a YAML file given with `--config`.

    A key of the file is the name of a field; flags override it. The section `env` of the file holds environment
    variables. They are set while the options are parsed and stay until `parser.environment.close()`, or until the end
    of a `with parser.environment:` block around the run.

    Args:
        dataclass_types (dataclass or iterable of dataclasses, *optional*): What to parse into.
        kwargs: For `argparse.ArgumentParser`.

    Raises:
        ValueError: If a dataclass has a field `config`.

    Example:

    ```python
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    ```
    """

    def __init__(self, dataclass_types: Any = None, **kwargs):
        # A shortened flag is an unknown one, or adding an option could change what an old command line means.
        super().__init__(dataclass_types, **{"allow_abbrev": False, **kwargs})
        for dataclass_type in self.dataclass_types:
            if any(each.name == "config" for each in fields(dataclass_type)):
                raise ValueError(
                    f"{dataclass_type.__name__} has a field `config`, the name of the flag that gives the YAML file. "
                    "Rename the field."
                )
        self.add_argument(
            "--config", default=SUPPRESS, metavar="FILE", help="YAML file of options; flags override what it holds."
        )
        self.environment = ExitStack()

    def error(self, message: str):
        """End the program with exit code 2 and the message, without the pages of usage that argparse adds."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def flags(self) -> dict[str, str]:
        """Name of every option to its long flag."""
        # The first action of a name is the option itself; a second is the `--no_...` of a boolean.
        actions = [action for action in reversed(self._actions) if action.dest not in ("config", "help")]
        return {action.dest: max(action.option_strings, key=len) for action in actions if action.option_strings}

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        ignored_keys: Collection[str] = (),
    ) -> tuple[Any, ...]:
        """Parse flags and the YAML file.

        Args:
            args (`Iterable[str]`, *optional*): The command line, `sys.argv[1:]` by default.
            return_remaining_strings (`bool`, defaults to `False`): Return what is unknown as a last item, a list of
                command-line strings.
            fail_with_unknown_args (`bool`, defaults to `True`): Raise on what is unknown, unless it is returned.
            ignored_keys (`Collection[str]`): Keys of the file that are meant for another program.

        Returns:
            `tuple`: One instance of each dataclass, in the order of the constructor.

        Raises:
            ValueError: Unknown flag or key, or a file that is not a mapping.
            FileNotFoundError: The file does not exist.
        """
        path, args = split_config(args)
        config = read_config(path)
        self.environment.enter_context(patch_environment(**config.pop("env", {})))
        flags = self.flags()
        unknown = {key: value for key, value in config.items() if key not in flags and key not in ignored_keys}

        arguments = []
        hints = {name: hint for each in self.dataclass_types for name, hint in get_type_hints(each).items()}
        for key in [key for key in config if key in flags]:
            if fits_flag(key, config[key], hints.get(key)):
                arguments += as_flag(flags[key], config[key])
            else:
                self.set_defaults(**{key: config[key]})
        *parsed, remaining = self.parse_args_into_dataclasses(
            [*arguments, *args], return_remaining_strings=True, look_for_args_file=False
        )
        if return_remaining_strings:
            return (*parsed, remaining + [each for key in unknown for each in as_flag(f"--{key}", unknown[key])])
        if fail_with_unknown_args and (unknown or remaining):
            raise ValueError(unknown_message(list(unknown), remaining, flags))
        return tuple(parsed)


def split_config(args: Iterable[str] | None = None) -> tuple[str | None, list[str]]:
    """Take `--config` out of a command line, `sys.argv[1:]` by default.

    Returns:
        `(path, rest)`: The file, `None` without the flag, and the other arguments.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    namespace, rest = parser.parse_known_args(None if args is None else list(args))
    return namespace.config, rest


def read_config(path: str | os.PathLike | None) -> dict[str, Any]:
    """Read a YAML file of options. Without a file there are none.

    Raises:
        ValueError: If the file, or its section `env`, is not a mapping of names to values.
    """
    if path is None:
        return {}
    config = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}. Write one option a line, as `name: value`.")
    if not isinstance(config.get("env", {}), dict):
        raise ValueError(f"env={config['env']!r} in {path} is not a mapping. Write `env:` and below it `NAME: value`.")
    return config


def fits_flag(key: str, value: Any, hint: Any) -> bool:
    """Whether a YAML value can be written on a command line, where argparse converts and checks it.

    It cannot if it is a mapping or `null`, or if the field also takes strings, which every flag would become.

    Args:
        key (`str`): Name of the option.
        value: Its value in the file.
        hint: Type of the dataclass field, `None` for an option that belongs to none.

    Raises:
        ValueError: For a mapping, a list or `null` that the field does not take.
    """
    if hint is None:
        return not isinstance(value, dict | None)
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = {get_origin(alternative) or alternative for alternative in alternatives}
    if type(value) in kinds:
        return not (isinstance(value, dict | None) or value == [] or (str in kinds and type(value) is not str))
    if isinstance(value, dict | list | None):
        raise ValueError(f"{key}={value!r} in the config file: the option takes {getattr(hint, '__name__', hint)}.")
    return True


def as_flag(flag: str, value: Any) -> list[str]:
    """Write a YAML value as on a command line, so that argparse converts and checks it as it does flags."""
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def unknown_message(keys: Iterable[str], arguments: Iterable[str], known: Iterable[str]) -> str:
    """Say which options are unknown, and what may have been meant.

    Args:
        keys (`Iterable[str]`): Unknown keys of the YAML file.
        arguments (`Iterable[str]`): What argparse left over, values included.
        known (`Iterable[str]`): Names of all options.
    """
    known = list(known)
    arguments = list(arguments)
    names = [(key, f"key {key!r} in the config file") for key in keys]
    # Values that stood behind an unknown flag say nothing on their own.
    for argument in [each for each in arguments if each.startswith("-")] or arguments:
        names.append((argument.lstrip("-").split("=")[0].replace("-", "_"), f"argument {argument!r}"))
    sentences = []
    for name, what in names:
        nearest = " or ".join(map(repr, difflib.get_close_matches(name, known, n=3, cutoff=0.7)))
        sentences.append(f"Unknown {what}." + (f" Did you mean {nearest}?" if nearest else ""))
    return " ".join(sentences)


def get_dataset(script_args: ScriptArguments) -> "DatasetDict | IterableDatasetDict":
    """Load the dataset that the options name, from disk if it is there, else from the hub.

    Returns:
        `DatasetDict` (`IterableDatasetDict` with `dataset_streaming`): Splits by name. A dataset without splits is the
        training split.

    Raises:
        ValueError: Without `dataset_name`, or for a file of another kind.
    """
    from datasets import load_dataset

    if script_args.dataset_name is None:
        raise ValueError("dataset_name is missing: a hub id, a folder, or a json, jsonl, parquet or csv file.")
    path = Path(script_args.dataset_name)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return load_saved(path, script_args)
    if not path.is_file():
        return load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    if path.suffix not in DATASET_BUILDERS:
        raise ValueError(
            f"dataset_name={script_args.dataset_name!r} is a {path.suffix or 'nameless'} file. Files that can be read "
            f"end in {', '.join(DATASET_BUILDERS)}."
        )
    return load_dataset(
        DATASET_BUILDERS[path.suffix],
        data_files={script_args.dataset_train_split: str(path)},
        streaming=script_args.dataset_streaming,
    )


def load_saved(path: Path, script_args: ScriptArguments) -> "DatasetDict | IterableDatasetDict":
    """Load what `save_to_disk` wrote, one dataset or several splits."""
    from datasets import Dataset, DatasetDict, IterableDatasetDict, load_from_disk

    dataset = load_from_disk(path)
    if isinstance(dataset, Dataset):
        dataset = DatasetDict({script_args.dataset_train_split: dataset})
    if script_args.dataset_streaming:
        return IterableDatasetDict({name: split.to_iterable_dataset() for name, split in dataset.items()})
    return dataset
