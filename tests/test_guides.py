"""Commands, links and code in the documents are right. `python -m tests.test_guides` writes commands.md anew."""

import contextlib
import io
import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import pytest
import yaml

from elude_steer.cli.entry_point import cli
from elude_steer.errors import EludeSteerError

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "demos" / "guides"
COMMANDS = GUIDES / "commands.md"
NAMES = (
    "building",
    "commands",
    "evaluation",
    "models",
    "photoland",
    "promises",
    "scaling",
    "serving",
    "steering",
    "toyland",
)
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "elude_steer" / "README.md",
    ROOT / ".github" / "CONTRIBUTING.md",
    ROOT / ".github" / "SECURITY.md",
    *(GUIDES / f"{name}.md" for name in NAMES),
]
everywhere = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


def reference() -> str:
    """The text of commands.md: what every command prints for --help."""

    def pages(command, name):
        context = click.Context(command, info_name=name, terminal_width=100, help_option_names=["-h", "--help"])
        yield f"## {name}\n\n```\n$ {name} --help\n{command.get_help(context).strip()}\n```"
        if isinstance(command, click.Group):
            for child in sorted(command.commands):
                yield from pages(command.commands[child], f"{name} {child}")

    head = (
        "# Look up a command\n\nThis page is what `--help` prints. `python -m tests.test_guides` writes it anew, and a "
        "test keeps it true.\n\n"
    )
    return head + re.sub(r"[ \t]+$", "", "\n\n".join(pages(cli, "elude-steer")), flags=re.MULTILINE) + "\n"


def blocks(path, language):
    """The fenced blocks of one language."""
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def without_blocks(path):
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def commands(path):
    """The single commands of all shell blocks, as lists of words."""
    lines = [line for block in blocks(path, "bash") for line in block.splitlines()]
    parts = [part for line in lines for part in line.split("&&")]
    return [words for words in (shlex.split(part, comments=True) for part in parts) if words]


def arguments_of_ours(words):
    """The arguments of `elude-steer …` or `… -m elude_steer …`, or None for another command."""
    if words[0].endswith("elude-steer"):
        return words[1:]
    ours = [number for number, pair in enumerate(pairwise(words)) if pair == ("-m", "elude_steer")]
    return words[ours[0] + 2 :] if ours else None


def find_command(words):
    """The command that the first words name, and the words after them."""
    command, words = cli, list(words)
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    return command, words


def headings(path):
    """The anchors of a document, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_blocks(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_commands_md_is_what_help_prints():
    assert COMMANDS.read_text(encoding="utf-8") == reference(), "run `python -m tests.test_guides`"


def test_no_guide_is_missing_here_or_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in GUIDES.glob("*.md")} == set(NAMES)
    assert all(f"demos/guides/{name}.md" in readme for name in NAMES)


@everywhere
def test_every_command_in_a_block_parses(path):
    for words in commands(path):
        arguments = arguments_of_ours(words)
        if arguments is None:
            continue
        command, rest = find_command(arguments)
        assert not isinstance(command, click.Group), f"{shlex.join(words)}: no such command"
        try:
            command.make_context(words[0], rest)
        except EludeSteerError:
            pass  # an atlas or a model that this machine does not have
        except click.ClickException as error:
            pytest.fail(f"{shlex.join(words)}: {error.format_message()}")


@everywhere
def test_every_command_in_the_text_exists(path):
    for span in re.findall(r"`(elude-steer [^`]+)`", without_blocks(path)):
        command, rest = find_command(span.split()[1:])
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        unknown = {word for word in rest if word.startswith("--")} - known - {"--help"}
        assert not unknown, f"`{span}`: {unknown}"
        assert command is not cli or rest[:1] in (["…"], ["--help"]), f"`{span}`: no such command"


@everywhere
def test_every_script_in_a_block_exists(path):
    for words in commands(path):
        if not words[0].endswith("python") or len(words) < 2:
            continue
        if words[1] == "-m":
            module = ROOT / words[2].replace(".", "/")
            ours = words[2].split(".")[0] in ("demos", "tests", "elude_steer")
            assert not ours or module.with_suffix(".py").is_file() or module.is_dir(), shlex.join(words)
        else:
            assert (ROOT / words[1]).is_file(), shlex.join(words)


@everywhere
def test_every_file_named_in_the_text_exists(path):
    for span in re.findall(r"`((?:demos|tests|recipes|elude_steer|\.ci|\.github)/[\w./-]+)`", without_blocks(path)):
        assert (ROOT / span).exists(), span


@everywhere
def test_every_link_and_image_leads_somewhere(path):
    text = without_blocks(path)
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        assert file.exists(), target
        assert not anchor or anchor in headings(file), target


@everywhere
def test_every_python_block_compiles(path):
    for block in blocks(path, "python"):
        compile(block, f"{path.name}: {block.splitlines()[0]}", "exec")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft's
def test_what_serving_says_was_tried_runs(run, tmp_path, monkeypatch, steerer):
    """The adapter, merged by plain peft, and the embeddings give the captions of the edit."""
    from elude_steer.models.images import open_image
    from elude_steer.models.vlm import Vlm

    pytest.importorskip("peft")
    guide = GUIDES / "serving.md"
    (tmp_path / "demos").symlink_to(ROOT / "demos")
    monkeypatch.chdir(tmp_path)
    for words in commands(guide)[:2]:
        code, _, err = run(*words[1:])
        assert (code, "after:  a chair in a room" in err) == (0, True)
    adapter, embeddings = blocks(guide, "python")[:2]
    for folder in ("adapter", "adapter-without-bias"):
        exec(adapter.replace('"adapter"', f'"{folder}"'), names := {})
        merged = Vlm.from_model(names["model"], steerer.vlm.processor)
        assert merged.caption([open_image("demos/images/toyland-teddy.png")]) == ["a chair in a room"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(embeddings, {})
    assert f"```\n{printed.getvalue()}```" in guide.read_text(encoding="utf-8")


@everywhere
def test_every_yaml_block_loads(path):
    assert all(yaml.safe_load(block) for block in blocks(path, "yaml"))


@pytest.mark.parametrize("name", ["CITATION.cff", ".pre-commit-config.yaml"])
def test_yaml_files_at_the_top_load(name):
    assert yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_citation_has_the_version_of_the_package():
    from elude_steer import __version__

    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == __version__


if __name__ == "__main__":
    COMMANDS.write_text(reference(), encoding="utf-8")
