"""The efficiency table by the paper's protocol, at a size that fits two cores.

    python demos/benchmarks/efficiency.py --work WORK [--out demos/results] [--threads 2] [--passes 5]

The paper times a DINOv2-B/14 on an H100: batches of 256 images, 100 passes to warm up, 500 that are timed, compiled,
the mean. Here a random DINOv2 of the same shape runs by the same protocol: twelve blocks, an MLP of four times the
width, a split of about eight parts a unit, but 192 wide and with five tokens an image. The cost of a dictionary next
to its backbone depends on these proportions, so the ratios can be compared, and the milliseconds cannot. What
dictionaries have learnt does not change the time of a pass: they are made from few images.

Times are by the clock: run it on a machine that has nothing else to do. `--passes 5` tries it. Rows are files below
WORK: an interrupted run continues.
"""

import argparse
from pathlib import Path

import torch

from elude_steer.evaluation.reproduce.options import ReproduceOptions
from elude_steer.evaluation.reproduce.result import TableResult
from elude_steer.evaluation.reproduce.run import reproduce

BACKBONE = "dinov2-base-layer12"
SIDE, WIDTH, HEADS = 28, 192, 3  # 2 x 2 patches of 14 pixels
# Of random weights, so many instances and so small clusters give about the paper's eight parts a unit.
CHANGES = ("tokens.per_image=4", "clusters.top_k=250", "clusters.min_cluster_size=3")


def save_backbone(folder: Path) -> Path:
    """A DINOv2 with random weights and its image processor, saved as any checkpoint."""
    from transformers import Dinov2Config, Dinov2Model
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = Dinov2Config(hidden_size=WIDTH, num_hidden_layers=12, num_attention_heads=HEADS, image_size=SIDE)
        sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
        BitImageProcessorPil(**sizes).save_pretrained(folder)
        Dinov2Model(config).save_pretrained(folder)
    return folder


def as_page(result: TableResult) -> list[str]:
    """The table as Markdown: times, ratios and the paper's ratios."""
    heads = ["method", "ms a batch", "slower, %", "the paper's", "more memory, %", "the paper's"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in result.rows:
        time, slower, memory = (row.numbers.get(name) for name in ("ms per batch", "slower, %", "more memory, %"))
        cells = [row.method.replace("raw units", "backbone only"), _format(time and time.value)]
        for number in (slower, memory):
            cells += [_format(number and number.value), _format(number and number.paper)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def main() -> None:
    """Make the checkpoint, run the table, and write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of everything that is made")
    parser.add_argument("--out", type=Path, help="folder for efficiency.md and efficiency.json")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--passes", type=int, help="time so few passes, to try it")
    given = parser.parse_args()
    options = ReproduceOptions(
        "toyland:31",
        "toyland:77001",
        given.work,
        backbones={BACKBONE: str(save_backbone(given.work / "backbone"))},
        seeds=(42,),
        limit=400,
        held_out_limit=256,
        preset="tiny",
        protocol="paper",
        passes=given.passes,
        changes=CHANGES,
        threads=given.threads,
        log=lambda line: print(line, flush=True),
    )
    result = reproduce("efficiency", options, on_forecast=lambda found: print("\n".join(found.lines()), flush=True))
    if not isinstance(result, TableResult):
        raise TypeError("a table was expected.")
    about = "\n".join((__doc__ or "").split("\n\n")[2:3])
    text = ["# Efficiency by the paper's protocol", "", about, "", *as_page(result), "", *result.notes, ""]
    text.append(f"{60 * result.hours['clock']:.1f} minutes by the clock, {given.threads} threads.")
    print("\n".join(text))
    if given.out:
        result.save(given.out)
        (given.out / "efficiency.md").write_text("\n".join([*text, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
