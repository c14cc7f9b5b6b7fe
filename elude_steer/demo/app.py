"""The demo: one page to steer a caption by words and to browse the atlas. `elude-steer demo` serves it.

Gradio carries the page; what it shows comes from `pages`, what it does from the library. Nothing is fetched from other
hosts, and every visitor has a session of their own.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elude_steer.demo import components, html_parts
from elude_steer.demo.presenter import HINTS, TUNABLE, Presenter
from elude_steer.demo.session import EditRequest, ImageState, RateLimit, edit_name, left_out, read_recipe
from elude_steer.errors import EludeSteerError, StoppedError
from elude_steer.models.vlm import PROMPT
from elude_steer.utils import optional

BEGIN = "Pick a word to remove or to add, and press Steer."
LOCAL = ("127.0.0.1", "localhost", "::1")
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# Before the press reaches the server, the mark on the easel is put in its place among the inputs.
_WITH_MARK = "(board, mark, ...rest) => [board, window.eludeSteerMark(), ...rest]"


def make_app(page: Presenter, *, rate_limit: RateLimit | None = None) -> Any:
    """Build the page as a Gradio app; `serve` launches it. `rate_limit` bounds how often visitors may steer."""
    gr = optional.require("gradio", "the demo")
    atlas, name = page.steerer.atlas, Path(page.steerer.vlm.id).name or "model"
    about = f"{name} · atlas {atlas.name}: {len(atlas):,} sub-units of {atlas.d_out} units"
    # Files that visitors bring are removed after an hour; what is worked on is in memory by then.
    with gr.Blocks(title="elude_steer", analytics_enabled=False, delete_cache=(600, 3600)) as app:
        components.text(
            "head",
            "<h1>elude_steer</h1><p>Name a concept, change what the model says.</p>"
            f'<p class="about">{html.escape(about)}</p>',
        )
        with gr.Tabs():
            with gr.Tab("Steer", id="steer"):
                _steer_tab(gr, page, rate_limit)
            with gr.Tab("Explore", id="explore"):
                _explore_tab(gr, page)
        app.unload(_stopper(gr, page))
    return app


def _steer_tab(gr: Any, page: Presenter, rate_limit: RateLimit | None) -> None:
    first = page.board(0) if page.examples else ImageState()
    board = gr.State(first)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=300):
            with gr.Row(equal_height=True):
                examples = components.choices("examples", page.examples_strip())
                bring = gr.UploadButton("Bring a picture", size="sm", elem_id="bring", scale=0, min_width=130)
            easel = components.easel("easel", first.view)
        with gr.Column(scale=6, min_width=300):
            with gr.Row():
                minus = _words(gr, page, "Remove", "minus")
                plus = _words(gr, page, "Add", "plus")
            edits = components.choices("edits", first.edits)
            with gr.Row():
                press = gr.Button("Steer", variant="primary", elem_id="press", scale=6)
                stop = gr.Button("Stop", elem_id="stop", scale=1, min_width=70)
            said = components.text("said", html_parts.hint(BEGIN))
            with gr.Accordion("Settings", open=False, elem_id="settings"):
                values = _settings(gr, page)
                prompt = gr.Textbox(PROMPT, label="question", info="what the model is asked", elem_id="set-prompt")
                with gr.Row():
                    reset = gr.Button("Reset", size="sm", elem_id="reset")
                    tune = gr.Button("Find good settings", size="sm", elem_id="tune")
                tried = components.choices("tried")
            with gr.Accordion("Why", open=False, elem_id="why"):
                reasons = components.choices("reasons", first.reasons)
                specimen = components.choices("specimen")
            with gr.Accordion("Recipe and Python", open=False, elem_id="recipe"):
                taken = components.choices("taken", first.taken)
                with gr.Row():
                    shipped = gr.Dropdown(_recipes(page), value=None, label="Load a recipe", elem_id="shipped")
                    given = gr.UploadButton("… or a file", size="sm", elem_id="given", file_types=[".yaml", ".yml"])
    mark = gr.Textbox(visible=False)  # never shown: the easel's mark comes in its place
    words = [minus, plus, prompt, *values]

    def wanted(board: ImageState, mark: Any, minus: Any, plus: Any, prompt: Any, *values: Any) -> EditRequest:
        given = page.settings(values)
        return EditRequest(board.picture, mark, tuple(minus or ()), tuple(plus or ()), str(prompt or "").strip(), given)

    def choose(event: gr.EventData, request: gr.Request, old: ImageState, *words: Any) -> Any:
        page.stop(visitor(request), "")
        return anew(old, page.board(event.example), html_parts.hint(BEGIN), words)

    def took(request: gr.Request, path: Any, old: ImageState, tried: str, specimen: str, *words: Any) -> Any:
        try:
            board = page.run(lambda: page.brought(path))
        except EludeSteerError as error:
            return *shown(old), html_parts.complaint(error), tried, specimen, *words
        page.stop(visitor(request), "")
        return anew(old, board, html_parts.hint(BEGIN), words)

    def anew(old: ImageState, board: ImageState, said: str, words: Sequence[Any]) -> Any:
        return *shown(board), said, "", "", *words[:2], *page.released(old, words[2:])

    def steer(request: gr.Request, progress: Any = gr.Progress(), *inputs: Any) -> Any:  # noqa: B008
        try:
            asked = wanted(*inputs)
            with working(request, progress):
                board, answer = page.run(lambda: page.answered(inputs[0], asked))
        except StoppedError as why:  # by now another picture may stand there: nothing of this one comes back
            return [gr.skip()] * 5 + [html_parts.hint(str(why)) if str(why) else gr.skip()]
        except EludeSteerError as error:
            return *shown(inputs[0]), html_parts.complaint(error)
        return *shown(board), html_parts.captions(answer)

    def find(request: gr.Request, progress: Any = gr.Progress(), *inputs: Any) -> Any:  # noqa: B008
        try:
            asked = wanted(*inputs)
            with working(request, progress):
                return page.tried(page.run(lambda: page.find(asked)))
        except StoppedError as why:
            return html_parts.hint(str(why)) if str(why) else gr.skip()
        except EludeSteerError as error:
            return html_parts.complaint(error)

    def working(request: Any, progress: Any) -> Any:
        if rate_limit:
            rate_limit.check(counted(request))
        return page.working(visitor(request), lambda tokens: progress((tokens, 64), unit="words or parts of words"))

    def use(event: gr.EventData) -> Any:
        return page.field_values({name: event._data[name] for name in TUNABLE if name in event._data})

    def fill(board: ImageState, recipe: Any, step: int, note: str = "") -> Any:
        edit = recipe.steps[step]
        said = html_parts.hint(note or f"{edit_name(edit)}: press Steer.")
        given = (recipe.prompt, *page.field_values(vars(edit.settings)))
        return *shown(replace(board, given=given)), said, "", "", list(edit.minus), list(edit.plus), *given

    def begin(request: gr.Request, event: gr.EventData) -> Any:
        page.stop(visitor(request), "")
        return fill(page.board(event.example, event.step), page.examples[event.example].recipe, event.step)

    def fetch(request: gr.Request, chosen: str) -> Any:
        page.stop(visitor(request), "")
        number, step = map(int, chosen.split("/"))
        return fill(page.board(number, step), page.examples[number].recipe, step)

    def load(path: Any, board: ImageState, tried: str, specimen: str, *words: Any) -> Any:
        try:
            recipe = read_recipe(path)
        except EludeSteerError as error:
            return *shown(board), html_parts.complaint(error), tried, specimen, *words
        notes = [f"The first of {len(recipe.steps)} edits."] if len(recipe.steps) > 1 else []
        notes += left_out(recipe, TUNABLE, page.own, page.steerer.atlas.name)
        notes += ["It has a region: mark it."] if recipe.steps[0].region else []
        return fill(board, recipe, 0, " ".join([*notes, "Bring its picture, and press Steer."]))

    # Every handler gives every value anew, changed or not: for `gr.skip` Gradio makes components that it never forgets.
    pressed, answered = [board, mark, *words], [board, easel, edits, reasons, taken, said]
    heavy = {"concurrency_limit": 2, "concurrency_id": "model", "js": _WITH_MARK, "show_progress_on": [said]}
    heavy |= {"trigger_mode": "multiple"}  # the last press counts; the one before it ends
    unheard = {**heavy, "api_visibility": "private"}
    filled = [*answered, tried, specimen, *words]
    steered = press.click(steer, pressed, answered, **heavy, api_name="steer")
    examples.select(choose, [board, *words], filled, **_QUIET)
    bring.upload(took, [bring, board, tried, specimen, *words], filled, show_progress="hidden", api_name="bring")
    edited = edits.select(begin, None, filled, **_QUIET).then(steer, pressed, answered, **unheard)
    shipped.input(fetch, shipped, filled, **_QUIET)
    given.upload(load, [given, board, tried, specimen, *words], filled, **_QUIET)
    found = tune.click(find, pressed, tried, **{**heavy, "show_progress_on": [tried]}, api_name="find")
    used = tried.select(use, None, values, **_QUIET).then(steer, pressed, answered, **unheard)
    stop.click(_stopper(gr, page), None, None, queue=False, cancels=[edited, steered, found, used], **_QUIET)
    reset.click(lambda: [PROMPT, *page.field_values()], None, [prompt, *values], **_QUIET)
    for table in (reasons, specimen):
        table.select(_explainer(gr, page), None, specimen, **_QUIET)


def visitor(request: Any) -> str:
    """Whose page it is."""
    return str(request.session_hash)


def counted(request: Any) -> str:
    """Whose presses are counted together: an address's, for sessions are the visitor's own to name."""
    host = request.client.host if request.client else ""
    # Behind a tunnel that does not say for whom it asks, everybody would be one.
    return visitor(request) if host in ("", *LOCAL) else host


def shown(board: ImageState) -> tuple[Any, ...]:
    """A board, and its parts in the order of the page's outputs."""
    return board, board.view, board.edits, board.reasons, board.taken


def _explore_tab(gr: Any, page: Presenter) -> None:
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=260):
            word = gr.Textbox(label="Search a word", placeholder="puppy", elem_id="search", submit_btn=True)
            concepts = components.choices("concepts", page.concepts())
        with gr.Column(scale=5, min_width=300):
            found = components.choices("found", html_parts.table("Sub-units", (), []))
            specimen = components.choices("specimen-found")

    def search(word: str) -> Any:
        return _told(lambda: page.search(word)), ""

    def pick(event: gr.EventData) -> Any:
        return (event.word, *search(event.word))

    word.submit(search, word, [found, specimen], **_QUIET)
    concepts.select(pick, None, [word, found, specimen], **_QUIET)
    for table in (found, specimen):
        table.select(_explainer(gr, page), None, specimen, **_QUIET)


def _explainer(gr: Any, page: Presenter) -> Callable[..., str]:
    """Shows the sub-unit that was chosen."""

    def explain(event: gr.EventData) -> str:
        return _told(lambda: page.specimen(event.sub_unit))

    return explain


def _stopper(gr: Any, page: Presenter) -> Callable[..., None]:
    """Ends the work of the visitor who asks for it, or who left."""

    def stop(request: gr.Request) -> None:
        page.stop(visitor(request))

    return stop


def _told(answer: Callable[[], str]) -> str:
    """HTML, or the sentence that says why not."""
    try:
        return answer()
    except EludeSteerError as error:
        return html_parts.complaint(error)


def _words(gr: Any, page: Presenter, label: str, name: str) -> Any:
    return gr.Dropdown(
        page.words, value=[], label=label, multiselect=True, allow_custom_value=True, elem_id=name, max_choices=8
    )


def _recipes(page: Presenter) -> list[tuple[str, str]]:
    """Every edit of the shipped recipes, by recipe and what it does."""
    return [
        (f"{example.recipe.name}: {edit_name(step)}", f"{number}/{index}")
        for number, example in enumerate(page.examples)
        for index, step in enumerate(example.recipe.steps)
    ]


def _settings(gr: Any, page: Presenter) -> list[Any]:
    made, values = [], dict(zip(TUNABLE, page.field_values(), strict=True))
    about = {"label": "mode", "info": HINTS["mode"], "elem_id": "set-mode"}
    made.append(gr.Radio(["place", "scale"], value=values["mode"], **about))
    for names in (TUNABLE[1:5], TUNABLE[5:]):
        with gr.Row():
            for name in names:
                kind = gr.Textbox if name == "nu" else gr.Number
                about = {"label": name, "info": HINTS[name], "elem_id": f"set-{name}"}
                made.append(kind(values[name], min_width=150, **about))
    return made
