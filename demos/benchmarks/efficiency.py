"""The efficiency table by the paper's protocol, at a size that fits two cores.

    python demos/benchmarks/efficiency.py --work WORK [--out demos/results] [--threads 2] [--passes 5]

The paper times a DINOv2-B/14 on an H100: batches of 256 images, 100 passes to warm up, 500 that are timed, compiled,
the mean. Here a random DINOv2 of the same shape runs by the same protocol: twelve blocks, an MLP of four times the
width, a split of about eight parts a unit, but 192 wide and with five tokens an image. The cost of a dictionary next
to its backbone depends on these proportions, so the ratios can be compared, and the milliseconds cannot. What
dictionaries have learnt does not change the time of a pass: they are made from few images.

What an autoencoder takes of memory grows with the tokens of a pass. So memory is measured once more with the paper's
257 tokens an image, in one pass; it counts the weights and what a pass allocates, as torch counts on a GPU.

The paper's autoencoders take far more memory beside their backbone than ours do. We do not know what their code keeps
at a time; the product of tokens and latents is a third of it. ELUDe computes as many sub-units at a time as the layer
has units, so what it takes are the weights of the sub-units, as in the paper, and at most another output. All
sub-units at once took 34 % more memory with five tokens and 88 % with 257; the layer alone was 1 to 2 % faster.

Times are by the clock: run it on a machine that has nothing else to do. `--passes 5` tries it. Rows are files below
WORK: an interrupted run continues.
"""

import argparse
import json
from pathlib import Path

import torch

from elude_steer.evaluation.reproduce.options import ReproduceOptions
from elude_steer.evaluation.reproduce.result import TableResult
from elude_steer.evaluation.reproduce.run import reproduce

BACKBONE = "dinov2-base-layer12"
WIDTH, HEADS = 192, 3
SIDE, FULL_SIDE = 28, 224  # 2 x 2 and 16 x 16 patches of 14 pixels
# Of random weights, so many instances and so small clusters give about the paper's eight parts a unit.
CHANGES = ("tokens.per_image=4", "clusters.top_k=250", "clusters.min_cluster_size=3")


def save_backbone(folder: Path, side: int) -> Path:
    """A DINOv2 with random weights and its image processor, saved as any checkpoint."""
    from transformers import Dinov2Config, Dinov2Model
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = Dinov2Config(hidden_size=WIDTH, num_hidden_layers=12, num_attention_heads=HEADS, image_size=side)
        sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        BitImageProcessorPil(**sizes).save_pretrained(folder)
        Dinov2Model(config).save_pretrained(folder)
    return folder


def run(work: Path, side: int, passes: int | None, threads: int) -> TableResult:
    """The table for images of a size."""
    options = ReproduceOptions(
        "toyland:31",
        "toyland:77001",
        work,
        backbones={BACKBONE: str(save_backbone(work / "backbone", side))},
        seeds=(42,),
        limit=400,
        held_out_limit=256,
        preset="tiny",
        protocol="paper",
        passes=passes,
        changes=CHANGES,
        threads=threads,
        log=lambda line: print(line, flush=True),
    )
    result = reproduce("efficiency", options, on_forecast=lambda found: print("\n".join(found.lines()), flush=True))
    if not isinstance(result, TableResult):
        raise TypeError("a table was expected.")
    return result


def as_page(times: TableResult, full: TableResult) -> list[str]:
    """The table as Markdown: times, ratios and the paper's ratios."""
    heads = ["method", "ms a batch", "slower, %", "the paper's", "more memory, %", "with 257 tokens, %", "the paper's"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    memory = {row.method: row.numbers["more memory, %"] for row in full.rows}
    for row in times.rows:
        slower, more, large = row.numbers["slower, %"], row.numbers["more memory, %"], memory[row.method]
        values = [row.numbers["ms per batch"].value, slower.value, slower.paper, more.value, large.value, large.paper]
        lines.append(f"| {row.method.replace('raw units', 'backbone only')} | {' | '.join(map(_format, values))} |")
    return lines


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def main() -> None:
    """Make the checkpoints, run the table, and write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of everything that is made")
    parser.add_argument("--out", type=Path, help="folder for efficiency.md and efficiency.json")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--passes", type=int, help="time so few passes, to try it")
    given = parser.parse_args()
    times = run(given.work / "times", SIDE, given.passes, given.threads)
    full = run(given.work / "memory", FULL_SIDE, 1, given.threads)
    about = "\n\n".join((__doc__ or "").split("\n\n")[2:5])
    text = ["# Efficiency by the paper's protocol", "", about, "", *as_page(times, full), "", *times.notes, ""]
    predicted, measured, clock = (60 * times.hours[name] for name in ("predicted", "measured", "clock"))
    text.append(
        f"CPU minutes of the times: {predicted:.0f} predicted before they were taken, {measured:.0f} measured; "
        f"{clock:.0f} minutes by the clock, with {given.threads} threads. "
        "Made by `python demos/benchmarks/efficiency.py --work WORK --out demos/results`."
    )
    print("\n".join(text))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "efficiency.json").write_text(json.dumps([times.to_dict(), full.to_dict()], indent=1) + "\n")
        (given.out / "efficiency.md").write_text("\n".join([*text, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
