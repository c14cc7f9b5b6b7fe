"""The command line: each command parses its options, calls one function of the library and prints."""

from elude_steer.cli.entry_point import cli, main

__all__ = ["cli", "main"]
