"""The edits of `reproduce steering`: the rows, the images that they need, and whether concepts went or came.

Nothing here loads torch, so that missing images are named before a model is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elude_steer.errors import ImageError, SpecError, did_you_mean
from elude_steer.evaluation.edits.caption_reader import plural
from elude_steer.evaluation.reproduce.paper import PaperEdit, read_edits
from elude_steer.recipe_files import load_recipe
from elude_steer.specs import Recipe, StepSpec
from elude_steer.steering.settings import format_setting
from elude_steer.utils.files import read_bytes

PAPER_RECIPES = tuple(dict.fromkeys(edit.recipe for edit in read_edits()))
_MAX_BYTES = 10_000_000  # of a file of paths
ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
# What the paper's images show, for a user who looks for them.
SCENES = {
    "dog": "a black dog with bandana and sunglasses on a red motorcycle (COCO)",
    "train": "a yellow and blue train next to a building with graffiti",
    "teddy": "a giant teddy bear on a chair in a shopping mall",
    "frisbee": "a dog that leaps for a frisbee, indoors",
    "cats": "two cats on a pink blanket with remote controls",
}


@dataclass(frozen=True, eq=False)
class Edit:
    """One row.

    Attributes:
        row: its name: `train-2`.
        scene: the name of its image: `train`.
        recipe: where it is from.
        step: what is changed.
        paper: what the paper shows; None for edits of other recipes.
    """

    row: str
    scene: str
    recipe: Recipe
    step: StepSpec
    paper: PaperEdit | None

    @property
    def words(self) -> str:
        """The edit as the paper writes it: `-train +bus`."""
        return " ".join([*(f"-{word}" for word in self.step.minus), *(f"+{word}" for word in self.step.plus)])

    @property
    def settings(self) -> str:
        """Its settings: `(50, -2, 100, 50)` as in the paper; what differs from that by name."""
        found = {name: value for name, value in asdict(self.step.settings).items() if value is not None}
        if found.get("mode") == "scale":
            return (
                f"({', '.join(f'{found[name]:g}' if name != 'nu' else str(found[name]) for name in _PAPER_SETTINGS)})"
            )
        return ", ".join(format_setting(name, value) for name, value in found.items()) or "the atlas's"


_PAPER_SETTINGS = ("alpha", "gamma", "kappa", "nu")


def list_edits(recipes: Sequence[str] = PAPER_RECIPES, rows: Sequence[str] = ()) -> list[Edit]:
    """The edits of some recipes, or some of them by name; raises for a name that no edit has.

    Args:
        recipes: names or files.
        rows: such as `train-2`, or `train` for all of a scene.
    """
    edits = []
    for name in recipes:
        recipe = load_recipe(name)
        scene = recipe.name.removeprefix("llava-") if recipe.name in PAPER_RECIPES else recipe.name
        for number, step in enumerate(recipe.steps, 1):
            row = f"{scene}-{number}"
            paper = next((edit for edit in read_edits() if edit.row == row and edit.recipe == recipe.name), None)
            edits.append(Edit(row, scene, recipe, step, paper))
    known = [name for edit in edits for name in (edit.row, edit.scene)]
    for name in rows:
        if name not in known:
            raise SpecError(f"there is no row '{name}'; there are {', '.join(e.row for e in edits)}.")
    return [edit for edit in edits if not rows or edit.row in rows or edit.scene in rows]


def find_images(edits: Sequence[Edit], source: str | Path | None) -> dict[str, Path]:
    """The image of each row, by its name; raises for those that are missing, with what they show.

    Args:
        edits: the rows.
        source: a folder with an image for each scene (`train.jpg`) or row (`train-2.jpg`), or a JSON file with paths
            by these names; None for the images of the recipes.
    """
    found: dict[str, Path] = {}
    given = _read_source(source, edits)
    for edit in edits:
        path = given.get(edit.row) or given.get(edit.scene)
        if path is None and edit.recipe.image is not None:
            path = Path(edit.recipe.image)
        if path is not None:
            found[edit.row] = path
    missing = dict.fromkeys(edit.scene for edit in edits if edit.row not in found)
    if missing:
        needs = "; ".join(f"{scene}.jpg: {SCENES.get(scene, 'the image of its recipe')}" for scene in missing)
        where = "give a folder with them: --scenes FOLDER" if source is None else f"they are not in '{source}'"
        raise ImageError(f"these edits need images that do not come with the package ({needs}); {where}.")
    for path in found.values():
        if not path.is_file():
            raise ImageError(f"there is no image '{path}'; check the path.")
    return found


def _read_source(source: str | Path | None, edits: Sequence[Edit]) -> dict[str, Path]:
    if source is None:
        return {}
    path = Path(source).expanduser()
    names = {name for edit in edits for name in (edit.row, edit.scene)}
    if path.is_dir():
        files = sorted(path.iterdir())
        return {file.stem: file for file in files if file.stem in names and file.suffix.lower() in ENDINGS}
    if not path.is_file():
        raise ImageError(f"there is no folder or file '{source}' with the images of the edits; check the path.")
    try:
        mapping = json.loads(read_bytes(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        text = f"{type(error).__name__}: {error}"[:100]
        raise SpecError(f"'{source}' is neither a folder of images nor a JSON file of their paths ({text}).") from error
    if not isinstance(mapping, dict):
        raise SpecError(f'\'{source}\' is not a JSON object of rows and images: {{"train": "photos/train.jpg"}}.')
    known = {edit.row for edit in list_edits()} | set(SCENES) | names
    for name, value in mapping.items():
        if name not in known:
            raise SpecError(
                f"'{source}' names {name[:60]!a}, which is no row or scene.{did_you_mean(str(name), sorted(known))}"
            )
        if not isinstance(value, str):
            raise SpecError(f"'{source}' gives {repr(value)[:60]} for '{name}'; write the path of an image.")
    return {name: (path.parent / value) for name, value in mapping.items()}


def judge_caption(step: StepSpec, baseline: str, caption: str) -> dict[str, Any]:
    """Whether the concepts of a step went and came; a singular and its plural name the same concept.

    Returns:
        `gone`: minus word -> `went`, `stayed`, or `was not named`; `came`: whether one of the plus words came, None
        if none was asked for; `kept`: how many other words of the caption before are still there, and of how many.

    Example:
        >>> judge_caption(StepSpec(minus=("dog",)), "two dogs on a chair", "a chair")["gone"]
        {'dog': 'went'}
    """
    from elude_steer.steering.result import content_words

    gone = {}
    for word in step.minus:
        before, after = _names(baseline, word), _names(caption, word)
        gone[word] = "stayed" if after else "went" if before else "was not named"
    came = None if not step.plus else any(_names(caption, word) and not _names(baseline, word) for word in step.plus)
    others = [word for word in content_words(baseline) if not any(_names(word, gone_word) for gone_word in step.minus)]
    kept = sum(word in content_words(caption) for word in others)
    return {"gone": gone, "came": came, "kept": [kept, len(others)]}


def _names(caption: str, concept: str) -> bool:
    """Whether a caption has a concept's word as a whole word, in its singular or plural."""
    from elude_steer.steering.run_recipe import says

    singulars = [word for word in re.findall(r"[\w-]+", caption.lower()) if plural(word) == concept.lower()]
    return bool(singulars) or says(caption, concept) or says(caption, plural(concept))


def count_verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Over all rows: removed concepts that were named before, and that went; new ones that came; words that stayed."""
    gone = [state for row in rows for state in row["verdict"]["gone"].values()]
    came = [row["verdict"]["came"] for row in rows if row["verdict"]["came"] is not None]
    return {
        "named before": len(gone) - gone.count("was not named"),
        "went": gone.count("went"),
        "stayed": gone.count("stayed"),
        "asked to come": len(came),
        "came": sum(came),
        "other words": sum(row["verdict"]["kept"][1] for row in rows),
        "kept": sum(row["verdict"]["kept"][0] for row in rows),
    }
