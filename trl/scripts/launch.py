"""How a command becomes the process, or the processes, that train.

One process is plain Python. Several are started by `accelerate launch`, whose options (`num_processes`, `use_fsdp`,
...) may stand among those of the script, as flags and in the YAML file.
"""

import argparse
import os
import sys
from collections.abc import Collection
from typing import Any

from accelerate.commands.config import default_config_file
from accelerate.commands.launch import launch_command_parser

from .utils import as_flag


# Options of `accelerate launch` that say what is launched, which is for us to say.
NOT_FOR_USERS = {"config_file", "env", "help", "module", "no_python"}


def launcher_actions(script_options: Collection[str] = ()) -> dict[str, argparse.Action]:
    """Options of `accelerate launch` by name, without those that the script has too."""
    actions = {action.dest: action for action in launch_command_parser()._actions if action.option_strings}
    return {name: actions[name] for name in actions if name not in NOT_FOR_USERS and name not in script_options}


def launcher_keys(script_options: Collection[str]) -> set[str]:
    """Names of the options that a YAML file may hold for the launcher."""
    return {"accelerate_config", *launcher_actions(script_options)}


def split_launcher_options(
    args: list[str], config: dict[str, Any], script_options: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Tell the launcher's options from the script's.

    Args:
        args (`list[str]`): The command line, without `--config`.
        config (`dict[str, Any]`): What the YAML file holds.
        script_options (`Collection[str]`): Names of the script's options.

    Returns:
        `(options, rest)`: The launcher's options by name, a flag before the same key of the file, and what is left of
        the command line.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--accelerate_config")
    for action in launcher_actions(script_options).values():
        action.default = argparse.SUPPRESS
        parser._add_action(action)
    namespace, rest = parser.parse_known_args(args)
    keys = launcher_keys(script_options)
    # The parser of accelerate notes more in the namespace than its options.
    return {key: value for key, value in {**config, **vars(namespace)}.items() if key in keys}, rest


def launcher_arguments(options: dict[str, Any], num_devices: int) -> list[str]:
    """Write the options for `accelerate launch`.

    Args:
        options (`dict[str, Any]`): What [`split_launcher_options`] found.
        num_devices (`int`): Accelerators of this machine, the number of processes where none is given.

    Raises:
        ValueError: If `accelerate_config` is not a file.
    """
    options = dict(options)
    config_file = options.pop("accelerate_config", None)
    if config_file is not None and not os.path.isfile(config_file):
        raise ValueError(
            f"accelerate_config={config_file!r} is not a file. `accelerate config --config_file FILE` writes one."
        )
    if config_file is None and not os.path.isfile(default_config_file):
        # What accelerate would choose as well, but not without a page of warnings.
        defaults = {"num_processes": max(num_devices, 1), "num_machines": 1}
        options = {**defaults, "mixed_precision": "no", "dynamo_backend": "no", **options}
    arguments = [] if config_file is None else [f"--config_file={config_file}"]
    actions = launcher_actions()
    for name, value in options.items():
        takes_value = actions[name].nargs != 0
        if takes_value or value:
            arguments += as_flag(f"--{name}", value) if takes_value else [f"--{name}"]
    return arguments


def launch_command(module: str, args: list[str], options: dict[str, Any], num_devices: int) -> list[str]:
    """Command line that runs a module of ours.

    Args:
        module (`str`): The module, `"trl.scripts.grpo"` for example.
        args (`list[str]`): Its arguments.
        options (`dict[str, Any]`): Options for the launcher.
        num_devices (`int`): Accelerators of this machine.
    """
    if not options and num_devices <= 1 and not os.path.isfile(default_config_file):
        return [sys.executable, "-m", module, *args]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *launcher_arguments(options, num_devices)]
    return [*launcher, "--module", module, *args]
