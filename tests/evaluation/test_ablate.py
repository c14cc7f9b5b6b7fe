"""Ablations of a build spec."""

import json
import re
from pathlib import Path

import pytest

from elude_steer.evaluation.ablate import default_variations, write_rows
from elude_steer.recipe_files import load_spec, recipes_dir
from elude_steer.utils.yaml_schema import override


def test_default_variations_are_valid_for_every_recipe():
    variations = default_variations(load_spec("toyland"))
    assert variations["clusters.min_cluster_size"] == ["15", "60"]
    assert variations["clusters.top_k"] == ["2000", "8000"]
    assert variations["tokens.per_image"] == ["24", "96"]
    assert variations["model.layer"] == ["layers.4.mlp.fc2"]
    for path in sorted((recipes_dir() / "atlases").glob("*.yaml")):
        spec = load_spec(path)
        for setting, values in default_variations(spec).items():
            assert all(override(spec, [f"{setting}={value}"]) for value in values)


def test_the_page_of_results_is_what_its_numbers_give(tmp_path):
    results = Path(__file__).parents[2] / "demos" / "results"
    page = (results / "ablations.md").read_text(encoding="utf-8")
    (command,) = re.findall("Written by `(.*?)`", page)
    written = write_rows(json.loads((results / "ablations.json").read_text(encoding="utf-8")), command, tmp_path)
    assert written.read_text(encoding="utf-8") == page
    assert "| sub-units | per unit |" in page


def test_settings_are_changed_one_at_a_time(run, tmp_path):
    small = ["--set", "images.limit=40", "--set", "clusters.top_k=300", "--set", "clusters.min_cluster_size=12",
             "--set", "labels.scorer=null", "--set", "calibration.images=0"]  # fmt: skip
    command = ["ablate", "toyland", *small, "--work", tmp_path, "--images", "toyland:77001", "--limit", "8",
               "--vary", "split.winner_rule=gap,random", "--json"]  # fmt: skip
    code, out, err = run(*command)
    assert code == 0, err
    rows = json.loads(out)
    assert [(row["setting"], row["value"]) for row in rows] == [("as it is", ""), ("split.winner_rule", "random")]
    assert all(row["R2, explicit layer"] == pytest.approx(1, abs=1e-9) for row in rows)
    code, again, _ = run(*command, "--out", tmp_path / "out")
    assert json.loads(again) == rows  # everything is stored already
    page = (tmp_path / "out" / "ablations.md").read_text()
    assert "`elude-steer ablate toyland --vary split.winner_rule=gap,random --set images.limit=40" in page
    assert [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| ")][2:] == [
        ["| split.winner_rule", "random"]
    ]
    assert json.loads((tmp_path / "out" / "ablations.json").read_text()) == rows
    for wrong, line in (("model.layer=layers.9.mlp.fc2", "layers.9.mlp.fc2"), ("=", "--vary = has no values")):
        code, _, err = run("ablate", "toyland", "--work", tmp_path / "new", "--vary", wrong)
        assert (code, line in err) == (1, True)
        assert not (tmp_path / "new").exists()  # refused before anything is built
    code, _, err = run("ablate", "toyland", "--work", tmp_path / "new", "--images", tmp_path / "nowhere")
    assert (code, (tmp_path / "new").exists()) == (1, False)
    row = sorted(tmp_path.glob("row-*.json"))[0]
    row.write_text("{")
    code, _, err = run(*command)
    assert (code, f"'{row}' is damaged; delete it" in err) == (1, True)
    code, _, err = run("ablate", "toyland", "--work", tmp_path, "--vary", "split.winer_rule=gap")
    assert code == 1
    assert "winer_rule" in err
