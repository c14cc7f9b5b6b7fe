"""The command `elude-steer`: its subcommands, and how errors end it. Results go to stdout, all else to stderr."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import click

from elude_steer import __version__
from elude_steer.cli import build, demo, evaluate, export, inspect, steer, sweep
from elude_steer.cli.options import print_note
from elude_steer.errors import EludeSteerError, EludeSteerWarning


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="elude-steer")
def cli() -> None:
    """Split a vision model's units into single-concept sub-units, without changing what it computes.

    \b
    elude-steer recipes list
    elude-steer build llava-onevision-0.5b --images photos/ --out my-atlas
    elude-steer atlases show my-atlas
    """  # noqa: D301 - \b tells click to keep the line breaks


for command in (
    build.build,
    steer.steer,
    steer.run,
    steer.caption,
    sweep.sweep,
    export.export,
    evaluate.evaluate,
    evaluate.compare,
    evaluate.ablate,
    evaluate.judge,
    inspect.atlases,
    inspect.concepts,
    inspect.recipes,
    inspect.toyland,
    inspect.env,
    demo.demo,
):
    cli.add_command(command)


def main() -> None:
    """Run the command line: an error is one line and exit code 1, without a traceback."""
    with warnings.catch_warnings():
        # Warnings of other packages address developers, not people at a command line.
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", EludeSteerWarning)
        warnings.showwarning = lambda message, *_, **__: print_note(message)
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


def _fail(message: str, code: int = 1) -> None:
    """Print an error, or leave it in the file that the starting process reads, and exit."""
    error_file = os.environ.get("ELUDE_STEER_ERROR_FILE")
    if error_file:
        Path(error_file).write_text(message, encoding="utf-8")
    else:
        for line in message.splitlines():
            click.echo(f"elude-steer: {line}", err=True)
    sys.exit(code)
