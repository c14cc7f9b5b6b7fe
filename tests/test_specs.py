import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from elude_steer import recipe_files
from elude_steer.errors import SpecError
from elude_steer.recipe_files import list_recipes, load_any_recipe, load_recipe, load_spec, parse_spec, recipes_dir
from elude_steer.specs import AtlasSpec, ClustersSpec, ExpectSpec, ModelSpec, Recipe, SteeringSpec, StepSpec
from elude_steer.utils.yaml_schema import dump_document as dump_spec
from elude_steer.utils.yaml_schema import override, parse_document

SMALL = """\
name: small
model:
  id: facebook/dinov2-small
  layer: encoder.layer.11.mlp.fc2
"""

# What the paper's table of configurations says: layer, top-k, smallest cluster.
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


# The paper's interventions by recipe: minus, plus, alpha, gamma, kappa, nu; for the dog it gives no settings.
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
image: pictures/dog.png
steps:
  - minus: [dog]
    plus: [biker, "no"]
    where: [1, 2.5, 30, 40]
    settings: {mode: place, gamma: -3, nu: all}
    expect: {gone: [dog], new: [man]}
  - minus: [cat]
"""


@dataclass(frozen=True)
class Inner:
    words: tuple[str, ...] = ()
    gain: float = field(default=1.0, metadata={"min": -50})
    switch: Literal["on", "off"] = "off"


@dataclass(frozen=True)
class Toy:
    inner: Inner = field(default_factory=Inner)
    flag: bool = False


@pytest.fixture
def small():
    return parse_spec(SMALL)


def problems(text, kind=AtlasSpec):
    with pytest.raises(SpecError) as caught:
        parse_document(kind, text, "my.yaml")
    lines = str(caught.value).split("\n")
    assert lines == list(caught.value.problems), "one line each"
    assert all(re.match(r"my\.yaml:\d+: ", line) for line in lines)
    return lines


def toy(text):
    return problems(f"inner:\n  {text}\n", Toy)


# Reading


def test_defaults_fill_what_is_left_out(small):
    assert small == AtlasSpec("small", ModelSpec("facebook/dinov2-small", "encoder.layer.11.mlp.fc2"))
    assert (small.model.kind, small.tokens.per_image, small.clusters.top_k) == ("vlm", 2, 10000)
    assert small.clusters.min_samples is None
    assert small.references.keep == 25


def test_specs_are_frozen_and_compare(small):
    with pytest.raises(FrozenInstanceError):
        small.name = "other"
    assert len({small, parse_spec(SMALL)}) == 1


def test_values_of_every_kind_are_read():
    spec = parse_spec(
        SMALL + "  trust_remote_code: yes\n  revision: '1234567'\n"
        "tokens: {per_image: all, seed: 7}\nclusters: {top_k: 400_000, min_samples: 1, umap_components: null}\n"
    )
    assert spec.model.trust_remote_code is True
    assert spec.model.revision == "1234567"
    assert (spec.tokens.per_image, spec.tokens.seed) == ("all", 7)
    assert spec.clusters == ClustersSpec(top_k=400_000, min_samples=1)


def test_floats_lists_and_choices_that_look_like_bools():
    text = 'inner: {words: ["no", dog], gain: 3.0e-4, switch: "on"}\nflag: true\n'
    assert parse_document(Toy, text) == Toy(Inner(("no", "dog"), 3e-4, "on"), True)
    assert parse_document(Toy, "inner: {gain: 3}") == Toy(Inner(gain=3.0))


def test_aliases_are_read_where_they_point():
    assert parse_spec(SMALL + "tokens: {seed: &s 7}\nsplit: {seed: *s}\n").split.seed == 7


def test_reading_imports_no_numerics():
    code = (
        "import sys, elude_steer.recipe_files as r; r.list_recipes(); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Refusing


def test_all_faults_are_reported_together():
    found = problems(
        "name: on\nmodel:\n  id: x\nclusters:\n  topk: 5\n  backend: hdbscn\n  min_samples: 0\n  min_samples: 3\n"
    )
    assert found == [
        'my.yaml:1: name: must be text, not on: YAML reads `on` as true: write "on" in quotes.',
        "my.yaml:2: model.layer: missing, and has no default: give it text.",
        "my.yaml:5: clusters.topk: no such key in clusters. Did you mean 'top_k'?",
        "my.yaml:6: clusters.backend: must be auto, exact, fast, hdbscan or cuml, not 'hdbscn'. "
        "Did you mean 'hdbscan'?",
        "my.yaml:7: clusters.min_samples: must be a whole number of at least 1 or null, not 0.",
        "my.yaml:8: clusters.min_samples: given twice, first on line 7: keep one.",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("model.revision: 1234567", 'YAML reads `1234567` as a number: write "1234567" in quotes.'),
        ("model.revision: 1.0e+10", 'YAML reads `1.0e+10` as a number: write "1.0e+10" in quotes.'),
        ("model.revision: 2024-13-45", 'YAML reads `2024-13-45` as a date: write "2024-13-45" in quotes.'),
        ("model.revision: no", 'YAML reads `no` as false: write "no" in quotes.'),
        ("model.revision: =", 'YAML reads `=` as something special: write "=" in quotes.'),
        ("model.revision: !!python/name:os.system x", "something special"),
        ("model.revision: None", "YAML reads `None` as text: write null."),
        ("images.column:", "must be text, not nothing."),
        ("images.column: ''", "must be text, not ''."),
        ("images.source: [a, b]", "must be text or null, not a list."),
        ("images.source: {a: b}", "must be text or null, not keys with values."),
        ("images.limit: 010", "not 010: write it in plain decimal digits."),
        ("images.limit: 1:30", "not 1:30: write it in plain decimal digits."),
        ("images.limit: 0x_", "write it in plain decimal digits."),
        ("images.limit: None", "or null, not 'None': YAML reads `None` as text: write null."),
        ("tokens.batch_size: true", "must be a whole number of at least 1, not true."),
        ("tokens.batch_size: on", "must be a whole number of at least 1, not on: YAML reads `on` as true."),
        ("tokens.seed: 1e4", "YAML reads `1e4` as text: write 10000."),
        ("tokens.seed: 3e-4", "must be a whole number of at least 0, not '3e-4'."),
        ("tokens.seed: '5'", 'YAML reads `"5"` as text: write 5.'),
        ("tokens.seed: 1.0e+4", "not 1.0e+4: write 10000."),
        ("tokens.seed: 1.5", "must be a whole number of at least 0, not 1.5."),
        ("tokens.seed: .nan", "must be a whole number of at least 0, not .nan."),
        ("tokens.seed: null", "must be a whole number of at least 0, not null."),
        ("tokens.per_image: al", "whole number of at least 1 or all, not 'al'. Did you mean 'all'?"),
        ("tokens.dtype: off", "must be float16 or float32, not off: YAML reads `off` as false."),
        ("clusters.min_cluster_size: 1", "must be a whole number of at least 2, not 1."),
        ("model.trust_remote_code: 1", "must be true or false, not 1."),
        ('model.trust_remote_code: "true"', 'YAML reads `"true"` as text: write true.'),
    ],
)
def test_each_trap_names_its_cure(line, expected):
    section, rest = line.split(".", 1)
    head = SMALL if section == "model" else f"{SMALL}{section}:\n"
    (problem,) = problems(f"{head}  {rest}\n")
    key = rest.split(":")[0]
    assert problem.startswith(f"my.yaml:{5 if section == 'model' else 6}: {section}.{key}: must be ")
    assert expected in problem


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gain: 3e-4", "inner.gain: must be a finite number of at least -50, not '3e-4': .* write 3.0e-4."),
        ("gain: 1.5e3", "write 1.5e[+]3."),
        ("gain: '0.5'", "write 0.5."),
        ("gain: .nan", "must be a finite number of at least -50, not .nan."),
        ("gain: -.inf", "not -.inf."),
        ("gain: nan", "not 'nan'."),
        ("gain: -50.5", "not -50.5."),
        ("gain: yes", "not yes: YAML reads `yes` as true."),
        ("switch: on", 'must be on or off, not on: YAML reads `on` as true: write "on" in quotes.'),
        ("words: dog", r"inner.words: must be a list, not 'dog': write \[one, two\]."),
    ],
)
def test_traps_of_numbers_lists_and_choices(line, expected):
    (problem,) = toy(line)
    assert re.search(expected, problem)


def test_every_item_of_a_list_is_judged():
    first, second = toy("words: [no, dog, on]")
    assert 'inner.words[0]: must be text, not no: YAML reads `no` as false: write "no" in quotes.' in first
    assert "inner.words[2]: " in second


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "my.yaml:1: the document is empty"),
        ("[" * 5000, "my.yaml:1: not YAML: nested too deeply."),
        ("# only a comment\n", "my.yaml:1: the document is empty"),
        ("- a\n", "my.yaml:1: must be keys with values, not a list: its keys are name, model, images"),
        ("dog", "my.yaml:1: must be keys with values, not 'dog'"),
        ("name: x\nmodel: [\n", "my.yaml:3: not YAML: while parsing"),
        ("name: x: y\n", "my.yaml:1: not YAML: mapping values are not allowed here."),
        ("name: x\n\tmodel: y\n", "my.yaml:2: not YAML: .*'\\\\t' that cannot start any token"),
        ("name: x\n---\nname: y\n", "my.yaml:2: not YAML: expected a single document"),
        ("name: x\nmodel: *gone\n", "my.yaml:2: not YAML: found undefined alias 'gone'"),
        ("name: x\nmodel: \x00\n", "my.yaml:2: not YAML: the character '\\\\x00' is not allowed"),
        (SMALL + "clusters:\n", "my.yaml:5: clusters: must be keys with values, not nothing: write its keys below it"),
        (SMALL + "zebra: 1\n", "my.yaml:5: zebra: no such key in this document. Its keys are name, model"),
        (SMALL + "[a]: 1\n", "my.yaml:5: a list: no such key"),
        (SMALL + "<<: {tokens: {seed: 1}}\n", "my.yaml:5: <<: no such key"),
        (SMALL + "name: again\n", "my.yaml:5: name: given twice, first on line 1: keep one."),
        (SMALL + "images: {source: &a [*a]}\n", "my.yaml:5: images.source: must be text or null, not a list."),
    ],
)
def test_documents_that_are_no_recipe(text, expected):
    (problem,) = problems(text)
    assert re.match(expected, problem)


def test_a_missing_section_names_its_required_keys():
    assert [line.split(": ")[1] for line in problems("tokens: {seed: 1}")] == ["name", "model.id", "model.layer"]


def test_long_and_many_lined_values_stay_on_one_short_line():
    (problem,) = problems(f"{SMALL}tokens:\n  dtype: |\n    {'dog ' * 50}\n    cat\n")
    assert len(problem) < 160


def test_it_is_a_value_error_too():
    with pytest.raises(ValueError, match=r"<text>:1: name: missing"):
        parse_spec("model: {id: x, layer: y}")


# Writing and overriding


def test_round_trip_of_every_shipped_recipe():
    for one in list_recipes():
        spec = load_any_recipe(one.path)
        assert parse_document(type(spec), dump_spec(spec)) == spec


def test_round_trip_of_floats_and_lists():
    spec = Toy(Inner(("no", "1e10", "é", "0\x85", "word " * 40), 1e-07, "on"), True)
    assert parse_document(Toy, dump_spec(spec)) == spec


@settings(deadline=None)
@given(text=st.text(min_size=1).filter(lambda text: text.strip() and text != "None"), number=st.integers(2, 10**17))
def test_round_trip_of_any_text_and_number(text, number):
    spec = AtlasSpec(text, ModelSpec(text, text, revision=text), clusters=ClustersSpec(top_k=number))
    assert parse_spec(dump_spec(spec)) == spec


@settings(deadline=None)
@given(st.text(alphabet="ab:-[]{}&*!|>'\"%@`#, \n\t01.e", max_size=40))
def test_whatever_the_text_the_error_is_a_spec_error(text):
    with pytest.raises(SpecError):
        parse_spec(text)


def test_override_changes_only_what_it_names(small):
    changed = override(small, ["clusters.top_k=5000", "tokens.per_image=all", "images.source=hf:a/b", "name=other"])
    assert (changed.name, changed.tokens.per_image, changed.images.source) == ("other", "all", "hf:a/b")
    assert changed.clusters == replace(small.clusters, top_k=5000)
    assert small == parse_spec(SMALL)
    assert override(small, []) == small


def test_override_with_null_equals_signs_and_a_whole_section(small):
    assert override(replace(small, name="x"), ["images.source=a=b"]).images.source == "a=b"
    assert override(override(small, ["clusters.min_samples=3"]), ["clusters.min_samples=null"]) == small
    assert override(small, ["clusters={top_k: 7}"]).clusters == replace(small.clusters, top_k=7)


def test_override_is_as_strict_as_the_file_and_reports_all(small):
    with pytest.raises(SpecError) as caught:
        override(
            small,
            [
                "clusters.topk=5",
                "clusters.top_k=1",
                "model.revision=on",
                "clusters",
                "images.source=",
                "tokens=3",
                "name.x=3",
                "split.seed=1",
                "split.seed=2",
                "split.rho_score=[",
            ],
        )
    assert [problem.split(": ", 1)[1] for problem in caught.value.problems] == [
        "clusters.topk: no such key in clusters. Did you mean 'top_k'?",
        "clusters.top_k: must be a whole number of at least 2, not 1.",
        'model.revision: must be text or null, not on: YAML reads `on` as true: write "on" in quotes.',
        "is not an assignment: write section.key=value, such as clusters.top_k=5000.",
        "is not an assignment: write section.key=value, such as clusters.top_k=5000.",
        "tokens: must be keys with values, not 3: write its keys below it, indented.",
        "name: must be text, not keys with values.",
        "split.seed: given twice: keep one.",
        "not YAML: while parsing a flow node expected the node content, but found '<stream end>'.",
    ]
    assert caught.value.problems[0].startswith("'clusters.topk=5': ")


# The shipped recipes


def test_every_shipped_recipe_loads_and_says_what_it_is():
    kinds = {"atlases": AtlasSpec, "steering": Recipe}
    shipped = list_recipes()
    assert {item.kind for item in shipped} == set(kinds)
    for item in shipped:
        spec = load_any_recipe(item.path)
        assert type(spec) is kinds[item.kind]
        assert spec.name == item.name
        assert load_any_recipe(item.name) == spec
        assert item.summary.endswith(".")


def test_every_large_build_says_how_to_run_it_and_that_we_have_not():
    shipped = [item for item in list_recipes() if item.kind == "atlases"]
    assert [item.name for item in shipped] == sorted([*PAPER, "llava-onevision-0.5b", "toyland"])
    for item in shipped:
        text = item.path.read_text(encoding="utf-8")
        assert f"#   elude-steer build {'' if item.name == 'toyland' else 'recipes/atlases/'}{item.name}" in text
        assert ("ot yet run by us at this scale" in text) is (item.name != "toyland")


def test_the_papers_fourteen_interventions_are_there_with_its_settings():
    assert sum(map(len, ROWS.values())) == 14
    for name, rows in ROWS.items():
        found = load_recipe(name)
        assert (found.atlas, found.image) == ("llava-onevision-0.5b", None)
        assert len(found.steps) == len(rows)
        for step, (minus, plus, *numbers) in zip(found.steps, rows, strict=True):
            how = step.settings
            assert (step.minus, step.plus) == (tuple(minus.split()), tuple(plus.split()))
            assert (how.mode, how.per, how.by) == ("scale", "tile", "label")
            assert not numbers or [how.alpha, how.gamma, how.kappa, how.nu] == numbers
            assert step.expect != ExpectSpec()


def test_every_shipped_steering_recipe_asks_for_something_and_says_what_it_expects():
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


def test_llava_takes_the_last_layer_and_marks_what_is_ours():
    spec = load_spec("llava-onevision-0.5b")
    assert (spec.model.kind, spec.model.layer) == ("vlm", "layers.25.mlp.fc2")
    text = (recipes_dir() / "atlases" / "llava-onevision-0.5b.yaml").read_text(encoding="utf-8")
    for setting in ("per_image: 2", "top_k: 10000", "backend: auto", "min_cluster_size: 100", "winner_rule: gap"):
        assert f"  {setting}  # ours" in text


def test_a_name_is_found_with_and_without_its_ending(tmp_path, monkeypatch):
    # A build leaves a folder of the recipe's name: it must not hide the recipe.
    (tmp_path / "dinov2-base-layer12").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_spec("dinov2-base-layer12") == load_spec("dinov2-base-layer12.yaml")


def test_a_file_is_read_and_named_in_its_problems(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL, encoding="utf-8")
    assert load_spec(str(path)) == load_spec(path) == parse_spec(SMALL)
    path.write_text("name: x\nmodle: {}\n", encoding="utf-8")
    with pytest.raises(SpecError, match=re.escape(f"{path}:2: modle: no such key in this document. Did you mean 'm")):
        load_spec(path)
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(SpecError, match=r"mine.yaml cannot be read as UTF-8 text"):
        load_spec(path)


def test_a_missing_recipe_is_named_with_the_closest():
    expected = "'dinov2-base-layr12' is neither .* Did you mean 'dinov2-base-layer12'. See `elude-steer recipes list`."
    with pytest.raises(SpecError, match=expected):
        load_spec("dinov2-base-layr12")
    with pytest.raises(SpecError, match=r"'nowhere/x.yaml' is neither a file nor a shipped recipe. See"):
        load_spec("nowhere/x.yaml")


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
def mine(tmp_path):
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


def test_a_steering_recipe_is_read(mine):
    found = load_recipe(mine())
    assert (found.name, found.atlas, found.max_new_tokens) == ("mine", "toyland", 64)
    first, second = found.steps
    assert (first.minus, first.plus, first.where) == (("dog",), ("biker", "no"), (1.0, 2.5, 30.0, 40.0))
    assert first.settings == SteeringSpec(mode="place", gamma=-3.0, nu="all")
    assert first.expect == ExpectSpec(("dog",), ("man",))
    assert second == StepSpec(minus=("cat",))
    assert found.prompt == "Describe this image in one sentence."


def test_its_picture_is_looked_for_beside_it(mine, monkeypatch, tmp_path):
    path = mine()
    wanted = str(path.parent / "pictures" / "dog.png")
    assert load_recipe(path).image == wanted
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/mine.yaml").image == wanted  # whatever the folder it is called from
    assert load_recipe(mine(STEERING.replace("pictures/dog.png", "../dog.png"))).image == str(tmp_path / "dog.png")
    assert load_recipe(mine(STEERING.replace("pictures/dog.png", "/x/dog.png"))).image == "/x/dog.png"
    assert load_recipe(mine(STEERING.replace("image: pictures/dog.png\n", ""))).image is None


def test_either_kind_is_told_by_its_steps(mine):
    assert isinstance(load_any_recipe(mine()), Recipe)
    assert isinstance(load_any_recipe(mine(SMALL)), AtlasSpec)
    assert isinstance(load_any_recipe(mine(SMALL + "# steps: a comment\n")), AtlasSpec)
    assert isinstance(load_any_recipe(mine(STEERING.replace("steps:", "steps :"))), Recipe)


@pytest.mark.parametrize("steps", ["steps: []", "steps: [ ]"])
def test_a_recipe_without_steps_is_refused(mine, steps):
    (problem,) = steering_problems(mine(f"name: mine\natlas: toyland\n{steps}\n"))
    assert problem == ": steps is empty; give at least one edit."


def test_all_faults_of_a_steering_recipe_are_reported_together(mine):
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
    assert steering_problems(mine(text)) == [
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


def test_a_build_spec_is_no_steering_recipe_and_the_other_way_round(mine):
    with pytest.raises(SpecError, match=r"mine\.yaml:1: steps: missing, and has no default: give it a list\."):
        load_recipe(mine(SMALL))
    with pytest.raises(SpecError, match="steps: no such key"):
        load_spec(mine())


def test_a_missing_steering_recipe_is_named_with_the_closest():
    with pytest.raises(SpecError, match=r"'llava-dogs' is neither .* Did you mean 'llava-dog'\?"):
        load_recipe("llava-dogs")


# Masks


def test_a_mask_is_looked_for_beside_its_recipe(mine, monkeypatch, tmp_path):
    text = "name: a\natlas: b\nsteps: [{plus: [dog], mask: marks/one.png}, {minus: [cat]}, {mask: /x/y.png}]\n"
    path = mine(text)
    wanted = [str(path.parent / "marks" / "one.png"), None, "/x/y.png"]
    assert [step.mask for step in load_recipe(path).steps] == wanted
    monkeypatch.chdir(tmp_path)
    assert [step.mask for step in load_recipe("recipes/mine.yaml").steps] == wanted  # whatever the folder
    assert load_recipe(mine(text.replace("marks/", "../"))).steps[0].mask == str(tmp_path / "one.png")
    assert parse_document(Recipe, text).steps[0].mask == "marks/one.png"  # only a file has a place


def test_without_a_mask_there_is_none(mine):
    assert StepSpec().mask is None
    assert [step.mask for step in load_recipe(mine()).steps] == [None, None]
    assert load_recipe(mine(STEERING.replace("where: [1, 2.5, 30, 40]", "mask: null"))).steps[0].mask is None


def test_only_one_thing_says_where(mine):
    text = STEERING + "  - plus: [hat]\n    where: [1, 2, 3, 4]\n    mask: mark.png\n"
    (problem,) = steering_problems(mine(text))
    assert problem == ": step 3 has both where and mask; give only one."
    assert load_recipe(mine(text.replace("    where: [1, 2, 3, 4]\n", ""))).steps[2].where == ()
    assert load_recipe(mine(text.replace("    mask: mark.png\n", ""))).steps[2].mask is None


@pytest.mark.parametrize("mask", ["[a.png]", "5", "''", "{a: b}", "None"])
def test_a_mask_is_the_name_of_a_file(mine, mask):
    (problem,) = steering_problems(mine(f"name: a\natlas: b\nsteps:\n  - plus: [dog]\n    mask: {mask}\n"))
    assert problem.startswith(":5: steps[0].mask: must be text or null, not ")


# Writing in brief


def test_a_brief_text_of_every_shipped_recipe_reads_back_to_it():
    kinds = set()
    for one in list_recipes():
        spec = load_any_recipe(one.path)
        brief = dump_spec(spec, brief=True)
        assert parse_document(type(spec), brief) == spec
        assert len(brief) < len(dump_spec(spec))
        assert "null" not in brief
        kinds.add(type(spec))
    assert kinds == {AtlasSpec, Recipe}


def test_only_what_differs_is_written():
    step = StepSpec(("dog",), settings=SteeringSpec(nu="all"))
    assert yaml.safe_load(dump_spec(Recipe("a", "b", (step, StepSpec())), brief=True)) == {
        "name": "a",
        "atlas": "b",
        "steps": [{"minus": ["dog"], "settings": {"nu": "all"}}, {}],
    }
    spec = AtlasSpec("a", ModelSpec("x", "y"), clusters=ClustersSpec(top_k=7))
    assert yaml.safe_load(dump_spec(spec, brief=True)) == {
        "name": "a",
        "model": {"id": "x", "layer": "y"},
        "clusters": {"top_k": 7},
    }
    assert dump_spec(Toy(), brief=True).strip() == "{}"


def test_a_value_that_only_looks_like_none_is_written():
    """Zero, false and empty differ from what they stand for elsewhere."""
    step = StepSpec(settings=SteeringSpec(gamma=0.0, fill=0, smooth=False))
    written = yaml.safe_load(dump_spec(Recipe("a", "b", (step,), max_new_tokens=1), brief=True))
    assert written["steps"] == [{"settings": {"gamma": 0.0, "fill": 0, "smooth": False}}]
    assert written["max_new_tokens"] == 1
    assert yaml.safe_load(dump_spec(Recipe("a", "b", ()), brief=True))["steps"] == []
    assert dump_spec(Recipe("a", "b", ())).count("\n") == 6  # unasked, everything is written


texts = st.text(min_size=1).filter(lambda text: text.strip() and text != "None")
lists = st.lists(texts, max_size=2).map(tuple)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
how = st.builds(
    SteeringSpec,
    mode=st.sampled_from([None, "scale", "place"]),
    gamma=numbers,
    fill=st.none() | st.integers(0, 99),
    nu=st.sampled_from([None, "all", 1, 50]),
    smooth=st.sampled_from([None, True, False]),
)
steps = st.builds(
    StepSpec,
    minus=lists,
    plus=lists,
    where=st.sampled_from([(), (1.0, 2.0, 3.0, 4.5)]),
    mask=st.none() | texts,
    settings=how,
    expect=st.builds(ExpectSpec, gone=lists, new=lists),
)


@settings(deadline=None, max_examples=60)
@given(
    st.builds(
        Recipe,
        name=texts,
        atlas=texts,
        steps=st.lists(steps, max_size=2).map(tuple),
        image=st.none() | texts,
        prompt=texts,
        max_new_tokens=st.integers(1, 99),
    )
)
def test_any_recipe_reads_back_whether_brief_or_not(spec):
    assert parse_document(Recipe, dump_spec(spec, brief=True)) == parse_document(Recipe, dump_spec(spec)) == spec
