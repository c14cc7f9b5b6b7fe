import json

import pytest

from demos.toyland import labeller
from elude_steer.atlas.atlas import Atlas
from elude_steer.recipe_files import recipes_dir
from tests.helpers.atlases import make_atlas
from tests.helpers.cli import only_error
from tests.helpers.tiny import save_images, save_llava


def test_an_atlas_is_built_listed_and_shown(run, spec_file, image_folder, tmp_path):
    code, out, err = run("build", spec_file, "--images", image_folder)
    assert (code, out.strip()) == (0, str(tmp_path / "home" / "atlases" / "tiny"))
    assert "Traceback" not in err
    code, out, _ = run("atlases", "list")
    assert out.split()[:1] == ["tiny"]
    code, out, _ = run("atlases", "list", "--json")
    assert json.loads(out)[0]["units"] == 16
    code, out, _ = run("atlases", "show", "tiny")
    assert "instances  320" in out
    assert "all as written" in out
    code, out, _ = run("atlases", "show", "tiny", "--json")
    assert json.loads(out)["spec"]["clusters"]["top_k"] == 200


def test_a_damaged_atlas_is_named_in_one_line(run, tmp_path):
    folder = make_atlas().save(tmp_path / "a")
    data = (folder / "references.safetensors").read_bytes()
    (folder / "references.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    code, _, err = run("atlases", "show", folder)
    assert code == 1
    assert "is damaged: 'references.safetensors' has changed since it was written" in only_error(err)


def test_a_damaged_atlas_does_not_hide_the_others(run, tmp_path):
    make_atlas().save(tmp_path / "home" / "atlases" / "good")
    bad = make_atlas().save(tmp_path / "home" / "atlases" / "bad")
    (bad / "manifest.json").write_text("{}")
    code, out, err = run("atlases", "list")
    assert code == 0
    assert out.split()[0] == "good"
    assert "bad' is damaged" in err


def test_an_atlas_is_checked_against_its_model_and_another(run, spec_file, image_folder, tmp_path):
    run("build", spec_file, "--images", image_folder, "--out", tmp_path / "a")
    code, out, _ = run("atlases", "check", tmp_path / "a")
    assert code == 0
    assert "complete, and made for" in out
    other = save_llava(tmp_path / "other", seed=1)
    code, _, err = run("atlases", "check", tmp_path / "a", "--model", other)
    assert code == 1
    assert "was built for other weights of this layer" in only_error(err)


def test_an_atlas_is_calibrated(run, tiny_llava, tmp_path):
    labeller.save(labeller.new_model(3), tmp_path / "scorer")
    images, spec = save_images(tmp_path / "images", 110), tmp_path / "spec.yaml"
    spec.write_text(
        f"name: plain\nmodel: {{id: '{tiny_llava}', layer: layers.1.mlp.fc2}}\ntokens: {{per_image: 2}}\n"
        f"clusters: {{top_k: 60, min_cluster_size: 8}}\ncalibration: {{images: 0}}\n"
        f"labels: {{scorer: '{tmp_path / 'scorer'}', vocabulary: toyland, top_k: 12}}\n"
    )
    assert run("build", spec, "--images", images, "--quiet")[0] == 0
    command = ("atlases", "calibrate", "plain", "--out", tmp_path / "new")
    code, _, err = run(*command, "--images", images, "--set", "calibration.images=0")
    assert code == 1
    assert "too few images to calibrate with" in only_error(err)
    settings = ("--set", "calibration.images=5000", "--set", "calibration.fit=0.2")
    code, out, _ = run(*command, "--images", images, *settings, "--quiet")
    assert (code, out.strip()) == (0, str(tmp_path / "new"))
    old, new = Atlas.load("plain"), Atlas.load(tmp_path / "new")
    assert old.calibration is None
    assert float(new.calibration.fit) == pytest.approx(0.2)
    assert new.fingerprint == old.fingerprint
    assert new.about["spec"]["calibration"] == {"images": 5000, "fit": 0.2}


def test_an_atlas_without_labels_cannot_be_calibrated(run, spec_file, image_folder, tmp_path):
    run("build", spec_file, "--images", image_folder, "--out", tmp_path / "a")
    command = ("atlases", "calibrate", tmp_path / "a", "--out", tmp_path / "b")
    code, _, err = run(*command, "--images", image_folder)
    assert code == 1
    assert "the sub-units of atlas 'tiny' have no labels" in only_error(err)
    code, _, err = run(*command, "--images", tmp_path / "nowhere")
    assert code == 1
    assert "nowhere' with images" in only_error(err)
    assert not (tmp_path / "b").exists()


def test_the_help_of_calibrate_says_what_it_needs(run):
    code, out, _ = run("atlases", "calibrate", "--help")
    assert code == 0
    assert "Copy an atlas and add what mode place needs" in out
    assert all(option in out for option in ("--images", "--out", "--set", "--device", "--threads", "--work", "--quiet"))
    code, _, err = run("atlases", "calibrate", "toyland")
    assert (code, "Missing option '--out'" in err) == (2, True)


def test_concepts_are_listed_found_and_grouped(run):
    listed = json.loads(run("concepts", "toyland", "--json", "--limit", "100")[1])
    assert {"label", "sub_units"} == set(listed[0])
    assert "dog" in {row["label"] for row in listed}
    found = json.loads(run("concepts", "toyland", "--like", "puppy", "--limit", "3", "--json")[1])
    assert [row["label"] for row in found] == ["dog"] * 3
    by_score = json.loads(run("concepts", "toyland", "--like", "puppy", "--limit", "3", "--by", "score", "--json")[1])
    assert "dog" in {row["via"] for row in by_score}
    assert "sub-units" in run("concepts", "toyland", "--group")[1]
    assert "more labels" in run("concepts", "toyland", "--limit", "3")[2]


def test_recipes_can_be_listed_shown_copied_and_checked(run, tmp_path):
    code, out, _ = run("recipes", "list")
    assert code == 0
    assert "llava-onevision-0.5b" in out
    assert len(json.loads(run("recipes", "list", "--json")[1])) >= 11
    code, out, _ = run("recipes", "show", "dinov2-base-layer12")
    assert "top_k: 400000" in out
    code, out, _ = run("recipes", "copy", "dinov2-base-layer12", tmp_path)
    assert (tmp_path / "dinov2-base-layer12.yaml").read_text() in run("recipes", "show", "dinov2-base-layer12")[1]
    code, out, err = run("recipes", "copy", "dinov2-base-layer12", tmp_path)
    assert "already exists" in only_error(err)
    code, out, _ = run("recipes", "check", tmp_path / "dinov2-base-layer12.yaml")
    assert (code, out.strip().endswith("valid")) == (0, True)


def test_a_copied_recipe_runs_and_checks_name_a_missing_image(run, tmp_path):
    code, out, err = run("recipes", "copy", "toyland-teddy", f"{tmp_path}/r/")
    assert (code, out.strip()) == (0, f"{tmp_path}/r/toyland-teddy.yaml")
    assert f"its image: {tmp_path}/r/toyland-teddy.png" in err
    assert run("recipes", "check", out.strip())[1].strip().endswith("valid")
    code, table, _ = run("run", out.strip())
    assert (code, table) == (0, run("run", "toyland-teddy")[1])
    (tmp_path / "r" / "toyland-teddy.png").unlink()
    code, _, err = run("recipes", "check", out.strip())
    assert (code, "image: there is no file" in only_error(err)) == (1, True)


def test_recipes_check_looks_at_concepts_too(run, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("name: r\natlas: mine\nsteps: [{minus: [dog], plus: [Dog]}]\n")
    assert "recipe 'r', step 1: 'dog' is in minus and in plus" in only_error(run("recipes", "check", path)[2])


def test_env_lists_versions_extras_and_folders(run):
    code, out, _ = run("env")
    assert code == 0
    assert "ELUDE_STEER_HOME" in out
    assert json.loads(run("env", "--json")[1])["[demo]"] in (True, False)


def test_a_recipe_is_shown_without_what_a_terminal_obeys(run, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("name: \x1b[2Jevil\n\tÄ \u202eabc 日本\r\n", encoding="utf-8")
    assert run("recipes", "show", path)[:2] == (0, "name: \\x1b[2Jevil\n\tÄ \\u202eabc 日本\n")
    shipped = (recipes_dir() / "steering" / "toyland-dog.yaml").read_text(encoding="utf-8")
    assert run("recipes", "show", "toyland-dog")[:2] == (0, shipped)


@pytest.mark.parametrize("content", [b"name: \xff", 5_000_000])
def test_a_recipe_that_is_no_text_or_never_ends_is_not_shown(run, content, tmp_path):
    path = tmp_path / "r.yaml"
    with path.open("wb") as file:
        file.truncate(content) if isinstance(content, int) else file.write(content)
    code, out, err = run("recipes", "show", path)
    assert code == 1 and not out
    assert err.startswith(f"elude-steer: {path} cannot be read as UTF-8 text: ") and err.count("\n") == 1
