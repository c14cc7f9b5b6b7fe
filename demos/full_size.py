"""Run the whole command line on a model of the size of LLaVA-OneVision 0.5B, from the build to the measures.

    python demos/full_size.py FOLDER [--images 16] [--units 32] [--tiny]

It downloads nothing. It writes a checkpoint of that size with random weights, a labeller of base size and images to
FOLDER in the Hub's format (5 GB), and runs the commands that one would run on the real ones. The captions are
meaningless words; times and memory are those of the real model. Finished steps are kept: a second run resumes, and only
shows the results of finished steps. `--tiny` uses small models and takes a minute.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))

from full_size_model import noise_image, save_model

from elude_steer.cli.options import hide_loading_bars
from elude_steer.utils.files import write_file

WORDS = ("dog", "cat", "ball", "train", "beach", "kitchen", "bird", "boat", "tree", "house", "lamp", "chair", "road",
         "cloud", "horse", "flower")  # fmt: skip


def save_labeller(folder: Path, *, tiny: bool = False) -> Path:
    """Save a SigLIP of base size (ViT-B/16, 224 pixels) with random weights, tokenizer and image processor."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, SiglipConfig, SiglipModel, SiglipProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    if (folder / "processor_config.json").exists():
        return folder
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    changes: dict[str, Any] = size if tiny else {}  # the defaults of the class are the base model
    vision = {**changes, "image_size": 32 if tiny else 224, "patch_size": 16}
    text = {**changes, "vocab_size": 32_000, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0}
    torch.manual_seed(1)
    model = SiglipModel(SiglipConfig(text_config={**text, "eos_token_id": 1}, vision_config=vision))
    first = ["<unk>", "</s>", *WORDS]
    vocabulary = {word: n for n, word in enumerate(first)} | {f"word{n}": n for n in range(len(first), 32_000)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="</s>", unk_token="<unk>", eos_token="</s>", model_max_length=64,
        model_input_names=["input_ids"],
    )  # fmt: skip
    side = vision["image_size"]
    images = SiglipImageProcessorPil(size={"height": side, "width": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    model.save_pretrained(folder)
    SiglipProcessor(images, tokenizer).save_pretrained(folder)  # last: its file marks a complete folder
    return folder


def write_recipes(folder: Path, options: argparse.Namespace) -> None:
    """Write the images, the atlas spec that a user would write, and the recipe of the edit that is exported."""
    side, top_k = (56, 500) if options.tiny else (384, 10_000)
    spec = {
        "name": "full-size",
        "model": {"id": str(folder / "model"), "layer": f"layers.{3 if options.tiny else 25}.mlp.fc2"},
        "images": {"source": str(folder / "images")},
        "tokens": {"per_image": "all", "batch_size": 1},
        "clusters": {"top_k": top_k, "backend": "fast", "min_cluster_size": top_k // 100, "units": options.units},
        "split": {"winner_rule": "gap"},
        "references": {"instances": 10, "keep": 4},
        "labels": {"scorer": str(folder / "labeller"), "vocabulary": str(folder / "words.txt"), "top_k": 4},
        "matcher": {"id": "toyland/matcher"},
        "steering": {"mode": "scale", "gamma": -15, "alpha": 15, "kappa": 8, "nu": 50},
    }
    (folder / "images").mkdir(exist_ok=True)
    for number in range(options.images):
        path = folder / "images" / f"{number:04d}.png"
        if not path.exists():
            noise_image(side, side, seed=number).save(path)
    (folder / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")
    (folder / "spec.yaml").write_text(json.dumps(spec, indent=1), encoding="utf-8")  # JSON is YAML
    step = {"minus": ["dog"], "settings": {"nu": "all"}}
    edit = {"name": "edit", "atlas": str(folder / "atlas"), "image": "images/0000.png", "steps": [step]}
    (folder / "edit.yaml").write_text(json.dumps(edit), encoding="utf-8")


def commands(folder: Path) -> dict[str, list[str]]:
    """The commands that a user would type, in order."""
    atlas, image = str(folder / "atlas"), str(folder / "images" / "0000.png")
    short = ["--max-new-tokens", "8"]
    return {
        "build, with names": ["build", str(folder / "spec.yaml"), "--out", atlas, "--work", str(folder / "work")],
        "match": ["concepts", atlas, "--like", "puppy"],
        "steer": ["steer", image, "--atlas", atlas, "--minus", "dog", "--plus", "boat", *short],
        "sweep": ["sweep", image, "--atlas", atlas, "--minus", "dog", "--grid", "gamma=-5,-50", "--grid", "nu=25,all"],
        "export": ["export", str(folder / "edit.yaml"), str(folder / "exported")],
        "caption of the exported model": ["caption", image, "--model", str(folder / "exported"), *short],
        "evaluate": ["evaluate", atlas, "--measures", "faithfulness,monosemanticity,dictionary", "--limit", "4"],
    }


def run_command(name: str, arguments: list[str], done: Path, *, again: bool = False) -> dict[str, Any]:
    """Run a command in its own process and return its seconds, peak memory and output.

    The result is kept in `done` and read from there next time, unless `again`.
    """
    path = done / f"{name.partition(',')[0].replace(' ', '-')}.json"
    if path.exists() and not again:
        return {**json.loads(path.read_text(encoding="utf-8")), "before": True}
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen([sys.executable, "-m", "elude_steer", *arguments], stdout=out, stderr=err)
        _, status, used = os.wait4(child.pid, 0)  # not on Windows; `resource` has no memory of one child
        seconds, texts = time.perf_counter() - start, [file.seek(0) or file.read() for file in (out, err)]
    if status:
        raise SystemExit(f"{name} failed:\n{texts[1]}")
    notes = [line.partition("note: ")[2] for line in texts[1].splitlines() if "note: " in line]
    # A build resets its peak for every stage, so the final peak is that of the last stage.
    stages = [float(peak) for note in notes for peak in re.findall(r"s, ([\d.]+) GB$", note)]
    found = {
        "seconds": seconds,
        "gigabytes": max([used.ru_maxrss * 1024 / 1e9, *stages]),
        "out": texts[0],
        "notes": notes,
    }
    write_file(path, lambda file: file.write(json.dumps(found).encode()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for models, images, atlas and results")
    parser.add_argument("--images", type=int, default=16, help="number of images")
    parser.add_argument("--units", type=int, default=32, help="number of units to split")
    parser.add_argument("--tiny", action="store_true", help="use small models")
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    hide_loading_bars()
    settings, path = [options.images, options.units, options.tiny], folder / "options.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != settings:
        parser.error(f"'{folder}' holds a run with other options; give another folder.")
    write_file(path, lambda file: file.write(json.dumps(settings).encode()))
    if options.prepare:
        save_model(folder / "model", tiny=options.tiny)
        save_labeller(folder / "labeller", tiny=options.tiny)
        write_recipes(folder, options)
        return
    start = time.perf_counter()
    # In its own process, because the peak memory of children starts at that of their parent.
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--prepare"], check=True)
    print(f"{'checkpoints and images':<32}{time.perf_counter() - start:9.1f} s", flush=True)
    if not (folder / "done" / "export.json").exists():  # left by an interrupted run
        shutil.rmtree(folder / "exported", ignore_errors=True)
    for name, arguments in commands(folder).items():
        found = run_command(name, arguments, folder / "done", again="build" in name)  # a build resumes by itself
        before = "  (done before)" if found.get("before") else ""
        print(f"{name:<32}{found['seconds']:9.1f} s{found['gigabytes']:8.2f} GB{before}", flush=True)
        output = found["out"].splitlines() if name in ("match", "steer", "evaluate") else []
        print("".join(f"    {line[:110]}\n" for line in [*found["notes"], *output[:12]]), end="", flush=True)
    print(f"{'this run':<32}{time.perf_counter() - start:9.1f} s")


if __name__ == "__main__":
    main()
