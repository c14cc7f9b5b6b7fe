"""The page of `elude-steer demo`: one tab to steer captions by concepts, one to browse the atlas.

This module lays out the page in Gradio and connects its events; `presenter` computes what they answer. The page loads
nothing from other hosts, and every visitor has a separate session. Several atlases have a page each: the browser loads
one at a time, so that all of them use the same element ids and scripts.
"""

import html
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from elude_steer.demo import api, components, html_parts
from elude_steer.demo.access import hide_folders, rate_limit_key, visitor_id
from elude_steer.demo.pages import Page, make_pages, page_links
from elude_steer.demo.presenter import HINTS, TUNABLE, WORKERS, Presenter
from elude_steer.demo.rate_limit import LIGHT, RateLimit
from elude_steer.demo.recipes import describe_ignored, describe_removed, edit_name, read_recipe
from elude_steer.demo.session import MAX_WORDS, EditRequest, ImageState
from elude_steer.errors import EludeSteerError, StoppedError
from elude_steer.models.vlm import PROMPT
from elude_steer.utils import optional

FIRST_HINT = "Click a word of the caption, or name a concept to remove or to add, and press Steer."
UNEXPECTED = "This did not work, for a reason that the page did not expect; its server's log says more."
_INTERNAL: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
_UNDOCUMENTED = {"api_visibility": "undocumented"}  # callable, but no tools: they work on the state of a visitor
# Runs in the browser before a request is sent: puts the marked region among the inputs.
# Runs in the browser only: tells the page what its fields hold.
_SHOW_FIELDS = "(...fields) => { window.eludeSteerFields(...fields); return []; }"
_ADD_MARK = "(state, mark, ...rest) => [state, window.eludeSteerMark(), ...rest]"


def make_app(*presenters: Presenter, rate_limit: RateLimit | None = None) -> Any:
    """Build the page as a Gradio app; `serve` launches it.

    Args:
        presenters: answer the requests, each of the page of one atlas.
        rate_limit: bounds how often visitors may run the models; by default there is no limit.
    """
    gr = optional.require("gradio", "the demo")
    pages = make_pages(presenters, reserved=gr.routes.INTERNAL_ROUTES)
    # Uploaded files are deleted after an hour; images in use are in memory by then.
    with gr.Blocks(title="elude_steer", analytics_enabled=False, delete_cache=(600, 3600)) as app:
        _fill_page(gr, app, pages, pages[0], rate_limit)
        app.unload(_make_stop(gr, *presenters))
        api.add_functions(gr, app, pages, rate_limit)
    for page in pages[1:]:
        with app.route(page.name, page.path):
            _fill_page(gr, app, pages, page, rate_limit)
    for function in app.fns.values():
        if function.fn is not None:
            function.fn = _hide_errors(gr, function.fn)
    return app


def _hide_errors(gr: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler whose unexpected errors, which may tell of this machine, go to its log and not to the page."""

    @wraps(handler)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return handler(*args, **kwargs)
        except gr.Error:
            raise
        except EludeSteerError as error:
            raise gr.Error(hide_folders(str(error)), print_exception=False) from error
        except Exception as error:
            traceback.print_exc()
            raise gr.Error(UNEXPECTED, print_exception=False) from error

    return run


def _fill_page(gr: Any, app: Any, pages: Sequence[Page], page: Page, rate_limit: RateLimit | None) -> None:
    presenter, links = page.presenter, page_links(pages, page)
    atlas, model = presenter.steerer.atlas, Path(presenter.steerer.vlm.id).name or "model"
    about = f"{model} · atlas {page.name}: {len(atlas):,} sub-units of {atlas.d_out} units"
    components.static_html(
        "head",
        f"<h1>elude_steer</h1><p>Name a concept, change what the model says.</p>{links}"
        f'<p class="about">{html.escape(about)}</p>',
    )
    with gr.Tabs():
        with gr.Tab("Steer", id="steer"):
            _steer_tab(gr, app, page, rate_limit)
        with gr.Tab("Explore", id="explore"):
            _explore_tab(gr, presenter)


def _steer_tab(gr: Any, app: Any, page: Page, rate_limit: RateLimit | None) -> None:
    presenter, light_limit = page.presenter, rate_limit and rate_limit.scaled(LIGHT)
    first = presenter.open_example(0) if presenter.examples else ImageState()
    state = gr.State(first)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=300):
            with gr.Row(equal_height=True):
                examples = components.clickable_html("examples", presenter.example_buttons())
                upload = gr.UploadButton("Upload an image", size="sm", elem_id="bring", scale=0, min_width=110)
            viewer = components.image_viewer("easel", first.view)
        with gr.Column(scale=6, min_width=300):
            plain = components.clickable_html("plain", presenter.show_caption(first.image))
            answer = components.static_html("said", html_parts.hint(FIRST_HINT))
            with gr.Row():
                minus = _concept_field(gr, presenter, "Remove", "minus")
                plus = _concept_field(gr, presenter, "Add", "plus")
            swaps = components.clickable_html("swaps")
            edits = components.clickable_html("edits", first.edit_buttons)
            strength = _strength_slider(gr, presenter)
            with gr.Row():
                steer_button = gr.Button("Steer", variant="primary", elem_id="press", scale=6, min_width=90)
                dose_button = gr.Button("Dose curve", elem_id="dose", scale=2, min_width=110)
                stop_button = gr.Button("Stop", elem_id="stop", scale=1, min_width=64)
            doses = components.clickable_html("doses")
            with gr.Accordion("Settings", open=False, elem_id="settings"):
                values = [strength, *_setting_fields(gr, presenter)]
                prompt = gr.Textbox(PROMPT, label="question", info="what the model is asked", elem_id="set-prompt")
                with gr.Row():
                    reset = gr.Button("Reset", size="sm", elem_id="reset")
                    tune = gr.Button("Find good settings", size="sm", elem_id="tune")
                trials = components.clickable_html("tried")
            with gr.Accordion("Why", open=False, elem_id="why"):
                sub_units = components.clickable_html("reasons", first.sub_units)
                details = components.clickable_html("specimen")
            with gr.Accordion("Recipe and Python", open=False, elem_id="recipe"):
                export = components.clickable_html("taken", first.export)
                with gr.Row():
                    shipped = gr.Dropdown(
                        _edit_choices(presenter), value=None, label="Load a recipe", elem_id="shipped"
                    )
                    recipe_file = gr.UploadButton(
                        "… or a file", size="sm", elem_id="given", file_types=[".yaml", ".yml"]
                    )
    follow = components.page_state("follow")
    mark = gr.Textbox(visible=False)  # a placeholder that _ADD_MARK fills in the browser
    fields = [minus, plus, prompt, *values]

    def make_request(state: ImageState, mark: Any, minus: Any, plus: Any, prompt: Any, *values: Any) -> EditRequest:
        settings = presenter.read_settings(values)
        return EditRequest(
            state.image, mark, tuple(minus or ()), tuple(plus or ()), str(prompt or "").strip(), settings
        )

    def choose_example(event: gr.EventData, request: gr.Request, state: ImageState, *fields: Any) -> Any:
        stop_all(request)
        return show_new_image(state, presenter.open_example(event.example), fields)

    def upload_image(request: gr.Request, path: Any, state: ImageState, trials: str, details: str, *fields: Any) -> Any:
        try:
            if light_limit:
                light_limit.check(rate_limit_key(request))
            new = presenter.run_beside(lambda: presenter.open_upload(path))
        except EludeSteerError as error:
            return *state_outputs(state), html_parts.error_message(error), trials, details, *fields
        stop_all(request)
        return show_new_image(state, new, fields)

    def stop_all(request: Any) -> None:
        for visitor in (visitor_id(request), _reader_id(request)):
            presenter.stop(visitor, "")

    def describe(request: gr.Request, state: ImageState) -> Any:
        """Caption the image without edits. Those of examples are known soon, and so do not count for the limit."""
        image = state.image
        if image is None or presenter.is_captioned(image):
            return presenter.show_caption(image)
        try:
            if rate_limit and not presenter.is_example(image):
                rate_limit.check(rate_limit_key(request))
            with presenter.stoppable(_reader_id(request)):
                caption = presenter.run_in_worker(lambda: presenter.caption(image))
        except StoppedError:  # the page shows another image by now
            return gr.skip()
        except EludeSteerError as error:
            return html_parts.error_message(error)
        return presenter.render_caption(caption)

    def show_new_image(old: ImageState, new: ImageState, fields: Sequence[Any]) -> Any:
        hint = html_parts.hint(FIRST_HINT)
        return *state_outputs(new), hint, "", "", *fields[:2], *presenter.fields_for_next_image(old, fields[2:])

    def steer_image(request: gr.Request, progress: Any = gr.Progress(), *inputs: Any) -> Any:  # noqa: B008
        try:
            edit = make_request(*inputs)
            with start_request(request, progress):
                state, result = presenter.run_in_worker(lambda: presenter.answer(inputs[0], edit))
        except StoppedError as reason:  # the page may show another image by now: leave it as it is
            return [gr.skip()] * 5 + [html_parts.hint(str(reason)) if str(reason) else gr.skip()]
        except EludeSteerError as error:
            return *state_outputs(inputs[0]), html_parts.error_message(error)
        other_question = edit.prompt not in ("", PROMPT)  # then the page shows the answer to another one
        return *state_outputs(state), html_parts.captions(result, with_baseline=other_question)

    def find_settings(request: gr.Request, progress: Any = gr.Progress(), *inputs: Any) -> Any:  # noqa: B008
        try:
            edit = make_request(*inputs)
            with start_request(request, progress):
                return presenter.trials_table(presenter.run_in_worker(lambda: presenter.find_settings(edit)))
        except StoppedError as reason:
            return html_parts.hint(str(reason)) if str(reason) else gr.skip()
        except EludeSteerError as error:
            return html_parts.error_message(error)

    def try_doses(request: gr.Request, progress: Any = gr.Progress(), *inputs: Any) -> Any:  # noqa: B008
        try:
            edit = make_request(*inputs)
            with start_request(request, progress):
                return presenter.dose_table(edit, presenter.run_in_worker(lambda: presenter.try_doses(edit)))
        except StoppedError as reason:
            return html_parts.hint(str(reason)) if str(reason) else gr.skip()
        except EludeSteerError as error:
            return html_parts.error_message(error)

    def start_request(request: Any, progress: Any) -> Any:
        if rate_limit:
            rate_limit.check(rate_limit_key(request))
        return presenter.stoppable(visitor_id(request), lambda count: progress((count, 64), unit="tokens"))

    def use_trial(event: gr.EventData) -> Any:
        return presenter.field_values({name: event._data[name] for name in TUNABLE if name in event._data})

    def use_dose(event: gr.EventData) -> Any:
        return event.strength

    def remove_word(event: gr.EventData) -> Any:
        return [event.word], []

    def put_instead(event: gr.EventData) -> Any:
        return [event.instead]

    def offer_swaps(minus: Any) -> Any:
        return _html_or_error(lambda: presenter.swap_buttons(minus or ()))

    def fill_in(state: ImageState, recipe: Any, step: int, note: str = "") -> Any:
        edit = recipe.steps[step]
        hint = html_parts.hint(note or f"{edit_name(edit)}: press Steer.")
        loaded = (recipe.prompt, *presenter.field_values(vars(edit.settings)))
        outputs = state_outputs(replace(state, loaded_fields=loaded))
        return *outputs, hint, "", "", list(edit.minus), list(edit.plus), *loaded

    def choose_edit(request: gr.Request, event: gr.EventData) -> Any:
        stop_all(request)
        recipe = presenter.examples[event.example].recipe
        return fill_in(presenter.open_example(event.example, event.step), recipe, event.step)

    def choose_shipped(request: gr.Request, chosen: str) -> Any:
        stop_all(request)
        number, step = map(int, chosen.split("/"))
        return fill_in(presenter.open_example(number, step), presenter.examples[number].recipe, step)

    def load_recipe_file(
        request: gr.Request, path: Any, state: ImageState, trials: str, details: str, *fields: Any
    ) -> Any:
        try:
            if light_limit:
                light_limit.check(rate_limit_key(request))
            recipe = read_recipe(path)
        except EludeSteerError as error:
            return *state_outputs(state), html_parts.error_message(error), trials, details, *fields
        notes = [f"Loaded the first of {len(recipe.steps)} edits."] if len(recipe.steps) > 1 else []
        notes += describe_removed(path)
        notes += describe_ignored(recipe, TUNABLE, presenter.atlas_settings, presenter.name, presenter.max_strength)
        notes += ["The edit has a region: mark it."] if recipe.steps[0].region else []
        return fill_in(state, recipe, 0, " ".join([*notes, "Upload its image, and press Steer."]))

    # Handlers return every value, changed or not: each `gr.skip` makes Gradio create components that it never frees.
    inputs, answer_outputs = [state, mark, *fields], [state, viewer, edits, sub_units, export, answer]
    heavy = {"concurrency_limit": WORKERS, "concurrency_id": "model"}  # of all pages together
    heavy |= {"js": _ADD_MARK, "show_progress_on": [answer]}
    heavy |= {"trigger_mode": "multiple"}  # the latest request counts and stops the one before it
    heavy_internal = {**heavy, "api_visibility": "private"}
    all_outputs = [*answer_outputs, trials, details, *fields]
    names = ("press", "bring", "find_settings", "dose")
    press, bring, find, dose = (f"{name}{page.suffix}" for name in names)
    steered = steer_button.click(steer_image, inputs, answer_outputs, **heavy, api_name=press, **_UNDOCUMENTED)
    chosen = [examples.select(choose_example, [state, *fields], all_outputs, **_INTERNAL)]
    upload_inputs = [upload, state, trials, details, *fields]
    uploaded = upload.upload(
        upload_image, upload_inputs, all_outputs, show_progress="hidden", api_name=bring, **_UNDOCUMENTED
    )
    picked = edits.select(choose_edit, None, all_outputs, **_INTERNAL)
    chosen += [uploaded, picked, shipped.input(choose_shipped, shipped, all_outputs, **_INTERNAL)]
    edited = picked.then(steer_image, inputs, answer_outputs, **heavy_internal)
    read = {"concurrency_limit": WORKERS, "concurrency_id": "model", "trigger_mode": "multiple"}
    read |= {"show_progress_on": [plain], "api_visibility": "private"}
    app.load(describe, state, plain, **read)
    shown = [
        event.then(lambda state: presenter.show_caption(state.image), state, plain, **_INTERNAL) for event in chosen
    ]
    described = [event.then(describe, state, plain, **read) for event in shown]
    removed = plain.select(remove_word, None, [minus, plus], **_INTERNAL)
    swapped = swaps.select(put_instead, None, plus, **_INTERNAL)
    clicked = [event.then(steer_image, inputs, answer_outputs, **heavy_internal) for event in (removed, swapped)]
    clicked.append(follow.select(steer_image, inputs, answer_outputs, **heavy_internal))  # the strength moved
    minus.change(offer_swaps, minus, swaps, **_INTERNAL)
    marked = [minus, plus, strength]
    for listen in (app.load, *(field.change for field in marked)):
        listen(None, marked, None, js=_SHOW_FIELDS, **_INTERNAL)
    for event in (*chosen, minus.change, plus.change):  # a dose curve belongs to one image and one edit
        (event.then if hasattr(event, "then") else event)(lambda: "", None, doses, **_INTERNAL)
    recipe_file.upload(load_recipe_file, [recipe_file, state, trials, details, *fields], all_outputs, **_INTERNAL)
    heavy |= {"show_progress_on": [trials]}
    tuned = tune.click(find_settings, inputs, trials, **heavy, api_name=find, **_UNDOCUMENTED)
    used = trials.select(use_trial, None, values, **_INTERNAL).then(
        steer_image, inputs, answer_outputs, **heavy_internal
    )
    heavy |= {"show_progress_on": [doses]}
    dosed = dose_button.click(try_doses, inputs, doses, **heavy, api_name=dose, **_UNDOCUMENTED)
    redosed = doses.select(use_dose, None, strength, **_INTERNAL).then(
        steer_image, inputs, answer_outputs, **heavy_internal
    )
    stop = _make_stop(gr, presenter)
    waiting = [edited, steered, tuned, used, dosed, redosed, *clicked, *described]
    stop_button.click(stop, None, None, queue=False, cancels=waiting, **_INTERNAL)
    reset.click(lambda: [PROMPT, *presenter.field_values()], None, [prompt, *values], **_INTERNAL)
    for table in (sub_units, details):
        table.select(_make_show_details(gr, presenter), None, details, **_INTERNAL)


def state_outputs(state: ImageState) -> tuple[Any, ...]:
    """A state and its parts, in the order of the page's outputs."""
    return state, state.view, state.edit_buttons, state.sub_units, state.export


def _explore_tab(gr: Any, presenter: Presenter) -> None:
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=260):
            word = gr.Textbox(label="Search for a concept", placeholder="puppy", elem_id="search", submit_btn=True)
            concepts = components.clickable_html("concepts", presenter.concept_table())
        with gr.Column(scale=5, min_width=300):
            found = components.clickable_html("found", html_parts.table("Sub-units", (), []))
            details = components.clickable_html("specimen-found")

    def search(word: str) -> Any:
        return _html_or_error(lambda: presenter.search(word)), ""

    def choose_concept(event: gr.EventData) -> Any:
        return (event.word, *search(event.word))

    word.submit(search, word, [found, details], **_INTERNAL)
    concepts.select(choose_concept, None, [word, found, details], **_INTERNAL)
    for table in (found, details):
        table.select(_make_show_details(gr, presenter), None, details, **_INTERNAL)


def _make_show_details(gr: Any, presenter: Presenter) -> Callable[..., str]:
    """The handler that shows the clicked sub-unit."""

    def show_details(event: gr.EventData) -> str:
        return _html_or_error(lambda: presenter.sub_unit_details(event.sub_unit))

    return show_details


def _make_stop(gr: Any, *presenters: Presenter) -> Callable[..., None]:
    """The handler that stops the request of a visitor who pressed Stop or left."""

    def stop(request: gr.Request) -> None:
        for presenter in presenters:
            presenter.stop(visitor_id(request))
            presenter.stop(_reader_id(request))

    return stop


def _reader_id(request: Any) -> str:
    """The visitor as one whose image is captioned without edits, which may go on beside an edit."""
    return f"{visitor_id(request)} reads"


def _html_or_error(make_html: Callable[[], str]) -> str:
    try:
        return make_html()
    except EludeSteerError as error:
        return html_parts.error_message(error)


def _concept_field(gr: Any, presenter: Presenter, label: str, element_id: str) -> Any:
    options: dict[str, Any] = {"multiselect": True, "allow_custom_value": True, "max_choices": MAX_WORDS}
    return gr.Dropdown(presenter.concepts, value=[], label=label, elem_id=element_id, **options)


def _edit_choices(presenter: Presenter) -> list[tuple[str, str]]:
    """Every edit of the shipped recipes: what the list shows, and `EXAMPLE/STEP`."""
    return [
        (f"{example.recipe.name}: {edit_name(step)}", f"{number}/{index}")
        for number, example in enumerate(presenter.examples)
        for index, step in enumerate(example.recipe.steps)
    ]


def _strength_slider(gr: Any, presenter: Presenter) -> Any:
    about = {"label": "Strength", "info": HINTS["strength"], "elem_id": "set-strength"}
    return gr.Slider(0, presenter.max_strength, presenter.field_values()[0], step=0.1, **about)


def _setting_fields(gr: Any, presenter: Presenter) -> list[Any]:
    """The fields of all settings but the strength, in the order of `TUNABLE`."""
    fields, values = [], dict(zip(TUNABLE, presenter.field_values(), strict=True))
    about = {"label": "mode", "info": HINTS["mode"], "elem_id": "set-mode"}
    fields.append(gr.Radio(["place", "scale"], value=values["mode"], **about))
    for names in (("fit", "seen"), ("gamma", "alpha", "kappa", "nu")):
        with gr.Row():
            for name in names:
                kind = gr.Textbox if name == "nu" else gr.Number
                about = {"label": name, "info": HINTS[name], "elem_id": f"set-{name}"}
                fields.append(kind(values[name], min_width=150, **about))
    return fields
