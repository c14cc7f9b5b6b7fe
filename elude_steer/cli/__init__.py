"""The command line: parse, call one function of the library, print."""

from elude_steer.cli.group import cli, main

__all__ = ["cli", "main"]
