"""The command `elude-steer`: its subcommands, and how errors end it. Results go to stdout, all else to stderr."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections import UserDict
from importlib import import_module
from typing import Any

import click

from elude_steer import __version__
from elude_steer.errors import EludeSteerError, EludeSteerWarning

# command -> its module, and the first sentence of its help: all that `elude-steer --help` needs, so that it imports no
# command. In its module, a command has the same name.
COMMANDS = {
    "ablate": ("evaluate", "Build SPEC with one setting changed at a time, and measure each atlas."),
    "atlases": ("inspect", "List, show, check and calibrate local atlases."),
    "benchmark": (
        "benchmark",
        "Measure hallucination and side effects of an edit on images with COCO's annotations.",
    ),
    "build": ("build", "Build the atlas of SPEC, a YAML file or a shipped recipe."),
    "caption": ("steer", "Caption IMAGE (a path, or - for standard input) with greedy decoding."),
    "compare": (
        "evaluate",
        "Compare ELUDe with raw units, other splits and sparse autoencoders: on toyland, or on the backbone of SPEC.",
    ),
    "concepts": ("inspect", "List the labels of ATLAS, or the sub-units that match a word."),
    "demo": ("serve", "Open a page on which to steer captions and browse atlases (needs the extra `demo`)."),
    "env": ("inspect", "Show versions, extras and folders, for a bug report."),
    "evaluate": (
        "evaluate",
        "Measure ATLAS: how faithful the split is, how monosemantic its sub-units are, and what it costs.",
    ),
    "export": (
        "export",
        "Write the model with an edit of RECIPE in its weights to the folder OUT, as a Hugging Face checkpoint.",
    ),
    "judge": (
        "evaluate",
        "Let vision-language models judge whose images belong together, those of ATLASES or of the units before.",
    ),
    "recipes": ("inspect", "List, show, copy and check recipes."),
    "reproduce": (
        "reproduce.command",
        "Run a table of the paper, or its fourteen edits, and show the paper's numbers beside yours.",
    ),
    "run": (
        "steer",
        "Run steering RECIPES (files, or names of `recipes list`) and print a table of captions for each.",
    ),
    "serve": (
        "serve",
        "Serve a model over OpenAI's API; each request may carry an edit of its own (needs the extra `serve`).",
    ),
    "steer": ("steer", "Caption IMAGES (paths, or - for standard input) with some concepts removed or added."),
    "sweep": (
        "sweep",
        "Try a grid of settings on one IMAGE, or on many images with known objects, and list the best first.",
    ),
    "toyland": ("inspect", "Draw scenes of the small world that comes with the package."),
}


class _CommandsOnDemand(UserDict[str, Any]):
    """The commands by name; each is imported when it is asked for."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COMMANDS))

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = getattr(import_module(f"elude_steer.cli.{COMMANDS[name][0]}"), name)
        return self.data[name]


class _LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(commands=_CommandsOnDemand(), **settings)

    def format_commands(self, _context: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, COMMANDS))  # as click has it
        rows = [
            (name, click.Command(name, help=text).get_short_help_str(limit)) for name, (_, text) in COMMANDS.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="elude-steer")
def cli() -> None:
    """Split a vision model's units into single-concept sub-units, without changing what it computes.

    \b
    elude-steer recipes list
    elude-steer build llava-onevision-0.5b --images photos/ --out my-atlas
    elude-steer atlases show my-atlas
    """  # noqa: D301 - \b tells click to keep the line breaks


class _Terminated(BaseException):
    """SIGTERM has arrived. Not a KeyboardInterrupt, which click and Gradio handle in their own way."""


def _stop_on_sigterm() -> None:
    """Turn SIGTERM into an exception that undoes what is half done; it says so at once, as undoing may take a while."""

    def stop(_number: int, _frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(2, b"elude-steer: stopped by SIGTERM; finished work is kept, run the same command again to go on.\n")
        raise _Terminated

    if threading.current_thread() is threading.main_thread() and not os.environ.get("ELUDE_STEER_ERROR_FILE"):
        signal.signal(signal.SIGTERM, stop)


def _end_with_parent() -> None:
    """Let a process that `launch` started end at once if the one that started it is killed, whatever it computes."""
    parent = os.environ.get("ELUDE_STEER_PARENT")
    if not parent or not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):  # it was killed before
        os._exit(1)


def main() -> None:
    """Run the command line: an error is one line and exit code 1, without a traceback."""
    _end_with_parent()
    before = signal.getsignal(signal.SIGTERM)
    try:
        _stop_on_sigterm()
        _run()
    except _Terminated:
        # Threads that still compute would keep the process alive.
        sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _run() -> None:
    with warnings.catch_warnings():
        # Warnings of other packages address developers, not people at a command line.
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", EludeSteerWarning)
        warnings.showwarning = _print_warning
        try:
            cli(prog_name="elude-steer", standalone_mode=False)
        except EludeSteerError as error:
            _fail(str(error))
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "elude-steer"
            message = " ".join(error.format_message().split())
            _fail(
                f"{message}{'' if message.endswith(('.', '?', '!')) else '.'} See `{command} --help`.", error.exit_code
            )
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            _fail("stopped; finished work is kept, run the same command again to go on.", 130)
        except BrokenPipeError:  # `elude-steer … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except Exception as error:
            if os.environ.get("ELUDE_STEER_DEBUG"):
                raise
            message = " ".join(str(error).split()) or "no message"
            _fail(f"unexpected {type(error).__name__}: {message} (ELUDE_STEER_DEBUG=1 shows where; please report it)")


def _print_warning(message: object, *_: Any, **__: Any) -> None:
    from elude_steer.cli.options import print_note

    print_note(message)


def _fail(message: str, code: int = 1) -> None:
    """Print an error, or leave it in the file that the starting process reads, and exit."""
    error_file = os.environ.get("ELUDE_STEER_ERROR_FILE")
    if error_file:
        from pathlib import Path

        Path(error_file).write_text(message, encoding="utf-8")
    else:
        for line in message.splitlines():
            click.echo(f"elude-steer: {line}", err=True)
    sys.exit(code)
