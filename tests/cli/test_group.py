import json
import re
import subprocess
import sys

import pytest

from tests.helpers.atlases import make_atlas


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))


@pytest.fixture
def spec_file(tiny_llava, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"name: tiny\nmodel:\n  id: {tiny_llava}\n  layer: layers.1.mlp.fc2\n"
        "tokens:\n  per_image: 8\nclusters:\n  top_k: 200\n  min_cluster_size: 6\n"
    )
    return path


def test_build_list_and_show(run, spec_file, image_folder, tmp_path):
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


def one_line(err):
    lines = [
        line
        for line in err.splitlines()
        if line.startswith("elude-steer: ") and not line.startswith("elude-steer: note")
    ]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


def test_one_clear_line_for_each_mistake(run, spec_file, image_folder, tmp_path):
    def fails(*arguments):
        code, out, err = run(*arguments)
        assert (code, out) == (1, "")
        return one_line(err)

    build = ("build", spec_file, "--images", image_folder)
    assert 'its vision tower has layers 0 to 1. The paper\'s "layer 2" is index 1.' in fails(
        *build, "--set", "model.layer=layers.2.mlp.fc2"
    )
    assert "is a SiglipMLP, and only nn.Linear and 1x1 nn.Conv2d can be split; inside it:" in fails(
        *build, "--set", "model.layer=layers.1.mlp"
    )
    (tmp_path / "empty").mkdir()
    assert "holds no images" in fails("build", spec_file, "--images", tmp_path / "empty")
    assert "pass --images FOLDER" in fails("build", spec_file)
    assert "there is no folder '/nowhere' to load a model from" in fails(*build, "--set", "model.id=/nowhere")
    assert "clusters.backend 'cuml' needs the package 'cuml', which is not installed; `pip install" in fails(
        *build, "--set", "clusters.backend=cuml"
    )
    assert "Did you mean 'llava-onevision-0.5b'?" in fails("recipes", "show", "llava-onevison-0.5b")
    assert "no atlas 'nothing'" in fails("atlases", "show", "nothing")
    assert not (tmp_path / "home" / "atlases").exists()


def test_a_spec_with_five_faults_reports_all(run, image_folder, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "name: on\nmodel:\n  id: x\n  layr: fc2\n  layer: fc2\n"
        "tokens:\n  per_image: 0\nclusters:\n  backend: exakt\n  top_k: 1000\n  top_k: 2000\n"
    )
    code, out, err = run("build", bad, "--images", image_folder)
    lines = err.splitlines()
    assert (code, out, len(lines)) == (1, "", 5)
    for text in ("name: must be text", "Did you mean 'layer'?", "at least 1", "Did you mean 'exact'?", "given twice"):
        assert sum(text in line for line in lines) == 1, (text, err)
    code, _, err = run("recipes", "check", bad, "llava-onevision-0.5b")
    assert code == 1
    assert len(err.splitlines()) == 5


def test_a_damaged_atlas(run, tmp_path):
    folder = make_atlas().save(tmp_path / "a")
    data = (folder / "references.safetensors").read_bytes()
    (folder / "references.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    code, _, err = run("atlases", "show", folder)
    assert code == 1
    assert "is damaged: 'references.safetensors' has changed since it was written" in one_line(err)


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
    assert "is already there" in one_line(err)
    code, out, _ = run("recipes", "check", tmp_path / "dinov2-base-layer12.yaml")
    assert (code, out.strip().endswith("right")) == (0, True)


def test_env_and_help(run):
    code, out, _ = run("env")
    assert code == 0
    assert "ELUDE_STEER_HOME" in out
    assert json.loads(run("env", "--json")[1])["[demo]"] in (True, False)
    code, out, _ = run("--help")
    assert "elude-steer build llava-onevision-0.5b" in out
    code, _, err = run("nonsense")
    assert code == 2
    assert "No such command" in err


def test_warnings_are_notes_and_nobody_elses_are_shown(run, spec_file, image_folder):
    code, _, err = run("build", spec_file, "--images", image_folder, "--set", "clusters.top_k=5000")
    assert code == 0
    assert "elude-steer: note: clusters.top_k is 5000, but only 320 instances are stored" in err
    assert "Warning" not in err


def test_as_a_program_without_a_terminal(spec_file, image_folder, tmp_path):
    command = [sys.executable, "-m", "elude_steer", "build", str(spec_file), "--images", str(image_folder), "--out"]
    done = subprocess.run([*command, str(tmp_path / "a")], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "a"))
    told = re.fullmatch(r"(elude-steer: note: (\w+): [\d.]+ s, [\d.]+ GB\n)+", done.stderr)  # a line a stage, no bars
    assert told and all(stage in done.stderr for stage in ("collecting", "ranking", "clustering", "splitting"))
    done = subprocess.run([*command, str(tmp_path / "a"), "--quiet"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(tmp_path / "a"), "")


def test_an_unexpected_error_is_one_line_too(run, monkeypatch):
    from elude_steer import recipe_files

    monkeypatch.setattr(recipe_files, "list_recipes", lambda: 1 / 0)
    code, _, err = run("recipes", "list")
    assert code == 1
    assert "unexpected ZeroDivisionError: division by zero (ELUDE_STEER_DEBUG=1 shows where" in one_line(err)
    monkeypatch.setenv("ELUDE_STEER_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run("recipes", "list")


def test_caption_of_a_picture_by_any_model(run, tiny_llava, image_folder, tmp_path):
    image = next(image_folder.glob("*.png"))
    code, out, _ = run("caption", image, "--model", tiny_llava, "--max-new-tokens", "4")
    assert code == 0
    assert 1 <= len(out.split()) <= 4
    (tmp_path / "text.png").write_text("no picture")
    for source, text in (
        (tmp_path / "text.png", "cannot be read as an image: no image in a format that Pillow knows"),
        (tmp_path / "none.png", "cannot be read: No such file or directory; check the path"),
    ):
        code, _, err = run("caption", source, "--model", tiny_llava)
        assert code == 1
        assert text in one_line(err)


def test_an_atlas_is_checked_against_its_model_and_another(run, spec_file, image_folder, tmp_path):
    from tests.helpers.tiny import save_llava

    run("build", spec_file, "--images", image_folder, "--out", tmp_path / "a")
    code, out, _ = run("atlases", "check", tmp_path / "a")
    assert code == 0
    assert "whole, and made for" in out
    other = save_llava(tmp_path / "other", seed=1)
    code, _, err = run("atlases", "check", tmp_path / "a", "--model", other)
    assert code == 1
    assert "was built for other weights of this layer" in one_line(err)


def test_one_damaged_atlas_does_not_hide_the_others(run, tmp_path):
    make_atlas().save(tmp_path / "home" / "atlases" / "good")
    bad = make_atlas().save(tmp_path / "home" / "atlases" / "bad")
    (bad / "manifest.json").write_text("{}")
    code, out, err = run("atlases", "list")
    assert code == 0
    assert out.split()[0] == "good"
    assert "bad' is damaged" in err


def test_devices_that_are_not_there(run, spec_file, image_folder):
    code, _, err = run("build", spec_file, "--images", image_folder, "--device", "zzz")
    assert code == 1
    assert "device 'zzz' cannot be used here" in one_line(err)
