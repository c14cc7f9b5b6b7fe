"""What the page says of a run: where it is not the paper's, and what a number rests on."""

import re

import pytest

from elude_steer.evaluation.reproduce import run
from elude_steer.evaluation.reproduce.experiment import NAMES, Experiment
from elude_steer.evaluation.reproduce.options import ReproduceOptions
from elude_steer.utils import optional

TABLES = [name for name in NAMES if name != "steering"]


def differences(name, counts=(1_281_167, 50_000), *, monkeypatch, **options):
    sizes = {"train": counts[0], "val": counts[1]}
    monkeypatch.setattr(ReproduceOptions, "count", lambda self, source, limit: min(sizes[source], limit or 10**9))
    given = {"held_out": "val", **options}
    return run._differences(Experiment(name, ReproduceOptions("train", **given)))


@pytest.mark.parametrize("name", TABLES)
def test_nothing_of_the_papers_run_differs(name, monkeypatch):
    assert differences(name, monkeypatch=monkeypatch) == []


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("interpretability", {"limit": 2000}, "2,000 images to learn from instead of 1,281,167"),
        ("interpretability", {"held_out_limit": 500}, "500 images to measure on instead of 50,000"),
        ("interpretability", {"held_out": None}, "measured on the images that methods learnt from"),
        ("ablations", {"seeds": (42, 999)}, "token seeds 42, 999 instead of 42, 123, 999"),
        ("efficiency", {"seeds": (123,)}, "token seed 123 instead of 42"),
        ("interpretability", {"rows": ("raw units", "ELUDe (gap)")}, "18 of 20 rows left out"),
        ("interpretability", {"backbones": {"dinov2-base-layer12": None}}, "1 of 2 backbones left out"),
    ],
)
def test_each_difference_is_named(name, options, expected, monkeypatch):
    if options.get("held_out", "") is None:
        monkeypatch.setattr(ReproduceOptions, "measured_on", "val")
    assert differences(name, monkeypatch=monkeypatch, **options) == [expected]


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (
            "linear probe",
            "Accuracy of dinov2-base-layer12: a linear probe .* --head dinov2-base-layer12=MODEL takes a head.",
        ),
        ("timm head", "Accuracy of dinov2-base-layer12: timm head."),
        ("head", "Accuracy of dinov2-base-layer12: head facebook/dinov2-base-imagenet1k-1-layer."),
        (None, None),
    ],
)
def test_the_page_says_what_tells_classes(source, note, monkeypatch):
    monkeypatch.setattr(run, "accuracy_source", lambda setup: source)
    heads = {"dinov2-base-layer12": "facebook/dinov2-base-imagenet1k-1-layer"} if source == "head" else {}
    options = ReproduceOptions(preset="tiny", backbones={"dinov2-base-layer12": None}, judges=("a",), heads=heads)
    monkeypatch.setattr(ReproduceOptions, "adapt", lambda self, spec: spec)
    found = run._notes(Experiment("interpretability", options))
    assert len(found) == (note is not None)
    if note:
        assert re.fullmatch(note, found[0])


@pytest.mark.parametrize("installed", [True, False])
def test_umap_is_noted(installed, monkeypatch):
    monkeypatch.setattr(optional, "is_installed", lambda name: installed)
    (note,) = run._notes(Experiment("ablations", ReproduceOptions()))
    expected = "32 dimensions, a number of ours" if installed else "clusters.umap_components is left out: it needs"
    assert expected in note
    assert not run._notes(Experiment("ablations", ReproduceOptions(rows=("clusters.selection=eom",))))
