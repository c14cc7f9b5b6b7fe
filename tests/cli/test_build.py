import re
import subprocess
import sys

from tests.helpers.cli import only_error


def test_each_mistake_in_a_build_is_one_clear_line(run, spec_file, image_folder, tmp_path):
    def fails(*arguments):
        code, out, err = run(*arguments)
        assert (code, out) == (1, "")
        return only_error(err)

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


def test_all_problems_of_a_spec_are_reported(run, image_folder, tmp_path):
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


def test_our_warnings_are_notes_and_those_of_others_are_hidden(run, spec_file, image_folder):
    code, _, err = run("build", spec_file, "--images", image_folder, "--set", "clusters.top_k=5000")
    assert code == 0
    assert "elude-steer: note: clusters.top_k is 5000, but only 320 instances are stored" in err
    assert "Warning" not in err


def test_without_a_terminal_a_build_prints_one_line_per_stage(spec_file, image_folder, tmp_path):
    command = [sys.executable, "-m", "elude_steer", "build", str(spec_file), "--images", str(image_folder), "--out"]
    done = subprocess.run([*command, str(tmp_path / "a")], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "a"))
    told = re.fullmatch(r"(elude-steer: note: (\w+): [\d.]+ s, [\d.]+ GB\n)+", done.stderr)  # a line a stage, no bars
    assert told and all(stage in done.stderr for stage in ("collecting", "ranking", "clustering", "splitting"))
    done = subprocess.run([*command, str(tmp_path / "a"), "--quiet"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(tmp_path / "a"), "")


def test_an_unknown_device_is_refused(run, spec_file, image_folder):
    code, _, err = run("build", spec_file, "--images", image_folder, "--device", "zzz")
    assert code == 2
    assert "'zzz' is not a device; use cpu, cuda, cuda:1 or mps" in only_error(err)
    code, _, err = run("build", spec_file, "--images", image_folder, "--device", "xpu:7")
    assert code == 1
    assert "device 'xpu:7' cannot be used here" in only_error(err)
