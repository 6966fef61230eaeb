"""The command line.

Owns the table of commands. Only the module of the command that is given is imported: `pull` need not wait for a server.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from headrace import __version__
from headrace.types import HeadraceError

# name: the function that adds its flags (one of which, `run`, is the command itself), and what --help says of it
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "serve": ("serve.serve_flags", "serve a model to OpenAI clients"),
        "generate": ("ask.generate_flags", "complete one prompt"),
        "chat": ("ask.chat_flags", "talk to a model in the terminal"),
        "pull": ("models.pull_flags", "fetch a model"),
        "pack": ("pack.pack_flags", "pack a large model's weights once, for starts that need not"),
        "bench": ("bench.bench_flags", "measure the engine, beside the roofs of the machine"),
        "synth": ("models.synth_flags", "make a model of random weights, for speed runs"),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Mistakes of the user end in one line on standard error."""
    given = sys.argv[1:] if arguments is None else arguments
    gc.disable()  # what a command imports and loads it keeps: looking for garbage in it would be a tenth of the start
    try:
        options, unknown = _parser(given).parse_known_args(given)
        if unknown:
            options.command.error(f"unrecognized arguments: {' '.join(unknown)}")
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: nothing more to flush to
        return 141
    finally:
        gc.enable()


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Of all commands the names, of the one that is given the flags."""
    parser = argparse.ArgumentParser(prog="headrace", description="An LLM inference server for CPUs.")
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (place, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        command.set_defaults(command=command)  # whose usage a mistake is told with
        if name in given:
            module, _, function = place.partition(".")
            getattr(importlib.import_module(f"{__name__}.{module}"), function)(command)
    return parser
