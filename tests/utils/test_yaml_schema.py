import re
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from elude_steer.errors import EludeSteerWarning, SpecError
from elude_steer.specs import AtlasSpec, ClustersSpec, ExpectSpec, ModelSpec, Recipe, SteeringSpec, StepSpec
from elude_steer.utils.yaml_schema import dump_document, override, parse_document, validate

SMALL = """\
name: small
model:
  id: facebook/dinov2-small
  layer: encoder.layer.11.mlp.fc2
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
    return parse_document(AtlasSpec, SMALL)


def problems(text, kind=AtlasSpec):
    with pytest.raises(SpecError) as caught:
        parse_document(kind, text, "my.yaml")
    lines = str(caught.value).split("\n")
    assert lines == list(caught.value.problems), "one line each"
    assert all(re.match(r"my\.yaml:\d+: ", line) for line in lines)
    return lines


def toy_problems(text):
    return problems(f"inner:\n  {text}\n", Toy)


# Reading


def test_values_of_all_types_are_read():
    spec = parse_document(
        AtlasSpec,
        SMALL + "  trust_remote_code: yes\n  revision: '1234567'\n"
        "tokens: {per_image: all, seed: 7}\nclusters: {top_k: 400_000, min_samples: 1, umap_components: null}\n",
    )
    assert spec.model.trust_remote_code is True
    assert spec.model.revision == "1234567"
    assert (spec.tokens.per_image, spec.tokens.seed) == ("all", 7)
    assert spec.clusters == ClustersSpec(top_k=400_000, min_samples=1)


def test_floats_lists_and_choices_that_look_like_bools():
    text = 'inner: {words: ["no", dog], gain: 3.0e-4, switch: "on"}\nflag: true\n'
    assert parse_document(Toy, text) == Toy(Inner(("no", "dog"), 3e-4, "on"), True)
    assert parse_document(Toy, "inner: {gain: 3}") == Toy(Inner(gain=3.0))


def test_aliases_are_followed():
    assert parse_document(AtlasSpec, SMALL + "tokens: {seed: &s 7}\nsplit: {seed: *s}\n").split.seed == 7


def test_aliases_do_not_multiply():
    """A few lines stand for 2^40 values, or for a list of a thousand lists of a thousand."""
    doubled = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    squared = "name: r\natlas: a\nsteps:\n- &s {minus: [&w dog" + ", *w" * 999 + "]}\n" + "- *s\n" * 999
    endless = "name: &n [*n]\n"
    for text in (doubled, squared, endless):
        assert len(text) < 12_000
        assert problems(text, Recipe) == ["my.yaml:1: has more than 100,000 keys and values, aliases resolved."]


def test_all_problems_are_reported_together():
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
        ("tokens.per_image: al", "whole number of at least 1, all or auto, not 'al'. Did you mean 'all'?"),
        ("tokens.dtype: off", "must be float16 or float32, not off: YAML reads `off` as false."),
        ("clusters.min_cluster_size: 1", "must be a whole number of at least 2 or auto, not 1."),
        ("model.trust_remote_code: 1", "must be true or false, not 1."),
        ('model.trust_remote_code: "true"', 'YAML reads `"true"` as text: write true.'),
    ],
)
def test_each_trap_of_yaml_is_reported_with_its_fix(line, expected):
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
    (problem,) = toy_problems(line)
    assert re.search(expected, problem)


def test_every_item_of_a_list_is_checked():
    first, second = toy_problems("words: [no, dog, on]")
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
        (SMALL + "images: {source: &a [*a]}\n", "my.yaml:1: has more than 100,000 keys and values, aliases resolved."),
    ],
)
def test_texts_that_are_no_document_are_refused(text, expected):
    (problem,) = problems(text)
    assert re.match(expected, problem)


def test_a_missing_section_names_its_required_keys():
    assert [line.split(": ")[1] for line in problems("tokens: {seed: 1}")] == ["name", "model.id", "model.layer"]


def test_long_values_are_shortened_to_one_line():
    (problem,) = problems(f"{SMALL}tokens:\n  dtype: |\n    {'dog ' * 50}\n    cat\n")
    assert len(problem) < 160


def test_a_spec_error_is_a_value_error():
    with pytest.raises(ValueError, match=r"<text>:1: name: missing"):
        parse_document(AtlasSpec, "model: {id: x, layer: y}")


# Writing


def test_floats_and_lists_survive_a_round_trip():
    spec = Toy(Inner(("no", "1e10", "é", "0\x85", "word " * 40), 1e-07, "on"), True)
    assert parse_document(Toy, dump_document(spec)) == spec


@settings(deadline=None)
@given(
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1).filter(
        lambda text: text.strip() and text != "None"
    ),
    number=st.integers(2, 10**17),
)
def test_any_text_and_number_survive_a_round_trip(text, number):
    spec = AtlasSpec(text, ModelSpec(text, text, revision=text), clusters=ClustersSpec(top_k=number))
    assert parse_document(AtlasSpec, dump_document(spec)) == spec


@settings(deadline=None)
@given(st.text(alphabet="ab:-[]{}&*!|>'\"%@`#, \n\t01.e", max_size=40))
def test_any_wrong_text_raises_a_spec_error(text):
    with pytest.raises(SpecError):
        parse_document(AtlasSpec, text)


def test_a_brief_dump_holds_only_what_differs_from_the_defaults():
    step = StepSpec(("dog",), settings=SteeringSpec(nu="all"))
    assert yaml.safe_load(dump_document(Recipe("a", "b", (step, StepSpec())), brief=True)) == {
        "name": "a",
        "atlas": "b",
        "steps": [{"minus": ["dog"], "settings": {"nu": "all"}}, {}],
    }
    spec = AtlasSpec("a", ModelSpec("x", "y"), clusters=ClustersSpec(top_k=7))
    assert yaml.safe_load(dump_document(spec, brief=True)) == {
        "name": "a",
        "model": {"id": "x", "layer": "y"},
        "clusters": {"top_k": 7},
    }
    assert dump_document(Toy(), brief=True).strip() == "{}"


def test_a_brief_dump_holds_zero_false_and_empty_values():
    """Zero, false and empty differ from what they stand for elsewhere."""
    step = StepSpec(settings=SteeringSpec(gamma=0.0, strength=0.0, force=False))
    written = yaml.safe_load(dump_document(Recipe("a", "b", (step,), max_new_tokens=1), brief=True))
    assert written["steps"] == [{"settings": {"gamma": 0.0, "strength": 0.0, "force": False}}]
    assert written["max_new_tokens"] == 1
    assert yaml.safe_load(dump_document(Recipe("a", "b", ()), brief=True))["steps"] == []
    assert dump_document(Recipe("a", "b", ())).count("\n") == 6  # unasked, everything is written


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: text.strip() and text != "None"
)
lists = st.lists(texts, max_size=2).map(tuple)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
section = st.builds(
    SteeringSpec,
    mode=st.sampled_from([None, "scale", "place"]),
    gamma=numbers,
    kappa=st.none() | st.integers(1, 99),
    nu=st.sampled_from([None, "all", 1, 50]),
    force=st.sampled_from([None, True, False]),
)
steps = st.builds(
    StepSpec,
    minus=lists,
    plus=lists,
    where=st.sampled_from([(), (1.0, 2.0, 3.0, 4.5)]),
    mask=st.none() | texts,
    settings=section,
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
def test_any_recipe_reads_back_from_both_dumps(spec):
    assert (
        parse_document(Recipe, dump_document(spec, brief=True)) == parse_document(Recipe, dump_document(spec)) == spec
    )


# Overriding


def test_override_changes_only_what_it_names(small):
    changed = override(small, ["clusters.top_k=5000", "tokens.per_image=all", "images.source=hf:a/b", "name=other"])
    assert (changed.name, changed.tokens.per_image, changed.images.source) == ("other", "all", "hf:a/b")
    assert changed.clusters == replace(small.clusters, top_k=5000)
    assert small == parse_document(AtlasSpec, SMALL)
    assert override(small, []) == small


def test_override_takes_null_equals_signs_and_sections(small):
    assert override(replace(small, name="x"), ["images.source=a=b"]).images.source == "a=b"
    assert override(override(small, ["clusters.min_samples=3"]), ["clusters.min_samples=null"]) == small
    assert override(small, ["clusters={top_k: 7}"]).clusters == replace(small.clusters, top_k=7)


def test_override_is_as_strict_as_a_file_and_reports_all_problems(small):
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
        "clusters.top_k: must be a whole number of at least 2 or auto, not 1.",
        'model.revision: must be text or null, not on: YAML reads `on` as true: write "on" in quotes.',
        "is not an assignment: write section.key=value, such as clusters.top_k=5000.",
        "is not an assignment: write section.key=value, such as clusters.top_k=5000.",
        "tokens: must be keys with values, not 3: write its keys below it, indented.",
        "name: must be text, not keys with values.",
        "split.seed: given twice: keep one.",
        "not YAML: while parsing a flow node expected the node content, but found '<stream end>'.",
    ]
    assert caught.value.problems[0].startswith("'clusters.topk=5': ")


# Validating documents made in Python


def invalid(document):
    with pytest.raises(SpecError) as caught:
        validate(document)
    return list(caught.value.problems)


def test_a_valid_document_is_returned_as_its_file_reads():
    document = Toy(Inner(["no", "dog"], 3, "on"), True)
    checked = validate(document)
    assert checked == parse_document(Toy, dump_document(document)) == Toy(Inner(("no", "dog"), 3.0, "on"), True)
    assert type(checked.inner.gain) is float and type(checked.inner.words) is tuple


def test_all_problems_of_a_document_are_reported_together():
    clusters = ClustersSpec(top_k=1, backend="hdbscn", min_samples=True)
    assert invalid(AtlasSpec(" ", ModelSpec("x", "y", revision="None"), clusters=clusters)) == [
        "name: must be text, not ' '.",
        "model.revision: must be text or null, not 'None'.",
        "clusters.top_k: must be a whole number of at least 2 or auto, not 1.",
        "clusters.backend: must be auto, exact, fast, hdbscan or cuml, not 'hdbscn'. Did you mean 'hdbscan'?",
        "clusters.min_samples: must be a whole number of at least 1 or null, not True.",
    ]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (Toy(inner={"gain": 3}), "inner: must be an Inner, not a dict."),
        (Toy(Inner(words="dog")), "inner.words: must be a list, not 'dog'."),
        (Toy(Inner(words=("dog", 3))), "inner.words[1]: must be text, not 3."),
        (Toy(Inner(gain=-51)), "inner.gain: must be a finite number of at least -50, not -51."),
        (Toy(Inner(gain=float("nan"))), "inner.gain: must be a finite number of at least -50, not nan."),
        (Toy(Inner(gain=10**400)), f"inner.gain: must be a finite number of at least -50, not {10**400}."),
        (Toy(Inner(gain=None)), "inner.gain: must be a finite number of at least -50, not None."),
        (Toy(Inner(switch=True)), "inner.switch: must be on or off, not True."),
        (Toy(flag=1), "flag: must be true or false, not 1."),
    ],
)
def test_wrong_values_are_refused(document, problem):
    assert invalid(document) == [problem]


@dataclass(frozen=True)
class Limits:
    share: float = field(default=0.0, metadata={"min": 0, "max": 1})
    count: int = field(default=0, metadata={"max": 9})


@pytest.mark.parametrize(
    ("limits", "text", "problem"),
    [
        (Limits(share=1.5), "share: 1.5", "share: must be a finite number from 0 to 1, not 1.5."),
        (Limits(share=-1), "share: -1", "share: must be a finite number from 0 to 1, not -1."),
        (Limits(count=10), "count: 10", "count: must be a whole number of at most 9, not 10."),
    ],
)
def test_limits_hold_in_python_and_in_files(limits, text, problem):
    assert invalid(limits) == [problem]
    assert problems(text, Limits) == [f"my.yaml:1: {problem}"]
    assert validate(Limits(1, 9)) == parse_document(Limits, "share: 1\ncount: 9") == Limits(1.0, 9)


@settings(deadline=None, max_examples=60)
@given(
    value=st.none()
    | st.booleans()
    | st.integers(-(10**19), 10**19)
    | st.floats()
    | st.sampled_from(["all", "al", "3"]),
    name=st.sampled_from(["gamma", "strength", "kappa", "nu", "fit", "force", "mode"]),
)
def test_python_values_and_files_are_judged_alike(value, name):
    document = SteeringSpec(**{name: value})

    def judge(check):
        try:
            return check()
        except SpecError:
            return "refused"

    from_file = judge(lambda: parse_document(SteeringSpec, dump_document(document)))
    assert judge(lambda: validate(document)) == from_file


# Keys of older versions

OLD = """\
references: {keep: 7, streams: 500}
steering: {mode: place, beta: 20, level: stream, kappa: 12}
"""


def test_keys_of_an_older_version_warn_once_and_the_rest_counts():
    with pytest.warns(EludeSteerWarning) as caught:
        spec = parse_document(AtlasSpec, SMALL + OLD, "old.yaml")
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("old.yaml: references.streams is a key of an older version and has no effect: the section")
    assert "steering.beta, steering.level are keys of an older version and have no effect: mode place" in text
    assert (spec.references.keep, spec.steering.mode, spec.steering.kappa) == (7, "place", 12)
    plain = "references: {keep: 7}\nsteering: {mode: place, kappa: 12}\n"
    assert spec == parse_document(AtlasSpec, SMALL + plain)


def test_a_dump_holds_no_key_of_an_older_version():
    with pytest.warns(EludeSteerWarning):
        spec = parse_document(AtlasSpec, SMALL + OLD)
    again = yaml.safe_load(dump_document(spec))
    assert "streams" not in again["references"]
    assert not {"beta", "level"} & set(again["steering"])


def test_keys_of_an_older_version_hide_no_problem():
    """A wrong document is refused for what is wrong in it, without a warning."""
    assert problems(SMALL + "steering: {beta: 20, gama: 3}\n") == [
        "my.yaml:5: steering.gama: no such key in steering. Did you mean 'gamma'?"
    ]
    # The keys are only known where they were: the sections of other names have none.
    assert "no such key" in problems(SMALL + "clusters: {beta: 20}\n")[0]


def test_an_assignment_to_a_key_of_an_older_version_changes_nothing(small):
    with pytest.warns(EludeSteerWarning, match=r"steering\.reach is a key of an older version"):
        assert override(small, ["steering.reach=2"]) == small
