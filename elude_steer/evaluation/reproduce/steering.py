"""`reproduce steering`: builds the atlas, makes the edits on their images, and keeps every row as a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.pipeline import build
from elude_steer.atlas.manifest import find_atlas, read_manifest
from elude_steer.atlas.manifest_rules import MANIFEST, MAX_JSON
from elude_steer.errors import ImageError, SpecError
from elude_steer.evaluation.reproduce.edits import PAPER_RECIPES, Edit, judge_caption
from elude_steer.evaluation.reproduce.ledger import Ledger
from elude_steer.evaluation.reproduce.options import ReproduceOptions
from elude_steer.models.images import open_image
from elude_steer.models.sources.decoding import MAX_MEMORY
from elude_steer.recipe_files import load_spec
from elude_steer.specs import AtlasSpec
from elude_steer.steering.plan import Plan
from elude_steer.steering.result import SteeredCaption, mark_changes
from elude_steer.steering.run_recipe import step_settings
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import read_bytes, read_json, write_file
from elude_steer.utils.fingerprint import make_key, versions
from elude_steer.utils.plotting import data_uri, fit_within

ATLAS_RECIPE = "llava-onevision-0.5b-unique"  # the paper's rule of the split
Row = dict[str, Any]


def atlas_spec(options: ReproduceOptions) -> AtlasSpec:
    """How the atlas of the paper's edits is built."""
    return options.adapt(load_spec(ATLAS_RECIPE))


def needs_build(edits: Sequence[Edit], options: ReproduceOptions) -> bool:
    """Whether an atlas has to be built: for the paper's recipes, unless the caller names one."""
    return options.atlas is None and any(edit.recipe.name in PAPER_RECIPES for edit in edits)


def atlas_folder(spec: AtlasSpec, options: ReproduceOptions) -> Path:
    """Where the atlas that is built lies; another model, image set or setting has another folder."""
    key = make_key(asdict(spec), options.image_set(options.images, spec, options.limit).fingerprint, versions())
    return options.work / f"atlas-{spec.name}-{key}"


def find_hours_key(piece: str, edits: Sequence[Edit], images: Mapping[str, Path], options: ReproduceOptions) -> str:
    """What the hours of a piece depend on: the atlas, and of captions also their edits."""
    spec = atlas_spec(options) if needs_build(edits, options) else None
    atlas = None if spec is None else atlas_folder(spec, options).name
    if piece == "atlas":
        return make_key(atlas)
    own = [edit for edit in edits if piece == f"captions of {edit.scene}"]
    if spec is None:
        paths = [_row_path(edit, _atlas_of(edit, None, options), images[edit.row], options) for edit in own]
        return make_key([path.name for path in paths])
    # Rows are named after the atlas's manifest, which may not be there yet.
    return make_key(atlas, [_edit_causes(edit, images[edit.row], options) for edit in own])


def run_edits(
    edits: Sequence[Edit], images: Mapping[str, Path], options: ReproduceOptions, ledger: Ledger
) -> list[Row]:
    """Make the edits; rows that are there already are read.

    Args:
        edits: the rows.
        images: the image of each.
        options: what to run.
        ledger: counts what every piece takes.
    """
    built = needs_build(edits, options)
    spec = atlas_spec(options) if built else None
    if spec is not None:
        with ledger.count("atlas"):
            _build(spec, options)
    rows: list[Row] = []
    steerers = _Steerers(options)
    for atlas, recipe in dict.fromkeys((_atlas_of(edit, spec, options), edit.recipe.name) for edit in edits):
        own = [edit for edit in edits if edit.recipe.name == recipe]
        for path in dict.fromkeys(images[edit.row] for edit in own):
            group = [edit for edit in own if images[edit.row] == path]
            with ledger.count(f"captions of {group[0].scene}"):
                rows += _run_group(steerers, atlas, group, path, options)
    order = {edit.row: number for number, edit in enumerate(edits)}
    return sorted(rows, key=lambda row: order[row["row"]])


def _build(spec: AtlasSpec, options: ReproduceOptions) -> None:
    out = atlas_folder(spec, options)
    if (out / "manifest.json").exists():
        return
    options.log(f"building the atlas {spec.name}")
    build(
        spec,
        images=options.limited(options.images, spec, options.limit),
        out=out,
        work=options.work / "stages",
        device=options.device,
        threads=options.threads,
        trust_remote_code=options.trust_remote_code,
    )


def _atlas_of(edit: Edit, spec: AtlasSpec | None, options: ReproduceOptions) -> str:
    if options.atlas is not None:
        return options.atlas
    if spec is not None and edit.recipe.name in PAPER_RECIPES:
        return str(atlas_folder(spec, options))
    return edit.recipe.atlas


class _Steerers:
    """The steerer of each atlas, loaded when a row needs it."""

    def __init__(self, options: ReproduceOptions) -> None:
        self.options, self.loaded = options, dict[str, Steerer[Atlas]]()

    def find(self, atlas: str) -> Steerer[Atlas]:
        if atlas not in self.loaded:
            options = self.options
            self.loaded[atlas] = Steerer.load(
                atlas,
                model=options.backbones.get(ATLAS_RECIPE),
                device=options.device,
                threads=options.threads,
                trust_remote_code=options.trust_remote_code,
            )
        return self.loaded[atlas]


def _run_group(
    steerers: _Steerers, atlas: str, edits: Sequence[Edit], image: Path, options: ReproduceOptions
) -> list[Row]:
    """The edits of one image; those that are not there yet are made together."""
    paths = {edit.row: _row_path(edit, atlas, image, options) for edit in edits}
    missing = [edit for edit in edits if not paths[edit.row].exists()]
    edits_by_name = {edit.row: edit for edit in missing}
    if missing:
        steerer, recipe = steerers.find(atlas), missing[0].recipe
        plans, refused = _make_plans(steerer, missing)
        opened = open_image(image)
        options.log(f"{missing[0].scene}: {len(missing)} edit{'s' * (len(missing) > 1)}")
        bare = [steerer.plan()] if refused and not plans else []
        results = steerer.explain_all(
            opened,
            [*(plan for plan, _ in plans.values()), *bare],
            prompt=recipe.prompt,
            max_new_tokens=recipe.max_new_tokens,
        )
        found: dict[str, Row] = {}
        for (row, (_, notes)), result in zip(plans.items(), results, strict=False):
            found[row] = _as_row(edits_by_name[row], replace(result, notes=(*notes, *result.notes)))
        for row, cause in refused.items():
            found[row] = _as_refused(edits_by_name[row], results[0], cause)
        for row, content in found.items():
            text = json.dumps(content, indent=1)
            write_file(paths[row], lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
    return [_judge(edit, read_json(paths[edit.row], dict)) for edit in edits]


def _judge(edit: Edit, row: Row) -> Row:
    """A stored row with its verdict, which is not stored, so that the rule of today holds for all rows."""
    return {**row, "verdict": judge_caption(edit.step, row["baseline"], row["caption"])}


def _make_plans(
    steerer: Steerer[Atlas], edits: Sequence[Edit]
) -> tuple[dict[str, tuple[Plan, Sequence[str]]], dict[str, str]]:
    """The plan of each row with notes on it, and why rows have none: their words may be unknown to the atlas."""
    plans, refused = dict[str, tuple[Plan, Sequence[str]]](), dict[str, str]()
    for edit in edits:
        step = edit.step
        try:
            settings = step_settings(step)
            plans[edit.row] = steerer.prepare_plan(step.minus, step.plus, step.region, settings)
        except SpecError as error:
            refused[edit.row] = str(error)
    return plans, refused


def _as_refused(edit: Edit, result: SteeredCaption, cause: str) -> Row:
    """A row that could not be made; its caption is the one before."""
    baseline = result.baseline or ""
    row = _as_row(edit, replace(result, caption=baseline, maps={}, seen={}, notes=(f"Not made: {cause}",)))
    return {**row, "refused": True}


def _row_path(edit: Edit, atlas: str, image: Path, options: ReproduceOptions) -> Path:
    folder = find_atlas(atlas)
    if folder is not None:
        read_manifest(folder)  # raises unless it is an atlas
    manifest = b"" if folder is None else read_bytes(folder / MANIFEST, MAX_JSON)
    causes = [hashlib.sha256(manifest).hexdigest() if manifest else atlas, *_edit_causes(edit, image, options)]
    return options.work / "edits" / f"{edit.row}-{make_key(*causes)}.json"


def _edit_causes(edit: Edit, image: Path, options: ReproduceOptions) -> list[Any]:
    """Everything but the atlas that an edit depends on."""
    try:
        data = read_bytes(image, MAX_MEMORY)
    except OSError as error:
        raise ImageError(f"'{image}' cannot be read as an image: {error.strerror or error}.") from error
    return [
        hashlib.sha256(data).hexdigest(),
        asdict(edit.step),
        edit.recipe.prompt,
        edit.recipe.max_new_tokens,
        options.backbones.get(ATLAS_RECIPE),
        versions(),
    ]


def _as_row(edit: Edit, result: SteeredCaption) -> Row:
    """Everything that the page and the table show."""
    baseline = result.baseline or ""
    return {
        "row": edit.row,
        "scene": edit.scene,
        "edit": edit.words,
        "settings": edit.settings,
        "baseline": baseline,
        "caption": result.caption,
        "marked": mark_changes(result),
        "seen": {word: round(share, 3) for word, share in result.seen.items()},
        "notes": list(result.notes),
        "model": Path(str(result.provenance.get("model"))).name,
        "layer": result.provenance.get("layer"),
        "image": data_uri(fit_within(result.image, 360), quick=True),
        "maps": {word: data_uri(result.heatmap(word, side=300), quick=True) for word in result.maps},
        "paper": None if edit.paper is None else {"baseline": edit.paper.baseline, "caption": edit.paper.caption},
    }
