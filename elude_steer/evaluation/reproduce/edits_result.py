"""The page, table and JSON of `reproduce steering`: captions, maps, settings, and whether concepts went and came."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from elude_steer.evaluation.reproduce.edits import count_verdicts
from elude_steer.evaluation.reproduce.result import STYLE, align, show_about, show_hours, show_notes, write_text
from elude_steer.utils.html import escape, image_tag, page

_STYLE = (
    STYLE
    + """
article { border-top: 2px solid #8888; margin-top: 32px; padding-top: 18px }
.scene { display: grid; grid-template-columns: 260px minmax(0, 1fr); gap: 28px; align-items: start }
.edit { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 4px 24px; padding: 14px 0;
  border-top: 1px solid #8884 } .edit:first-child { border-top: 0; padding-top: 0 }
.scene > * { min-width: 0; overflow-wrap: anywhere }
.edit h3 { font-size: 16px; margin: 0 0 4px } .maps { display: flex; gap: 8px } figure { margin: 0 }
figcaption { font-size: 12px; opacity: .8 } .maps img { width: 150px }
.yes { color: #14713d } .no { color: #b3261e } .state { font-weight: 600; margin-right: 14px }
del { opacity: .6 } ins { text-decoration: none; font-weight: 600; color: #14713d }
@media (prefers-color-scheme: dark) { .yes, ins { color: #6fdc9a } .no { color: #ff8a80 } }
@media (max-width: 900px) { .scene, .edit { grid-template-columns: minmax(0, 1fr) } }
"""
)


@dataclass(frozen=True, eq=False)
class EditsResult:
    """Reproduced edits.

    Attributes:
        rows: what `run_edits` returned.
        about: how they were run.
        hours: of the pieces, predicted and measured.
        notes: remarks as sentences.
    """

    rows: Sequence[Mapping[str, Any]]
    about: Mapping[str, Any]
    hours: Mapping[str, Any]
    notes: Sequence[str] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; images are on the page only."""
        hidden = ("image", "maps", "marked")
        rows = [{name: value for name, value in row.items() if name not in hidden} for row in self.rows]
        counted = count_verdicts(self.rows)
        return {
            "name": "steering",
            **self.about,
            "counts": counted,
            "rows": rows,
            "notes": list(self.notes),
            "hours": dict(self.hours),
        }

    def text(self) -> list[list[str]]:
        """The table as text: a header, the captions before, and a line for each edit."""
        lines = [["row", "edit", "settings", "went", "came", "kept", "caption"]]
        for _, group in groupby(self.rows, key=lambda row: row["scene"]):
            for number, row in enumerate(group):
                if number == 0:
                    lines.append([row["scene"], "", "", "", "", "", row["baseline"]])
                gone, came = describe_verdict(row["verdict"])
                kept = "{} of {}".format(*row["verdict"]["kept"])
                lines.append([row["row"], row["edit"], row["settings"], gone, came, kept, row["caption"]])
        return lines

    def save(self, folder: Path) -> Path:
        """Write the JSON file, the text table and the page; returns the page's path."""
        write_text(folder / "steering.json", json.dumps(self.to_dict(), indent=1))
        write_text(folder / "steering.txt", align(self.text()))
        write_text(folder / "steering.html", self.page())
        return folder / "steering.html"

    def page(self) -> str:
        """The page."""
        counted = count_verdicts(self.rows)
        refused = sum(bool(row.get("refused")) for row in self.rows)
        not_made = f", {refused} of which could not be made" if refused else ""
        lead = (
            f"{len(self.rows)} edits{not_made}. Of the concepts to remove, the caption before names "
            f"{counted['named before']}; {counted['went']} of these went. {counted['came']} of "
            f"{counted['asked to come']} concepts came. Of the other words of the captions before, "
            f"{counted['kept']} of {counted['other words']} are still there."
        )
        title = "The paper's fourteen edits" if self.about["paper"] else "Edits"
        scenes = "".join(_scene(list(group)) for _, group in groupby(self.rows, key=lambda row: row["scene"]))
        body = (
            f"<h1>{escape(title)}</h1><p>{escape(lead)}</p>"
            '<p class="soft">Words that are gone are struck through, new ones are green. The maps show where the '
            "sub-units of a word fire; patches that were changed are framed. A concept went if the caption named it "
            "before and does not now; it came if the caption names it now and did not before. Only the word that "
            "was asked for counts, singular or plural, and none that means about the same. Words such as "
            "a, on and is do not count as kept. Settings in brackets are "
            "(alpha, gamma, kappa, nu).</p>"
            f"{show_notes(self.notes)}{scenes}{show_hours(self.hours)}{show_about(self.about)}"
        )
        return page(title, body, style=_STYLE)


def describe_verdict(verdict: Mapping[str, Any]) -> tuple[str, str]:
    """What went and what came, in words.

    Example:
        >>> describe_verdict({"gone": {"dog": "went"}, "came": True})
        ('dog went', 'yes')
    """
    gone = ", ".join(f"{word} {state}" for word, state in verdict["gone"].items())
    return gone, {None: "", True: "yes", False: "no"}[verdict["came"]]


def _scene(rows: Sequence[Mapping[str, Any]]) -> str:
    first = rows[0]
    paper = f'<p class="soft">paper: {escape(first["paper"]["baseline"])}</p>' if first["paper"] else ""
    return (
        f'<article><h2>{escape(first["scene"])}</h2><div class="scene"><div>{image_tag(first["image"], "the image")}'
        f'<p>{escape(first["baseline"])}</p>{paper}<p class="soft">{escape(first["model"])}, {escape(first["layer"])}'
        f"</p></div><div>{''.join(map(_edit, rows))}</div></div></article>"
    )


def _edit(row: Mapping[str, Any]) -> str:
    maps = "".join(
        f"<figure>{image_tag(source, f'where {word} fires')}<figcaption>{escape(word)}</figcaption></figure>"
        for word, source in row["maps"].items()
    )
    states = "".join(
        f'<span class="state {"yes" if state == "went" else "no" if state == "stayed" else "soft"}">{escape(word)} '
        f"{escape(state)}</span>"
        for word, state in row["verdict"]["gone"].items()
    )
    came = row["verdict"]["came"]
    if came is not None:
        words = " or ".join(word[1:] for word in row["edit"].split() if word.startswith("+"))
        states += (
            f'<span class="state {"yes" if came else "no"}">{escape(words)} {"came" if came else "did not come"}</span>'
        )
    states += '<span class="soft">{} of {} other words kept</span>'.format(*row["verdict"]["kept"])
    paper = f'<p class="soft">paper: {escape(row["paper"]["caption"])}</p>' if row["paper"] else ""
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in row["notes"])
    return (
        f'<section class="edit"><div><h3>{escape(row["edit"])} <span class="soft">{escape(row["settings"])}</span></h3>'
        f"<p>{row['marked']['steered']}</p>{paper}<p>{states}</p>{notes}</div>"
        f'<div class="maps">{maps}</div></section>'
    )
