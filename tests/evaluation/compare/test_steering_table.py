"""The page's section about steering."""

from elude_steer.evaluation.compare.methods import Size
from elude_steer.evaluation.compare.steering_table import steering_section
from elude_steer.evaluation.compare.table import merge_rows


def score(settings, clean=0.75, border=()):
    names = ("success", "kept", "invented", "clean")
    shares = dict(zip(names, (0.9, 0.95, 0.05, clean), strict=True))
    intervals = {name: [value - 0.02, value + 0.01] for name, value in shares.items()}
    about = {"tried": 16, "settings": settings, "border": list(border), "edits": 500, "seconds": 30}
    return {**about, **shares, "intervals": intervals}


PLACE = {"mode": "place", "strength": 2.5, "fit": 0.3}
SCALE = {"mode": "scale", "kappa": 24, "nu": 10, "gamma": -50, "alpha": 50}
EDITS = {
    "place remove": {**score(PLACE, border=["strength"]), "absent": score(PLACE)},
    "place replace": score(PLACE),
    "place remove, supervised directions": {**score({**PLACE, "strength": 1}, 0.5), "absent": score(PLACE)},
    "place replace, supervised directions": score(PLACE),
    "scale remove": {**score(SCALE), "absent": score(SCALE)},
    "scale replace": score(SCALE),
}


def test_rows_have_intervals_and_stars_on_the_border():
    lines = steering_section({"raw units": [{"seed": 42, "edits": EDITS}], "topk SAE": [{"seed": 42}]}, Size())
    rows = [line for line in lines if line.startswith("| raw units |")]
    assert rows[0] == (
        "| raw units | 90.0 (88.0 to 91.0) | 95.0 (93.0 to 96.0) | 5.0 (3.0 to 6.0) | 75.0 (73.0 to 76.0) | "
        "10.0 (9.0 to 12.0) | strength 2.5*, fit 0.3 | 90.0 (88.0 to 91.0) | 50.0 (48.0 to 51.0) | "
        "strength 1, fit 0.3 | 1.0 |"
    )
    assert len(rows) == 4
    assert "kappa 24, nu 10, gamma -50 | 0.5 |" in rows[1]
    text = "\n".join(lines)
    assert "topk SAE" not in text
    assert "500 edits" in text
    assert "token seed 42. Methods that are not in the tables were not steered." in text
    for head, line in zip([line for line in lines if line.startswith("| method")], rows, strict=True):
        assert head.count("|") == line.count("|")


def test_a_method_without_supervised_directions_has_empty_cells():
    own = {name: value for name, value in EDITS.items() if "supervised" not in name}
    lines = steering_section({"difference of means (supervised)": [{"seed": 42, "edits": own}]}, Size())
    assert sum(line.endswith("| strength 2.5*, fit 0.3 |  |  |  | 0.5 |") for line in lines) == 1


def test_without_edits_there_is_no_section():
    assert steering_section({"raw units": [{"seed": 42, "latents": 3}]}, Size()) == []


def test_rows_of_another_run_complete_each_other():
    old = [{"method": "raw units", "seed": 42, "latents": 128}, {"method": "topk SAE", "seed": 42, "edits": {"a": 1}}]
    new = [{"method": "ELUDe (gap)", "seed": 42, "edits": {}}, {"method": "raw units", "seed": 42, "edits": {"b": 2}}]
    assert merge_rows(old, new) == [
        {"method": "ELUDe (gap)", "seed": 42, "edits": {}},
        {"method": "raw units", "seed": 42, "latents": 128, "edits": {"b": 2}},
        {"method": "topk SAE", "seed": 42, "edits": {"a": 1}},
    ]
