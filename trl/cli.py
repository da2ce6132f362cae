"""The command `trl`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from . import __version__


# Name of a command to the module that runs it and what it does. The module has `make_parser()` for its options, and
# trains when it is run with `python -m`.
COMMANDS = {
    "grpo": ("trl.scripts.grpo", "Train a model, or a LoRA adapter of it, with GRPO."),
}


def make_parser() -> argparse.ArgumentParser:
    """Parser of what stands before a command's own options."""
    parser = argparse.ArgumentParser(
        prog="trl", description="GRPO training of LoRA adapters with vLLM rollouts.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"trl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, description) in COMMANDS.items():
        # The command's own parser is slow to import: it answers for the rest of the line, `--help` included.
        commands.add_parser(name, help=description, add_help=False)
    return parser


def plan(command: str, args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Check a command's options and say how to run it.

    Args:
        command (`str`): A key of `COMMANDS`.
        args (`Sequence[str]`): The command line behind it.

    Returns:
        `(arguments, variables)`: Command line of the process that trains, and the environment variables to add.
    """
    import torch

    from .scripts.launch import launch_command, launcher_keys, split_launcher_options
    from .scripts.utils import read_config, split_config, unknown_message

    module, _ = COMMANDS[command]
    parser = importlib.import_module(module).make_parser()
    script_options = parser.flags()
    try:
        path, flags = split_config(args)
        config = read_config(path)
        variables = {name.upper(): str(value) for name, value in config.pop("env", {}).items()}
        options, script_flags = split_launcher_options(flags, config, script_options)
        known = {*script_options, *launcher_keys(script_options)}
        unknown_keys = [key for key in config if key not in known]
        unknown_flags = parser.parse_known_args(script_flags)[1]
        if unknown_keys or unknown_flags:
            raise ValueError(unknown_message(unknown_keys, unknown_flags, known))
        # The YAML file goes to the script as it is: the script takes its own keys from it.
        file_flag = [] if path is None else [f"--config={path}"]
        return launch_command(module, file_flag + script_flags, options, torch.cuda.device_count()), variables
    except (OSError, ValueError) as error:
        parser.error(str(error))


def main(args: Sequence[str] | None = None) -> None:
    """Run `trl` with a command line, `sys.argv[1:]` by default. Does not return where a command is run."""
    args = list(sys.argv[1:] if args is None else args)
    # A command's options are its own parser's: only what comes before and the command itself is read here.
    namespace, _ = make_parser().parse_known_args(args[:1])
    arguments, variables = plan(namespace.command, args[1:])
    sys.stdout.flush()
    # The process is replaced, so that variables of the `env` section are there before Python and its libraries start,
    # and signals and the exit code pass through.
    os.execvpe(arguments[0], arguments, {**os.environ, **variables})


if __name__ == "__main__":
    main()
