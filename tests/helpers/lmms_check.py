"""Check a task of our own with local data in lmms-eval's own runner; runs in an environment with lmms-eval.

Its answers must be those of the steerer, without an edit and with one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import error_line, register_missing_operators

from elude_steer import toyland
from elude_steer.steering.steerer import Steerer

TASK = """
task: toyland_dogs
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.doc_to_visual
doc_to_text: !function utils.doc_to_text
doc_to_target: "caption"
process_results: !function utils.process_results
generation_kwargs:
  max_new_tokens: 24
  until: ["\\n\\n"]
metric_list:
  - metric: names_dog
    aggregation: mean
    higher_is_better: true
"""
UTILS = """
from PIL import Image

def doc_to_visual(doc):
    return [Image.open(doc["image"])]

def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]

def process_results(doc, results):
    return {"names_dog": float("dog" in results[0].split())}
"""
# As `python -m lmms_eval`, with the operators that a torchvision for CUDA lacks beside a torch for CPUs.
RUNNER = "import checks; checks.register_missing_operators(); from lmms_eval.__main__ import cli_evaluate as m; m()"


def prepare(folder):
    """Write a task and six scenes with a dog, each with its own question."""
    scenes = [scene for scene in toyland.scenes(5, 300) if "dog" in scene.objects][:6]
    lines = []
    for number, scene in enumerate(scenes):
        scene.image.save(folder / f"{number}.png")
        question = "Describe this image in one sentence." if number % 2 else "<image>\nWhat is in this image?"
        row = {"image": str(folder / f"{number}.png"), "caption": scene.caption, "question": question}
        lines.append(json.dumps(row))
    (folder / "data.json").write_text("\n".join(lines))
    (folder / "toyland_dogs.yaml").write_text(TASK.format(data=folder / "data.json"))
    (folder / "utils.py").write_text(UTILS)
    return scenes, [json.loads(line)["question"] for line in lines]


def run_lmms_eval(folder, arguments, name):
    """The share of captions that name the dog, and the answers, of lmms-eval's own runner."""
    out = folder / name
    options = ["--tasks", "toyland_dogs", "--include_path", str(folder), "--batch_size", "4", "--log_samples"]
    command = [sys.executable, "-c", RUNNER, "--model", "elude_steer", "--model_args", arguments, *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "HF_HOME": str(folder)}
    done = subprocess.run([*command, "--output_path", str(out)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = out.rglob("*results.json")
    (samples,) = out.rglob("*samples*.jsonl")
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    found = [row["filtered_resps"] for row in rows]
    answers = [one if isinstance(one, str) else one[0] for one in found]
    return json.loads(results.read_text())["results"]["toyland_dogs"]["names_dog,none"], answers


def main():
    register_missing_operators()
    folder = Path.cwd() / "task"
    folder.mkdir()
    scenes, questions = prepare(folder)
    steerer = Steerer.load("toyland")
    expected = {}
    for name, plan in {"plain": None, "minus": steerer.plan(minus=["dog"])}.items():
        with steerer.applied(plan):
            texts = [q.replace("<image>", "").strip() for q in questions]
            pairs = zip(scenes, texts, strict=True)
            expected[name] = [steerer.vlm.caption([scene.image], text, 24)[0] for scene, text in pairs]
    share, answers = run_lmms_eval(folder, "atlas=toyland", "plain")
    assert answers == expected["plain"], (answers, expected["plain"])
    assert share >= 0.8, share
    share, answers = run_lmms_eval(folder, "atlas=toyland,minus=dog", "minus")
    assert answers == expected["minus"], (answers, expected["minus"])
    assert share <= 0.4, share
    from elude_steer.errors import SpecError
    from elude_steer.evaluation.benchmarks.lmms_model import SteeredModel, cut_answer

    assert "there is no setting 'gama'. Did you mean 'gamma'?" in error_line(SpecError, lambda: SteeredModel(gama=1))
    assert cut_answer("a dog\n\nand more", ["\n\n", ""]) == "a dog" and cut_answer(" a ", None) == "a"
    print("OK")


if __name__ == "__main__":
    main()
