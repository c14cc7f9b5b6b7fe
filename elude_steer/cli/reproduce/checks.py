"""What `reproduce` reads from its options, and refuses before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elude_steer.cli.checks import check_images, check_spec
from elude_steer.cli.options import print_progress, require_model
from elude_steer.errors import SpecError
from elude_steer.evaluation.reproduce.options import ReproduceOptions


def read_options(options: dict[str, Any]) -> ReproduceOptions:
    """The options of a run; raises for texts that cannot be read, and for a folder that cannot be."""
    from elude_steer.utils.files import check_folder, home

    texts: dict[str, Any] = {one: tuple(options.pop(one)) for one in ("judges", "recipes", "changes")}
    rows = tuple(row.strip() for text in options.pop("rows") for row in text.split(","))
    backbones: dict[str, str | None] = {}
    for text in options.pop("backbones"):
        for part in text.split(","):
            recipe, given, model = part.partition("=")
            backbones[recipe.strip()] = model if given else None
    heads = dict(_pair(text) for text in options.pop("heads"))
    for model in (*backbones.values(), *heads.values()):
        require_model(None, None, model)  # type: ignore[arg-type]
    if options["work"] is None:
        options["work"] = home() / "work" / "reproduce"
    else:
        check_folder(options["work"])
    seeds = _read_seeds(options.pop("seeds"))
    return ReproduceOptions(
        rows=rows, backbones=backbones, heads=heads, seeds=seeds, log=print_progress, **texts, **options
    )


def _pair(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given or not value:
        raise SpecError(f"--head is '{text}'; write the name of a backbone and a model: dinov2-base-layer12=MODEL.")
    return name.strip(), value


def _read_seeds(text: str | None) -> tuple[int, ...]:
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or len(part) > 18:
            raise SpecError(f"--seeds is '{str(text)[:60]}'; write numbers: --seeds 42,123.")
    return tuple(map(int, parts))


def check_options(name: str, options: ReproduceOptions) -> None:
    """Raise for all that is wrong without a model."""
    from elude_steer.evaluation.measures.llm_judges import check_judges, read_judge

    if options.judges:
        check_judges([read_judge(text) for text in options.judges])
    for source in (options.images, options.held_out):
        check_images(source)
    if name == "steering":
        _check_edits(options)
        return
    for given, switch in ((options.scenes, "--scenes"), (options.recipes, "--recipe"), (options.atlas, "--atlas")):
        if given:
            raise SpecError(f"{switch} belongs to `reproduce steering`, not to `reproduce {name}`.")
    for chosen, switch in ((options.protocol, "--protocol"), (options.passes, "--passes")):
        if chosen and name != "efficiency":
            raise SpecError(f"{switch} belongs to `reproduce efficiency`, not to `reproduce {name}`.")
    if options.images is None:
        raise SpecError("a table needs images to learn from: --images FOLDER, such as ImageNet's training images.")
    if name == "judge" and not options.judges:
        raise SpecError("`reproduce judge` needs judges: --judge MODEL@URL, an OpenAI-compatible endpoint.")
    from elude_steer.evaluation.reproduce.options import find_backbones, find_rows

    backbones = find_backbones(name, options)
    for backbone in backbones:
        find_rows(name, backbone, options)
        check_spec(backbone, options.changes)
    for backbone in options.heads:
        if backbone not in backbones:
            raise SpecError(f"--head names '{backbone}', which is not run; there are {_list(backbones)}.")


def _check_edits(options: ReproduceOptions) -> None:
    from elude_steer.evaluation.reproduce.edits import PAPER_RECIPES, find_images, list_edits

    edits = list_edits(options.recipes or PAPER_RECIPES, options.rows)
    find_images(edits, options.scenes)
    built = options.atlas is None and any(edit.recipe.name in PAPER_RECIPES for edit in edits)
    if built and options.images is None:
        raise SpecError(
            "the paper's edits need an atlas of LLaVA-OneVision: --images FOLDER to build one, or --atlas one that is "
            "there."
        )
    known = ["llava-onevision-0.5b-unique"]
    for backbone in options.backbones:
        if backbone not in known:
            raise SpecError(f"there is no backbone '{backbone}' here; there is {_list(known)}.")


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
