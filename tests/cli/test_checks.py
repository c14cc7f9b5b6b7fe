"""Whatever can be refused without a model is refused before torch is loaded."""

import subprocess
import sys

import pytest

from elude_steer.cli.checks import split_words

# A command of each kind with a mistake, and a part of its one line. "dog.png" is an image, "made" a folder with files.
MISTAKES = [
    ("steer dog.png --minus dog --nu 0", "nu: must be a whole number of at least 1 or all, not 0"),
    ("steer dog.png --minus dog --kappa -1", "kappa: must be a whole number of at least 1, not -1"),
    ("steer dog.png --minus dog --gamma nan", "gamma: must be a finite number, not nan"),
    ("steer dog.png --minus ''", "a concept is a word, not ''"),
    ("steer dog.png --minus dog,", "a concept is a word, not ''"),
    ("steer dog.png --minus dog --plus Dog", "'dog' is in minus and in plus"),
    ("steer dog.png --minus dog --where 5,5,1,9", "the box (5.0, 5.0, 1.0, 9.0) is empty"),
    ("steer dog.png --plus dog --where 500,5,600,9", "lies outside the image, which is 96 x 96 pixels"),
    ("steer none.png --minus dog", "'none.png' cannot be read: No such file"),
    ("steer made/notes.txt --minus dog", "cannot be read as an image"),
    ("steer dog.png --minus dog --atlas nosuch", "there is no atlas 'nosuch'"),
    ("steer dog.png --minus dog --model ./nosuch", "there is no folder './nosuch' to load a model from"),
    ("steer dog.png --minus dog --heatmap nosuch/dir/x.png", "there is no folder 'nosuch/dir' for 'x.png'; make it"),
    ("steer dog.png --minus dog --heatmap x.xyz", "'x.xyz' does not end in .png, .jpg or .jpeg"),
    ("steer dog.png --minus dog --dtype int3", "'int3' is not one of 'auto', 'float32', 'bfloat16', 'float16'"),
    ("steer dog.png --minus dog --device gpu", "'gpu' is not a device; use cpu, cuda, cuda:1 or mps"),
    ("caption dog.png --model ./nosuch", "there is no folder './nosuch'"),
    ("run toyland-dog --report x.txt", "'x.txt' does not end in .html or .htm"),
    ("run toyland-dog --image none.png", "'none.png' cannot be read"),
    ("run toyland-dog --atlas nosuch", "there is no atlas 'nosuch'"),
    ("run llava-dog", "recipe 'llava-dog' has no image"),
    ("run toyland", "says how to build an atlas, not what to change: `elude-steer build"),
    ("build toyland-dog", "says what to change, not how to build an atlas: `elude-steer run"),
    ("export toyland-teddy made --set mode=scale --set nu=all", "'made' already exists and is not an empty folder"),
    ("export toyland-teddy new --step 9", "has 3 edits, not 9"),
    ("export toyland-teddy new", "only an edit of every patch can be weights"),
    ("sweep dog.png --minus dog --grid gamma=nan", "gamma: must be a finite number"),
    ("sweep dog.png --minus dog,cat", "settings are tried for one concept at a time"),
    ("sweep dog.png --minus dog --write made/old.yaml", "'made/old.yaml' already exists"),
    ("sweep --scenes toyland", "--scenes is 'toyland'; write toyland:SEED"),
    ("sweep --coco none.json made", "there is no file 'none.json' with COCO's annotations"),
    ("sweep --defaults", "is shipped with the package and is read-only"),
    ("sweep --plot x.svg", "'x.svg' does not end in"),
    ("evaluate nosuch", "there is no atlas 'nosuch'"),
    ("evaluate toyland --measures faithfulnes", "Did you mean 'faithfulness'"),
    ("evaluate toyland --out made/notes.txt", "is a file, not a folder"),
    ("evaluate toyland --images nowhere", "there is no folder or file 'nowhere' with images"),
    ("compare --work w --out o --method nosuch", "there is no method 'nosuch'"),
    ("ablate toyland --work w --vary clusters.nosuch=1", "no such key in clusters"),
    ("ablate toyland --work no/such/w", "there is no folder"),
    ("judge toyland --judge nobody", "'nobody' is not a judge"),
    ("build toyland --set clusters.top_k=-1", "must be a whole number of at least 2"),
    ("build toyland --out made", "'made' holds other files"),
    ("build llava-onevision-0.5b", "leaves the probing images open"),
    ("build toyland --images nowhere", "there is no folder or file 'nowhere' with images"),
    ("benchmark chair --coco none.json made --minus dog", "there is no file 'none.json' with COCO's annotations"),
    ("benchmark pope --coco coco/captions.json coco --minus dog", "has no list 'categories'; give one such as"),
    (
        "benchmark chair --coco coco/plain.json coco --minus dog",
        "there is no file of captions beside 'coco/plain.json'",
    ),
    (
        "benchmark pope --coco coco/instances.json coco --minus dgo",
        "which is no class of 'instances'. Did you mean 'dog'",
    ),
    ("benchmark pope --coco coco/instances.json coco --minus dog --per-image 9", "shows 'dog' and 9 other classes"),
    ("benchmark pope --coco coco/instances.json coco --minus dog --prompt 'A dog?'", "POPE needs one {} for the class"),
    ("benchmark pope --coco coco/instances.json coco", "Missing option '--minus'"),
    ("benchmark absent --coco coco/instances.json coco --fit 2", "fit: must be"),
    ("benchmark absent --coco coco/instances.json coco --out made/notes.txt", "is a file, not a folder"),
    ("benchmark side-effects --coco coco/instances.json coco --synonyms made/notes.txt", "without a colon"),
    ("concepts nosuch", "there is no atlas 'nosuch'"),
    ("concepts toyland --like ''", "a concept is a word, not ''"),
    ("atlases check nosuch", "there is no atlas 'nosuch'"),
    ("atlases calibrate nosuch --out new", "there is no atlas 'nosuch'"),
    ("atlases calibrate toyland --out new --images nowhere", "there is no folder or file 'nowhere' with images"),
    ("atlases calibrate toyland --out made", "'made' holds other files"),
    ("atlases calibrate toyland --out no/such/new", "there is no folder"),
    ("atlases calibrate toyland --out new --device gpu", "'gpu' is not a device"),
    ("steer dog.png --minus dog --strength -1", "strength: must be"),
    ("steer dog.png --minus dog --fit 1.5", "fit: must be"),
    ("sweep dog.png --minus dog --grid beta=8,16", "there is no setting 'beta' any more"),
    ("demo --atlas nosuch", "there is no atlas 'nosuch'"),
    ("demo --atlas toyland --atlas nosuch", "there is no atlas 'nosuch'"),
    ("demo --atlas second --atlas home/atlases/second", "atlas 'home/atlases/second' is given twice"),
    (
        "demo --atlas toyland --atlas second --model toyland/captioner",
        "--model is for one atlas, not for toyland, second; choose one: --atlas toyland.",
    ),
    ("toyland draw made", "'made' already exists and is not an empty folder"),
    ("reproduce interpretability", "a table needs images to learn from: --images FOLDER"),
    ("reproduce interpretability --images nowhere", "there is no folder or file 'nowhere' with images"),
    (
        "reproduce interpretability --images made --backbones dinov2",
        "there is no backbone 'dinov2' here; there are",
    ),
    ("reproduce stability --images made --rows nosuch", "there is no row 'nosuch' here; there are vanilla SAE"),
    (f"reproduce stability --images made --seeds {'9' * 5000}", "; write numbers: --seeds 42,123"),
    ("reproduce stability --images made --seeds a", "--seeds is 'a'; write numbers: --seeds 42,123"),
    ("reproduce stability --images made --head x", "--head is 'x'; write the name of a backbone and a model"),
    ("reproduce stability --images made --set clusters.nosuch=1", "no such key in clusters"),
    ("reproduce judge --images made", "`reproduce judge` needs judges: --judge MODEL@URL"),
    ("reproduce stability --images made --scenes made", "--scenes belongs to `reproduce steering`"),
    ("reproduce stability --images made --passes 5", "--passes belongs to `reproduce efficiency`"),
    ("reproduce stability --images made --backbones dinov2-base-layer12=./nosuch", "there is no folder './nosuch'"),
    ("reproduce steering", "these edits need images that do not come with the package (dog.jpg: a black dog"),
    ("reproduce steering --scenes nowhere", "there is no folder or file 'nowhere' with the images of the edits"),
    (
        "reproduce steering --recipe photo-cat --rows photo-cat-9",
        "there is no row 'photo-cat-9'; there are",
    ),
    ("reproduce steering --recipe photo-cat --out no/such/out", "there is no folder"),
    ("recipes copy toyland-dog x.txt", "'x.txt' does not end in .yaml or .yml"),
]
PROGRAM = """
import io, json, shlex, sys
from contextlib import redirect_stderr, redirect_stdout
from elude_steer.cli.entry_point import main

answers = []
for text in json.load(sys.stdin):
    sys.argv = ["elude-steer", *shlex.split(text)]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    answers.append((code, out.getvalue(), err.getvalue(), "torch" in sys.modules))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What one process answers to all mistakes, by command; and that it left no files."""
    import json
    import os
    import shutil

    from elude_steer.atlas.manifest import list_atlases
    from elude_steer.toyland import scenes
    from elude_steer.toyland.scenes import write_scenes

    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "made").mkdir()
    (folder / "made" / "notes.txt").write_text("mine")
    (folder / "made" / "old.yaml").write_text("mine")
    next(scene for scene in scenes(1, 20) if scene.image.size == (96, 96)).image.save(folder / "dog.png")
    write_scenes(folder / "coco", 6, 1, coco=True)
    shutil.copy(folder / "coco" / "instances.json", folder / "coco" / "plain.json")
    (folder / "home" / "atlases" / "second").mkdir(parents=True)  # enough of an atlas for what needs no model
    shutil.copy(dict(list_atlases())["toyland"] / "manifest.json", folder / "home" / "atlases" / "second")
    before = sorted(path.as_posix() for path in folder.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([text for text, _ in MISTAKES]),
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
        env={**os.environ, "ELUDE_STEER_HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert sorted(path.as_posix() for path in folder.rglob("*")) == before
    return dict(zip([text for text, _ in MISTAKES], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_torch_is_loaded(answers, text, message):
    code, out, err, torch_loaded = answers[text]
    assert message in err
    assert (code != 0, out, err.count("\n")) == (True, "", 1), err
    assert not torch_loaded


def test_commas_separate_concepts():
    assert split_words(["dog,sunglasses", "hot dog"]) == ["dog", "sunglasses", "hot dog"]
