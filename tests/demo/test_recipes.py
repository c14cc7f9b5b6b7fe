"""Recipes in the demo: exported edits, uploaded files and shipped examples."""

import ast
import json
import re
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elude_steer.demo.presenter import TUNABLE
from elude_steer.demo.recipes import (
    describe_ignored,
    describe_removed,
    edit_name,
    python_call,
    read_recipe,
    recipe_text,
    shipped_examples,
)
from elude_steer.demo.session import EditRequest, ImageFile, decode_mark
from elude_steer.errors import EludeSteerWarning, SpecError
from elude_steer.recipe_files import load_recipe
from elude_steer.specs import Recipe, StepSpec
from elude_steer.steering.run_recipe import run_recipe, step_settings
from elude_steer.utils.yaml_schema import parse_document
from tests.demo.helpers import CATS, DOG, TEDDY, TRAIN, box_mask, code_texts, decode_uri, encode_mark, make_request
from tests.helpers.markup import Reader

NAMES = ["dog.png", "my best dog.png", "it's.png", 'a "dog".png', 'a\'b "c" $(d) `e`;f.png', "${alert(1)}<script>.png"]

# Exported edits


@pytest.fixture
def run_exported(tmp_path, monkeypatch, presenter, steerer):
    """Runs the exported recipe and Python call next to the image and the mark; returns both captions."""

    def run(request):
        monkeypatch.chdir(tmp_path)
        recipe, call = code_texts(presenter.export_code(request))
        (tmp_path / "steering.yaml").write_text(recipe, encoding="utf-8")
        (tmp_path / request.image.name).write_bytes(request.image.data)
        if request.mark and "mark.png" in recipe + call:  # as the page saves it
            (tmp_path / "mark.png").write_bytes(decode_uri(request.mark))
        (command,) = (line for line in recipe.splitlines() if "elude-steer run" in line)
        *start, image = shell_words(command.removeprefix("#"))
        assert start == ["elude-steer", "run", "steering.yaml", "--image"]
        (step,) = run_recipe(load_recipe("steering.yaml"), steerer, image)
        return step.result.caption, run_program(call)

    return run


def shell_words(command):
    """The words of a command as a shell splits it."""
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def run_program(call):
    """Run a program and return the value of its last line."""
    *statements, last = ast.parse(call).body
    scope = {}
    exec(compile(ast.Module(statements, []), "call", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "call", "eval"), scope)


CORNER = encode_mark(box_mask(0, 0, 48, 48))
LOWER = encode_mark(box_mask(40, 40, 96, 96))
EDITS = {
    "minus": {"path": CATS, "minus": ["cat", "blanket"]},
    "minus and plus": {"path": TEDDY, "minus": ["chair"], "plus": ["table"]},
    "settings": {"plus": ["biker"], "strength": 1.5, "fit": 0.5, "seen": 0.2},
    "mode scale": {"path": TRAIN, "minus": ["train"], "mode": "scale", "nu": "all", "gamma": -50.0},
    "a question": {"prompt": 'What\'s "this"?\n#: {}'},
    "marked": {"plus": ["biker"], "mark": CORNER},
    "marked, plus only": {"path": TEDDY, "minus": [], "plus": ["bird"], "mark": LOWER},
    "marked with settings": {"path": TEDDY, "minus": ["teddy"], "plus": ["dog"], "mark": CORNER, "strength": 2.0},
    "marked, minus only": {"path": TRAIN, "minus": ["train"], "mark": LOWER},
    "marked in mode scale": {"path": TEDDY, "minus": ["teddy"], "plus": ["dog"], "mark": CORNER, "mode": "scale"},
}


@pytest.mark.parametrize("options", EDITS.values(), ids=EDITS)
def test_exported_code_gives_the_same_caption(presenter, run_exported, options):
    request = make_request(**options)
    result = presenter.steer(request)
    assert result.notes == ()  # otherwise the Python call would warn
    assert run_exported(request) == (result.caption, result.caption)


@pytest.mark.parametrize("name", NAMES)
def test_exported_code_works_with_any_file_name(presenter, run_exported, name):
    request = make_request(ImageFile(name, DOG.read_bytes()), plus=["biker"], nu=6)
    assert run_exported(request) == (presenter.steer(request).caption,) * 2


def test_exported_code_names_the_mark_only_if_there_is_one(presenter):
    for mark, expected in ((None, False), (encode_mark(box_mask(0, 0, 0, 0)), False), (CORNER, True)):
        recipe, call = code_texts(presenter.export_code(make_request(plus=["biker"], mark=mark)))
        assert parse_document(Recipe, recipe).steps[0].mask == ("mark.png" if expected else None)
        assert ("where='mark.png'" in call) is expected


def test_exported_code_leaves_out_defaults(presenter):
    recipe, call = code_texts(presenter.export_code(make_request()))
    (step,) = parse_document(Recipe, recipe).steps
    assert step == StepSpec(("dog",))
    assert not re.search("settings|mask|prompt|null", recipe)
    assert call.splitlines()[-1] == "es.steer('toyland-dog.png', minus=['dog']).caption"


def test_without_an_image_exported_code_names_a_placeholder(presenter):
    recipe, call = code_texts(presenter.export_code(make_request(None)))
    assert "--image photo.png" in recipe
    assert "es.steer('photo.png'" in call


def test_exported_code_names_any_atlas_but_the_embedded_one():
    request = make_request(kappa=3)
    assert parse_document(Recipe, recipe_text("a.png", request, "/some where/else")).atlas == "/some where/else"
    assert "atlas='/some where/else'" in python_call("a.png", request, "/some where/else")
    assert "atlas" not in python_call("a.png", request, "toyland")


# Files refuse NUL.
any_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(str.strip)


@settings(deadline=None, max_examples=30)
@given(name=any_text, minus=st.lists(any_text, max_size=2), prompt=any_text)
def test_exported_code_can_be_parsed_whatever_was_typed(name, minus, prompt):
    """Line breaks and quotes of any script end neither a comment nor a string."""
    request = EditRequest(None, None, tuple(minus), ("cat",), prompt, {"nu": "all", "gamma": -2.0})
    recipe = parse_document(Recipe, recipe_text(name, request, "toyland"))
    assert (recipe.steps[0].minus, recipe.steps[0].plus, recipe.prompt) == (tuple(minus), ("cat",), prompt)
    assert step_settings(recipe.steps[0]) == request.settings
    call = ast.parse(python_call(name, request, "toyland")).body[-1].value.value
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert ast.literal_eval(call.args[0]) == name
    assert (arguments.get("minus", []), arguments["prompt"], arguments["nu"]) == (minus, prompt, "all")


@pytest.mark.parametrize("ending", ["\n", "\r", "\r\n", "\x85", "\u2028", "\u2029", "\x07"], ids=ascii)
def test_typed_text_cannot_leave_the_comment(ending):
    text = f"dog{ending}atlas: other"
    for name, word in ((text, "dog"), ("dog.png", text)):
        request = EditRequest(None, None, (word,), (), "", {})
        recipe = parse_document(Recipe, recipe_text(name, request, "toyland"))
        assert (recipe.atlas, recipe.steps[0].minus) == ("toyland", (word,))


def test_an_exported_recipe_can_be_uploaded(presenter, tmp_path):
    request = make_request(plus=["biker"], nu=6, prompt="What is it?")
    (tmp_path / "mine.yaml").write_text(code_texts(presenter.export_code(request))[0], encoding="utf-8")
    recipe = read_recipe(tmp_path / "mine.yaml")
    (step,) = recipe.steps
    assert (step.minus, step.plus, recipe.prompt) == (request.minus, request.plus, request.prompt)
    assert presenter.read_settings(presenter.field_values(vars(step.settings))) == request.settings


def test_the_mark_is_saved_as_it_was_when_the_edit_ran(presenter):
    markup = presenter.export_code(make_request(plus=["biker"], mark=CORNER))
    (files,) = (json.loads(value) for _, name, value in Reader(markup).attributes if name == "data-save")
    assert list(files) == ["steering.yaml", "mark.png"]
    assert files["steering.yaml"] is None
    assert np.array_equal(decode_mark(files["mark.png"]), decode_mark(CORNER))


# Uploaded recipes and shipped examples


def test_the_page_lists_what_it_ignores_in_a_recipe(presenter, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: a\natlas: there/ours\nmax_new_tokens: 9\n"
        "steps: [{minus: [dog], settings: {nu: 6, per: image, force: true, fit: 0.1, strength: 4}}]\n"
    )
    assert describe_ignored(read_recipe(path), TUNABLE, presenter.atlas_settings, "toyland") == [
        "Ignored, because this page has no field for it: force, max_new_tokens, per.",
        "The strength of the recipe is 4; this page goes up to 3.",
        "The recipe was written for atlas 'ours'; this page uses 'toyland'.",
    ]
    for example in presenter.examples:
        assert describe_ignored(example.recipe, TUNABLE, presenter.atlas_settings, "toyland") == []


def test_settings_of_an_older_version_have_no_effect_and_the_page_says_so(presenter, tmp_path):
    path, old = tmp_path / "old.yaml", "beta: 30, level: stream, reach: 3, fill: 1, smooth: true"
    path.write_text(f"name: a\natlas: toyland\nsteps: [{{minus: [dog], settings: {{nu: 6, {old}}}}}]\n")
    with pytest.warns(EludeSteerWarning, match="mode place has one strength now"):
        recipe = read_recipe(path)
    assert presenter.read_settings(presenter.field_values(vars(recipe.steps[0].settings))) == {"nu": 6}
    (note,) = describe_removed(path)
    assert note.startswith("No longer a setting: beta, fill, level, reach, smooth (mode place has one strength now, ")
    for more in ("", ", settings: {nu: 6}"):
        path.write_text(f"name: a\natlas: toyland\nsteps: [{{minus: [dog]{more}}}]\n")
        read_recipe(path)
        assert describe_removed(path) == []


def test_a_long_recipe_is_refused(tmp_path):
    (tmp_path / "long.yaml").write_text("name: a\natlas: b\nsteps: [{minus: [dog]}]\n" + "#" * 100_000)
    with pytest.raises(SpecError, match="the recipe has more than 20,000 characters"):
        read_recipe(tmp_path / "long.yaml")


def test_an_uploaded_recipe_opens_no_file_of_this_machine(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: a\natlas: b\nimage: /etc/passwd\nsteps: [{minus: [dog], mask: /etc/group}, {plus: [cat]}]\n")
    assert read_recipe(path) == Recipe("a", "b", (StepSpec(("dog",), mask="group"), StepSpec(plus=("cat",))))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: \xff\n", "the recipe cannot be read as UTF-8 text; upload a YAML file"),
        (None, "the recipe cannot be read as UTF-8 text; upload a YAML file"),
        (b"", "^the recipe:1: the document is empty"),
        (b"name: a\natlas: b\nsteps: []\n", "^the recipe: steps is empty; give at least one edit"),
        (b"name: a\natlas: b\nsteps: [{minus: dog}]\n", r"^the recipe:3: steps\[0\]\.minus: must be a list, not 'dog'"),
        (b"name: [\n", "^the recipe:2: not YAML"),
    ],
)
def test_a_bad_recipe_is_refused_without_naming_its_path(tmp_path, content, message):
    path = tmp_path / "secret-folder.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=message) as caught:
        read_recipe(path)
    assert "secret" not in str(caught.value)


def test_shipped_examples_have_their_images():
    examples = shipped_examples("toyland")
    assert [example.name for example in examples] == ["cats", "dog", "frisbee", "teddy", "train"]
    for example in examples:
        assert ImageFile.from_path(example.path).open().size == (96, 96)
        assert example.recipe == load_recipe(f"toyland-{example.name}")
    # The images of the LLaVA recipes are not shipped.
    assert shipped_examples("llava-onevision-0.5b") == shipped_examples("nowhere") == []


def test_edit_name_uses_signs():
    assert edit_name(StepSpec(("dog", "hot dog"), ("biker",))) == "\N{MINUS SIGN} dog \N{MINUS SIGN} hot dog + biker"
    assert edit_name(StepSpec()) == "nothing"
