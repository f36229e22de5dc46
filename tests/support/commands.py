"""Whether a documented command line names commands and options that exist, without running it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points

import click


def problems(words: Sequence[str]) -> list[str]:
    """What is wrong with a command line: unknown commands, options and preloads. Programs of others are let through."""
    if words[0] == "taskdb":
        (script,) = entry_points(group="console_scripts", name="taskdb")
        return _options(importlib.import_module(script.module).cli, words[1:], "taskdb")
    if words[0] == "dask":
        # distributed adds its commands to `dask` by entry points of this group.
        found = tuple(entry_points(group="dask_cli", name=words[1]))
        return _options(found[0].load(), words[2:], f"dask {words[1]}") if found else [f"no command dask {words[1]}"]
    return []


def _options(command: click.Command, words: Sequence[str], name: str) -> list[str]:
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            break
        name, found = f"{name} {words[0]}", command.get_command(click.Context(command), words[0])
        if found is None:
            return [f"no command {name}"]
        command, words = found, words[1:]
    known = _names(command)
    wrong = []
    for at, word in enumerate(words):
        # The options of a preload become options of the command that loads it.
        if word == "--preload":
            module = words[at + 1]
            try:
                setup = getattr(importlib.import_module(module), "dask_setup", None)
            except ImportError as error:
                wrong.append(f"preload {module}: {error}")
                continue
            if setup is None:
                wrong.append(f"preload {module} has no dask_setup")
            elif isinstance(setup, click.Command):
                known |= _names(setup)
    wrong += [f"{name} has no option {word}" for word in words if word.startswith("-") and word.split("=")[0] not in known]
    return wrong


def _names(command: click.Command) -> set[str]:
    return {"--help"} | {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
