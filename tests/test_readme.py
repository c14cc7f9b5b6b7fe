"""The README's command reference is what `--help` prints. `python -m tests.test_readme` writes it anew."""

import re
from pathlib import Path

import click

from elude_steer.cli.group import cli

README = Path(__file__).parents[1] / "README.md"


def reference() -> str:
    def pages(command, name):
        context = click.Context(command, info_name=name, terminal_width=100, help_option_names=["-h", "--help"])
        yield f"```\n$ {name} --help\n{command.get_help(context).strip()}\n```"
        if isinstance(command, click.Group):
            for child in sorted(command.commands):
                yield from pages(command.commands[child], f"{name} {child}")

    text = "\n\n".join(pages(cli, "elude-steer"))
    return (
        "<!-- help -->\n<details>\n<summary>All of <code>--help</code></summary>\n\n"
        + re.sub(r"[ \t]+$", "", text, flags=re.M)
        + "\n\n</details>\n<!-- end help -->"
    )


def test_the_command_reference_is_true():
    assert reference() in README.read_text(encoding="utf-8"), "run `python -m tests.test_readme`"


def test_the_test_command_is_marked_for_ci():
    assert re.search(r"<!-- test command -->\n```bash\n.* -m pytest -n auto\n```\n<!-- end -->", README.read_text())


if __name__ == "__main__":
    old = README.read_text(encoding="utf-8")
    new = re.sub(r"<!-- help -->.*<!-- end help -->", lambda _: reference(), old, flags=re.S)
    README.write_text(new, encoding="utf-8")
