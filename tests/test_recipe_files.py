import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from elude_steer import recipe_files
from elude_steer.errors import SpecError
from elude_steer.recipe_files import (
    list_recipes,
    load_any_recipe,
    load_recipe,
    load_spec,
    parse_recipe,
    parse_spec,
    recipes_dir,
)
from elude_steer.specs import AtlasSpec, ExpectSpec, Recipe, SteeringSpec, StepSpec
from elude_steer.utils.yaml_schema import dump_document, parse_document

SMALL = """\
name: small
model:
  id: facebook/dinov2-small
  layer: encoder.layer.11.mlp.fc2
"""

# The paper's table of configurations: layer, top-k, smallest cluster.
PAPER = {
    "augreg-vit-b16-layer12": ("blocks.11.mlp.fc2", 100_000, 1000),
    "dinov2-base-layer12": ("encoder.layer.11.mlp.fc2", 400_000, 1000),
    "dinov2-base-layer10": ("encoder.layer.9.mlp.fc2", 400_000, 1000),
    "dinov2-base-layer11": ("encoder.layer.10.mlp.fc2", 200_000, 1000),
    "dinov2-small-layer12": ("encoder.layer.11.mlp.fc2", 400_000, 1000),
    "dinov2-large-layer23": ("encoder.layer.22.mlp.fc2", 400_000, 500),
    "siglip2-base-layer12": ("layers.11.mlp.fc2", 200_000, 1000),
    "convnextv2-base-stage4": ("stages.3.blocks.2.mlp.fc2", 500_000, 1000),
    "dinov2-base-layer12-ef4": ("encoder.layer.11.mlp.fc2", 60_000, 1000),
    "dinov2-base-layer12-ef16": ("encoder.layer.11.mlp.fc2", 400_000, 750),
}

# The paper's interventions by recipe: minus, plus, alpha, gamma, kappa, nu. It gives no settings for the dog.
ROWS = {
    "llava-dog": [("dog", ""), ("dog", "biker")],
    "llava-train": [
        ("train", "", 5, -50, 50, "all"),
        ("train", "bus", 50, -2, 100, 50),
        ("graffiti", "clean", 15, -15, 200, 50),
    ],
    "llava-teddy": [
        ("chair", "table", 5, -5, 50, 25),
        ("teddy", "dog", 5, -50, 100, 50),
        ("teddy", "", 5, -25, 200, 100),
    ],
    "llava-frisbee": [
        ("frisbee", "ball", 15, -0.5, 200, "all"),
        ("frisbee ball", "jumping", 25, -10, 50, 250),
        ("indoor", "beach park", 25, -25, 200, 250),
    ],
    "llava-cats": [
        ("cat", "baby", 5, -10, 200, "all"),
        ("cat", "bear", 15, -10, 100, "all"),
        ("cat blanket", "", 5, -15, 50, "all"),
    ],
}

STEERING = """\
name: mine
atlas: toyland
image: images/dog.png
steps:
  - minus: [dog]
    plus: [biker, "no"]
    where: [1, 2.5, 30, 40]
    settings: {mode: place, gamma: -3, nu: all}
    expect: {gone: [dog], new: [man]}
  - minus: [cat]
"""

PNG = b"\x89PNG\r\n\x1a\n"  # how an image begins


# The shipped recipes


def test_reading_recipes_imports_neither_torch_nor_numpy():
    code = (
        "import sys, elude_steer.recipe_files as r; r.list_recipes(); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_shipped_recipe_loads_and_has_a_summary():
    kinds = {"atlases": AtlasSpec, "steering": Recipe}
    shipped = list_recipes()
    assert {item.kind for item in shipped} == set(kinds)
    for item in shipped:
        spec = load_any_recipe(item.path)
        assert type(spec) is kinds[item.kind]
        assert spec.name == item.name
        assert load_any_recipe(item.name) == spec
        assert item.summary.endswith(".")


def test_every_shipped_recipe_survives_a_round_trip():
    for one in list_recipes():
        spec = load_any_recipe(one.path)
        assert parse_document(type(spec), dump_document(spec)) == spec


def test_a_brief_dump_of_every_shipped_recipe_reads_back():
    kinds = set()
    for one in list_recipes():
        spec = load_any_recipe(one.path)
        brief = dump_document(spec, brief=True)
        assert parse_document(type(spec), brief) == spec
        assert len(brief) < len(dump_document(spec))
        assert "null" not in brief
        kinds.add(type(spec))
    assert kinds == {AtlasSpec, Recipe}


def test_every_large_build_gives_its_command_and_says_that_we_have_not_run_it():
    shipped = [item for item in list_recipes() if item.kind == "atlases"]
    assert [item.name for item in shipped] == sorted(
        [*PAPER, "llava-onevision-0.5b", "llava-onevision-0.5b-unique", "toyland"]
    )
    for item in shipped:
        text = item.path.read_text(encoding="utf-8")
        assert f"#   elude-steer build {'' if item.name == 'toyland' else 'recipes/atlases/'}{item.name}" in text
        assert ("We have not run it at this scale" in text) is (item.name != "toyland")


def test_every_build_states_its_sizes():
    for item in list_recipes():
        if item.kind == "atlases":
            spec = load_spec(item.path)
            values = (spec.tokens.per_image, spec.clusters.top_k, spec.clusters.min_cluster_size)
            assert all(isinstance(value, int) for value in values), f"{item.name} depends on the defaults"


def test_the_papers_fourteen_interventions_are_shipped_with_its_settings():
    assert sum(map(len, ROWS.values())) == 14
    for name, rows in ROWS.items():
        found = load_recipe(name)
        assert (found.atlas, found.image) == ("llava-onevision-0.5b", None)
        assert len(found.steps) == len(rows)
        for step, (minus, plus, *numbers) in zip(found.steps, rows, strict=True):
            given = step.settings
            assert (step.minus, step.plus) == (tuple(minus.split()), tuple(plus.split()))
            assert (given.mode, given.per, given.by) == ("scale", "tile", "label")
            assert not numbers or [given.alpha, given.gamma, given.kappa, given.nu] == numbers
            assert step.expect != ExpectSpec()


def test_every_shipped_steering_recipe_has_edits_and_its_command():
    for item in list_recipes():
        if item.kind == "steering":
            found = load_recipe(item.path)
            assert f"elude-steer run {item.name}" in item.path.read_text(encoding="utf-8")
            assert found.image is None or Path(found.image).is_file()
            assert all(step.minus or step.plus for step in found.steps)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_recipes_have_the_papers_settings(name):
    spec = load_spec(name)
    assert (spec.model.layer, spec.clusters.top_k, spec.clusters.min_cluster_size) == PAPER[name]
    assert (spec.clusters.selection, spec.split.winner_rule, spec.tokens.per_image) == ("leaf", "unique", 2)
    assert spec.clusters.min_samples is spec.clusters.umap_components is spec.images.source is None


def test_the_llava_spec_takes_the_last_layer_and_marks_our_settings():
    spec = load_spec("llava-onevision-0.5b")
    assert (spec.model.kind, spec.model.layer) == ("vlm", "layers.25.mlp.fc2")
    text = (recipes_dir() / "atlases" / "llava-onevision-0.5b.yaml").read_text(encoding="utf-8")
    for setting in ("per_image: 2", "top_k: 10000", "backend: auto", "min_cluster_size: 100", "winner_rule: gap"):
        assert f"  {setting}  # ours" in text


# Finding recipes


def test_a_recipe_is_found_by_name_with_and_without_its_ending(tmp_path, monkeypatch):
    # A build leaves a folder of the recipe's name: it must not hide the recipe.
    (tmp_path / "dinov2-base-layer12").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_spec("dinov2-base-layer12") == load_spec("dinov2-base-layer12.yaml")


def test_problems_name_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL, encoding="utf-8")
    assert load_spec(str(path)) == load_spec(path) == parse_spec(SMALL)
    path.write_text("name: x\nmodle: {}\n", encoding="utf-8")
    with pytest.raises(SpecError, match=re.escape(f"{path}:2: modle: no such key in this document. Did you mean 'm")):
        load_spec(path)
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(SpecError, match=r"mine.yaml cannot be read as UTF-8 text"):
        load_spec(path)


def test_an_unknown_recipe_is_refused_with_a_suggestion():
    expected = "'dinov2-base-layr12' is neither .* Did you mean 'dinov2-base-layer12'. See `elude-steer recipes list`."
    with pytest.raises(SpecError, match=expected):
        load_spec("dinov2-base-layr12")
    with pytest.raises(SpecError, match=r"'nowhere/x.yaml' is neither a file nor a shipped recipe. See"):
        load_spec("nowhere/x.yaml")


def test_an_unknown_steering_recipe_is_refused_with_a_suggestion():
    with pytest.raises(SpecError, match=r"'llava-dogs' is neither .* Did you mean 'llava-dog'\?"):
        load_recipe("llava-dogs")


def test_recipes_inside_the_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "elude_steer"
    package.mkdir()
    monkeypatch.setattr(recipe_files, "__file__", str(package / "recipe_files.py"))
    assert recipes_dir() == tmp_path.resolve() / "recipes"
    assert list_recipes() == []
    (package / "recipes" / "steering").mkdir(parents=True)
    (package / "recipes" / "steering" / "b.yaml").write_text("name: b\n", encoding="utf-8")
    (package / "recipes" / "steering" / "a.yaml").write_text("# Says a.\nname: a\n", encoding="utf-8")
    assert [(r.kind, r.name, r.summary) for r in list_recipes()] == [
        ("steering", "a", "Says a."),
        ("steering", "b", ""),
    ]


# Steering recipes


@pytest.fixture
def write_recipe(tmp_path):
    def write(text=STEERING):
        path = tmp_path / "recipes" / "mine.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def steering_problems(path):
    for load in (load_recipe, load_any_recipe):
        with pytest.raises(SpecError) as caught:
            load(path)
    return [problem.removeprefix(str(path)) for problem in caught.value.problems]


def test_a_steering_recipe_is_read(write_recipe):
    found = load_recipe(write_recipe())
    assert (found.name, found.atlas, found.max_new_tokens) == ("mine", "toyland", 64)
    first, second = found.steps
    assert (first.minus, first.plus, first.where) == (("dog",), ("biker", "no"), (1.0, 2.5, 30.0, 40.0))
    assert first.settings == SteeringSpec(mode="place", gamma=-3.0, nu="all")
    assert first.expect == ExpectSpec(("dog",), ("man",))
    assert second == StepSpec(minus=("cat",))
    assert found.prompt == "Describe this image in one sentence."


def test_the_image_is_relative_to_the_recipe(write_recipe, monkeypatch, tmp_path):
    path = write_recipe()
    expected = str(path.parent / "images" / "dog.png")
    assert load_recipe(path).image == expected
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/mine.yaml").image == expected  # whatever the folder it is called from
    assert load_recipe(write_recipe(STEERING.replace("images/dog.png", "../dog.png"))).image == str(
        tmp_path / "dog.png"
    )
    assert load_recipe(write_recipe(STEERING.replace("images/dog.png", "/x/dog.png"))).image == "/x/dog.png"
    assert load_recipe(write_recipe(STEERING.replace("image: images/dog.png\n", ""))).image is None


def test_a_document_with_steps_is_a_steering_recipe(write_recipe):
    assert isinstance(load_any_recipe(write_recipe()), Recipe)
    assert isinstance(load_any_recipe(write_recipe(SMALL)), AtlasSpec)
    assert isinstance(load_any_recipe(write_recipe(SMALL + "# steps: a comment\n")), AtlasSpec)
    assert isinstance(load_any_recipe(write_recipe(STEERING.replace("steps:", "steps :"))), Recipe)


@pytest.mark.parametrize("steps", ["steps: []", "steps: [ ]"])
def test_a_recipe_without_steps_is_refused(write_recipe, steps):
    (problem,) = steering_problems(write_recipe(f"name: mine\natlas: toyland\n{steps}\n"))
    assert problem == ": steps is empty; give at least one edit."


def test_all_problems_of_a_steering_recipe_are_reported_together(write_recipe):
    text = """\
name: mine
atals: toyland
steps:
  - minus: dog
    setings: {gamma: 1}
  - plus: [on]
    settings: {gama: 1, nu: al, kappa: 0, mode: push}
    expect: {gon: [dog]}
  - where: [a]
max_new_tokens: 0
"""
    assert steering_problems(write_recipe(text)) == [
        ":2: atals: no such key in this document. Did you mean 'atlas'?",
        ":4: steps[0].minus: must be a list, not 'dog': write [one, two].",
        ":5: steps[0].setings: no such key in steps[0]. Did you mean 'settings'?",
        ':6: steps[1].plus[0]: must be text, not on: YAML reads `on` as true: write "on" in quotes.',
        ":7: steps[1].settings.gama: no such key in steps[1].settings. Did you mean 'gamma'?",
        ":7: steps[1].settings.nu: must be a whole number of at least 1, all or null, not 'al'. Did you mean 'all'?",
        ":7: steps[1].settings.kappa: must be a whole number of at least 1 or null, not 0.",
        ":7: steps[1].settings.mode: must be scale, place or null, not 'push'.",
        ":8: steps[1].expect.gon: no such key in steps[1].expect. Did you mean 'gone'?",
        ":9: steps[2].where[0]: must be a finite number, not 'a'.",
        ":10: max_new_tokens: must be a whole number of at least 1, not 0.",
        ":1: atlas: missing, and has no default: give it text.",
    ]


def test_a_document_of_the_other_kind_is_refused(write_recipe):
    with pytest.raises(SpecError, match=r"says how to build an atlas, not what to change: `elude-steer build .*mine"):
        load_recipe(write_recipe(SMALL))
    with pytest.raises(SpecError, match=r"says what to change, not how to build an atlas: `elude-steer run .*mine"):
        load_spec(write_recipe())


def test_the_mask_is_relative_to_the_recipe(write_recipe, monkeypatch, tmp_path):
    text = "name: a\natlas: b\nsteps: [{plus: [dog], mask: marks/one.png}, {minus: [cat]}, {mask: /x/y.png}]\n"
    path = write_recipe(text)
    expected = [str(path.parent / "marks" / "one.png"), None, "/x/y.png"]
    assert [step.mask for step in load_recipe(path).steps] == expected
    monkeypatch.chdir(tmp_path)
    assert [step.mask for step in load_recipe("recipes/mine.yaml").steps] == expected  # whatever the folder
    assert load_recipe(write_recipe(text.replace("marks/", "../"))).steps[0].mask == str(tmp_path / "one.png")
    assert parse_document(Recipe, text).steps[0].mask == "marks/one.png"  # only a file has a place


def test_a_mask_is_optional(write_recipe):
    assert StepSpec().mask is None
    assert [step.mask for step in load_recipe(write_recipe()).steps] == [None, None]
    assert load_recipe(write_recipe(STEERING.replace("where: [1, 2.5, 30, 40]", "mask: null"))).steps[0].mask is None


def test_a_step_has_a_box_or_a_mask_but_not_both(write_recipe):
    text = STEERING + "  - plus: [hat]\n    where: [1, 2, 3, 4]\n    mask: mark.png\n"
    (problem,) = steering_problems(write_recipe(text))
    assert problem == ": step 3 has both where and mask; give only one."
    assert load_recipe(write_recipe(text.replace("    where: [1, 2, 3, 4]\n", ""))).steps[2].where == ()
    assert load_recipe(write_recipe(text.replace("    mask: mark.png\n", ""))).steps[2].mask is None


@pytest.mark.parametrize("mask", ["[a.png]", "5", "''", "{a: b}", "None"])
def test_a_mask_is_the_name_of_a_file(write_recipe, mask):
    (problem,) = steering_problems(write_recipe(f"name: a\natlas: b\nsteps:\n  - plus: [dog]\n    mask: {mask}\n"))
    assert problem.startswith(":5: steps[0].mask: must be text or null, not ")


# Copies, and the files that a recipe names


def test_a_copy_has_its_image_and_mask_beside_it(tmp_path):
    from elude_steer.recipe_files import check_files, copy_recipe, load_recipe, recipes_dir

    copied = copy_recipe("toyland-dog", f"{tmp_path}/r/")
    assert [path.name for path in copied] == ["toyland-dog.yaml", "toyland-dog.png"]
    recipe = load_recipe(tmp_path / "r" / "toyland-dog.yaml")
    assert recipe.image == str(tmp_path / "r" / "toyland-dog.png")
    check_files(recipe)
    original = load_recipe(recipes_dir() / "steering" / "toyland-dog.yaml")
    assert recipe.steps == original.steps
    assert copied[0].read_text().startswith("# ")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "in.png").write_bytes(PNG)
    source = tmp_path / "own.yaml"
    source.write_text("name: own\natlas: toyland\nsteps: [{minus: [dog], plus: [cat], mask: 'm/in.png'}]\n")
    copy_recipe(source, tmp_path / "r")
    assert load_recipe(tmp_path / "r" / "own.yaml").steps[0].mask == str(tmp_path / "r" / "in.png")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x/torch.py", PNG, "it is no PNG, JPEG or other image"),
        ("x/.png", PNG, "it is no PNG, JPEG or other image"),
        ("x/.bashrc.png", PNG, "it is no PNG, JPEG or other image"),
        ("x/a.png", b"import os", "it is no PNG, JPEG or other image"),
        ("x/a.png\n.png", b"import os", "it is no PNG, JPEG or other image"),
        ("../id_rsa.png", PNG, "it lies outside the recipe's folder; copy it by hand if it is yours"),
        ("{tmp}/id_rsa.png", PNG, "it lies outside the recipe's folder"),
        ("x/link.png", None, "it lies outside the recipe's folder"),
        ("x/big.png", 101_000_000, "it cannot be read .it has more than 100 MB.; copy it by hand"),
    ],
)
@pytest.mark.parametrize("key", ["image", "mask"])
def test_a_copy_takes_images_of_the_recipes_folder_alone(key, name, content, problem, tmp_path):
    """The names in a stranger's recipe are theirs: a copy beside one's own files is no place for `torch.py`."""
    from elude_steer.recipe_files import copy_recipe

    name, folder = name.replace("{tmp}", str(tmp_path)), tmp_path / "stranger"
    (folder / "x").mkdir(parents=True)
    (tmp_path / "private.png").write_bytes(PNG)
    if content is None:
        (folder / name).symlink_to(tmp_path / "private.png")
    elif isinstance(content, int):
        with (folder / name).open("wb") as file:
            file.truncate(content)
    else:
        (folder / name).write_bytes(content)
    where = {"image": {"image": name}, "mask": {}}[key]
    step = {"minus": ["dog"], **({"mask": name} if key == "mask" else {})}
    recipe = {"name": "r", "atlas": "toyland", **where, "steps": [step]}
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "mine").mkdir()
    with pytest.raises(SpecError, match=problem):
        copy_recipe(folder / "r.yaml", tmp_path / "mine")
    assert not list((tmp_path / "mine").iterdir())


def test_a_copy_has_the_name_of_a_recipe_and_one_file_of_a_name(tmp_path):
    from elude_steer.recipe_files import copy_recipe

    for folder, end in (("a", b"1"), ("b", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_bytes(PNG + end)
    text = "name: r\natlas: toyland\nimage: a/x.png\nsteps: [{minus: [dog], mask: b/x.png}]\n"
    for name, problem in (("r.yaml", r"names two files 'x\.png'"), ("torch.py", r"does not end in \.yaml")):
        (tmp_path / name).write_text(text)
        with pytest.raises(SpecError, match=problem):
            copy_recipe(tmp_path / name, f"{tmp_path}/new/")
    assert not (tmp_path / "new").exists()


def test_a_copy_replaces_nothing(tmp_path):
    from elude_steer.errors import StorageError
    from elude_steer.recipe_files import copy_recipe

    (tmp_path / "toyland-dog.png").write_bytes(b"mine")
    with pytest.raises(StorageError, match=r"toyland-dog\.png' already exists; give another folder or name"):
        copy_recipe("toyland-dog", tmp_path / "my-dog.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["toyland-dog.png"]
    (tmp_path / "toyland-dog.png").unlink()
    copy_recipe("toyland-dog", tmp_path / "one.yaml")
    assert [path.name for path in copy_recipe("toyland-dog", tmp_path / "two.yaml")] == ["two.yaml"]  # the same image
    with pytest.raises(StorageError, match=r"one\.yaml' already exists"):
        copy_recipe("toyland-dog", tmp_path / "one.yaml")


def test_a_missing_image_and_mask_are_named(tmp_path):
    from elude_steer.recipe_files import check_files, load_recipe

    path = tmp_path / "r.yaml"
    path.write_text("name: r\natlas: toyland\nimage: none.png\nsteps: [{minus: [dog], mask: m.png}]\n")
    with pytest.raises(SpecError) as caught:
        check_files(load_recipe(path))
    assert [line.partition(";")[0] for line in caught.value.problems] == [
        f"recipe 'r': image: there is no file '{tmp_path}/none.png'",
        f"recipe 'r': steps[0].mask: there is no file '{tmp_path}/m.png'",
    ]


def test_an_endless_name_makes_no_endless_line(tmp_path):
    from elude_steer.recipe_files import check_files, load_recipe

    path = tmp_path / "r.yaml"
    path.write_text(f"name: {'r' * 3000}\natlas: toyland\nimage: {'none' * 900}.png\nsteps: [{{minus: [dog]}}]\n")
    with pytest.raises(SpecError, match=r"^recipe 'rrr.{500,} … .*; correct the path\.$") as caught:
        check_files(load_recipe(path))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_recipe_that_never_ends_is_refused(kind, tmp_path):
    from elude_steer.recipe_files import load_recipe

    path = tmp_path / "r.yaml"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(SpecError, match="is neither a file nor a shipped recipe"):
        load_recipe(path)


def test_a_steering_recipe_without_steps_is_called_what_it_is(tmp_path):
    from elude_steer.recipe_files import load_any_recipe

    path = tmp_path / "r.yaml"
    path.write_text("name: r\natlas: toyland\n")
    with pytest.raises(SpecError) as caught:
        load_any_recipe(path)
    assert caught.value.problems == (f"{path}:1: steps: missing, and has no default: give it a list.",)


# Recipes of strangers

WHOLE = "name: x\natlas: toyland\nsteps: [{minus: [dog]}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WHOLE.replace("x", '"\\U00110000"'), r"not YAML: an escape such as \\U00110000 names no character"),
        (WHOLE.replace("x", '"\\UFFFFFFFF"'), "names no character"),
        (WHOLE.replace("x", "x\0"), r"the character '\\x00' is not allowed"),
        (WHOLE + 'image: "a\\0b"\n', r"image: must be text or null, not 'a\\x00b'"),
        (WHOLE.replace("x", '"\\uD800"'), r"name: must be text, not '\\ud800'"),
        (WHOLE.replace("[{minus: [dog]}]", "\n" + "- minus: [dog]\n" * 600), "has 600 steps; at most 500"),
        ("#" * 1_000_001, "has 1,000,001 characters; at most 1,000,000 are read"),
        ("[" * 2000, "nested too deeply"),
    ],
)
def test_strange_documents_are_refused_in_words(text, message):
    with pytest.raises(SpecError, match=message) as caught:
        parse_recipe(text)
    assert all(line.isprintable() for line in str(caught.value).splitlines())


def test_many_problems_are_told_in_few_lines():
    with pytest.raises(SpecError, match="… and 250 more problems") as caught:
        parse_recipe(WHOLE.replace("[{minus: [dog]}]", "\n" + "- mynus: [dog]\n" * 300))
    assert len(str(caught.value).splitlines()) == 51


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_that_are_no_files_are_refused(name):
    with pytest.raises(SpecError, match="is neither a file nor a shipped recipe"):
        load_recipe(name)
