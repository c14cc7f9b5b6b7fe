"""Type mistakes at every command, and write what it answers: one line each, no traceback, no files left behind.

python demos/wrong_inputs.py demos/results/wrong_inputs.md
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from elude_steer import toyland

# By command. scene.png is an image, cut.png half of one, black.png a mask that marks nothing, notes.txt a text, made a
# folder with a file, empty an empty one, twice.yaml a recipe with a key twice.
MISTAKES = """
steer
steer nosuch.png --minus dog
steer notes.txt --minus dog
steer cut.png --minus dog
steer scene.png --minsu dog
steer scene.png --minus dog --plus ' DOG'
steer scene.png --plus dog --where 80,20,10,40
steer scene.png --plus dog --where 1,2,3
steer scene.png --plus dog --where 500,500,600,600
steer scene.png --plus dog --where notes.txt
steer scene.png --plus dog --where black.png
steer scene.png --minus dog --fit 1.5
steer scene.png --minus dog --mode push
steer scene.png --minus dog --strength inf
steer scene.png --minus dog --nu some
steer scene.png --minus dog --fit -3
steer scene.png --minus dog --atlas toylnd
steer scene.png --minus dog --atlas made
steer scene.png --minus dog --device gpu
steer scene.png --minus dog --threads 0
steer scene.png --minus dog --max-new-tokens many
steer scene.png --minus dog --heatmap made
stear scene.png --minus dog
caption scene.png --model ./nosuch
caption scene.png --model made
caption scene.png --dtype half
run nosuch.yaml
run twice.yaml
run toyland
run toyland-teddy --image notes.txt
run toyland-teddy --report report.pdf
sweep scene.png --minus dog --grid gamma=
sweep scene.png --minus dog --grid gama=1
sweep scene.png --plus dog
sweep --count 0
sweep --coco notes.txt nowhere
sweep --scenes 7
export toyland-teddy out --step 9
export toyland-teddy out
export toyland-teddy out --set nu=all --set nu=all
export toyland-teddy nowhere/out --set mode=scale --set nu=all
export toyland-teddy out --set mode=scale --set nu=all --no-bias
build nosuch
build toyland-dog
build toyland --set clusters.top_k=many
build toyland --set cluster.top_k=10
build toyland --images nowhere
build toyland --images empty
build toyland --out scene.png
evaluate made
evaluate toyland --measures speed
evaluate toyland --limit 1
evaluate toyland --out notes.txt
compare --out results
compare --work work --out results --method magic
ablate toyland --work work --vary clusters.selection
ablate toyland --work work --vary clusters.selection=root
judge toyland --judge gpt
atlases show toylnd
atlases check made
concepts toyland --limit 0
concepts toyland --like '   '
recipes show toyland-dgo
recipes copy toyland-dog nowhere/deep/
recipes check notes.txt
toyland draw scene.png
toyland draw out --seed -1
demo --auth me
demo --port 99999
""".strip().splitlines()


def prepare(folder: Path) -> None:
    """Write the files that the mistakes name."""
    scene = next(scene for scene in toyland.scenes(1, 20) if scene.image.size == (96, 96))
    scene.image.save(folder / "scene.png")
    data = (folder / "scene.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])
    Image.new("L", (8, 8)).save(folder / "black.png")
    (folder / "notes.txt").write_text("no image")
    (folder / "twice.yaml").write_text("name: twice\natlas: toyland\natlas: toyland\nsteps: [{minus: [dog]}]\n")
    (folder / "made").mkdir()
    (folder / "made" / "notes.txt").write_text("mine")
    (folder / "empty").mkdir()


def type_mistake(command: str) -> tuple[str, list[str]]:
    """Run a command in a new folder; return its output and what is wrong with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        prepare(folder)
        before = sorted(folder.rglob("*"))
        environment = {**os.environ, "ELUDE_STEER_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        done = subprocess.run(
            [sys.executable, "-m", "elude_steer", *shlex.split(command)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        left = sorted(set(folder.rglob("*")) - set(before))
        output = (done.stdout + done.stderr).replace(f"{folder}/", "").strip()
    problems = []
    if done.returncode == 0:
        problems.append("it exits with 0")
    if "Traceback" in output or "unexpected" in output:
        problems.append("it shows an error of Python")
    if done.stdout or done.stderr.count("\n") != 1 or not done.stderr.startswith("elude-steer: "):
        problems.append("it does not print one line")
    if left:
        problems.append(f"it leaves {', '.join(path.name for path in left)}")
    return output, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(type_mistake, MISTAKES))
    wrong = [
        f"elude-steer {command}: {'; '.join(problems)}\n{output}"
        for command, (output, problems) in zip(MISTAKES, answers, strict=True)
        if problems
    ]
    if wrong:
        sys.exit("\n\n".join(wrong))
    lines = [
        "# Wrong inputs and their answers",
        "",
        f"{len(MISTAKES)} mistakes, over all commands, each typed in a new folder. `demos/wrong_inputs.py`",
        "writes this page; it fails if an answer is not one line, shows a traceback, exits with 0 or leaves files.",
        "",
        "```",
    ]
    for command, (output, _) in zip(MISTAKES, answers, strict=True):
        lines += [f"$ elude-steer {command}", output, ""]
    options.out.write_text("\n".join([*lines[:-1], "```", ""]), encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
