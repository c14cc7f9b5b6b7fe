"""The demo: one page to steer a caption by words and to browse the atlas. `elude-steer demo` serves it.

Gradio draws the page; what it shows comes from `pages`, what it does from the library. Nothing is fetched from other
hosts, and every visitor has a session of their own.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elude_steer import backends, pages
from elude_steer.errors import EludeSteerError, SpecError
from elude_steer.figures import fitted
from elude_steer.images import open_image
from elude_steer.pages import SHOWN, TUNABLE, Page
from elude_steer.plans import Settings
from elude_steer.recipe import list_recipes, load_recipe
from elude_steer.steering import Steerer

GRID = {"nu": [6, 8, 10, 14], "kappa": [16, 24, 40]}
CSS = """
.gradio-container {max-width: 1320px !important; margin: 0 auto !important}
#head {display: flex; align-items: baseline; gap: .8rem; flex-wrap: wrap; margin: .2rem 0}
#head h1 {font-size: 1.35rem; margin: 0}
#head span {opacity: .75; font-size: .85rem}
.captions {font-size: 1.15rem; line-height: 1.6; padding: .4rem .2rem; min-height: 4.2rem}
.note {opacity: .8; font-size: .85rem; margin: .15rem 0}
.complaint {border-left: 4px solid #b3261e; padding: .5rem .8rem; margin: .3rem 0}
footer {display: none !important}
@media (max-width: 640px) {
  .gradio-container .row > * {min-width: 100% !important}
  #examples {overflow-x: auto}
  #editor {max-width: 100%; overflow: hidden}
}
"""


def make_app(steerer: Steerer, examples: Sequence[Path] = ()) -> Any:
    """The page of a steerer, as a Gradio app that somebody has to launch."""
    gr = backends.require("gradio", "the demo")
    page = Page(steerer, examples)
    own, atlas = page.own, steerer.atlas
    with gr.Blocks(title="elude_steer", analytics_enabled=False) as app:
        gr.HTML(
            f'<div id="head"><h1>elude_steer</h1><span>{Path(steerer.vlm.id).name or "model"} &middot; atlas '
            f"{atlas.name}: {len(atlas)} sub-units of {atlas.d_out} units</span></div>"
        )
        picture, result = gr.State(None), gr.State(None)
        with gr.Tabs():
            with gr.Tab("Steer", id="steer"):
                _steer_tab(gr, page, own, picture, result)
            with gr.Tab("Explore", id="explore"):
                _explore_tab(gr, page)
    return app


def _steer_tab(gr: Any, page: Page, own: Settings, picture: Any, result: Any) -> None:
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=300):
            gallery = gr.Gallery(
                [(str(path), path.stem) for path in page.examples],
                label="Examples",
                columns=max(5, len(page.examples)),
                rows=1,
                height=110,
                allow_preview=False,
                object_fit="contain",
                elem_id="examples",
                interactive=False,
                buttons=[],
            )
            editor = gr.ImageEditor(
                label="Picture: bring yours, or mark with the brush where the added word should be",
                type="pil",
                sources=["upload", "clipboard"],
                transforms=(),
                layers=False,
                brush=gr.Brush(default_size=28, colors=["#ffd640"], color_mode="fixed"),
                height=470,
                elem_id="editor",
                buttons=[],
            )
        with gr.Column(scale=6, min_width=300):
            with gr.Row():
                minus = _words(gr, page, "Remove", "minus")
                plus = _words(gr, page, "Add", "plus")
            press = gr.Button("Steer", variant="primary", elem_id="press")
            said = gr.HTML('<div class="captions"></div>', elem_id="said")
            maps = gr.Gallery(
                label="Where each word fires; framed: what was changed",
                columns=3,
                height=250,
                object_fit="contain",
                elem_id="maps",
                interactive=False,
                buttons=[],
            )
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        with gr.Row():
            values = _settings(gr, own)
        with gr.Row():
            reset = gr.Button("Reset", size="sm", elem_id="reset")
            tune = gr.Button("Find good settings", size="sm", elem_id="tune")
            stop = gr.Button("Stop", size="sm", elem_id="stop")
        tried = gr.Dataframe(
            headers=["nu", "kappa", "kept", "caption"],
            label="Tried, best first; choose a row to use it",
            interactive=False,
            elem_id="tried",
        )
    with gr.Accordion("Why", open=False, elem_id="why"):
        reasons = gr.Dataframe(
            headers=["word", "label", "similarity", "score", "unit", "sub-unit"],
            label="The sub-units that were changed; choose one to see what it fires for",
            interactive=False,
            elem_id="reasons",
        )
        specimens = _specimens(gr)
    with gr.Accordion("Recipe and Python", open=False, elem_id="recipe"):
        with gr.Row():
            shipped = gr.Dropdown([r.name for r in list_recipes() if r.kind == "steering"], label="Load a recipe")
            given = gr.File(label="… or a file", file_types=[".yaml", ".yml"], height=90)
        code = gr.Code(label="The Python call that does the same", language="python", elem_id="call")
        save = gr.DownloadButton("Save as a recipe", elem_id="save")

    def choose(event: gr.SelectData) -> Any:
        image = open_image(page.examples[event.index])
        return image, {"background": fitted(image, SHOWN), "layers": [], "composite": None}

    def bring(painted: Any) -> Any:
        if painted is None or painted.get("background") is None:
            return None, painted, ""
        try:
            image = page.take(painted["background"])
        except EludeSteerError as error:
            return None, None, pages.complaint(error)
        return image, {"background": fitted(image, SHOWN), "layers": [], "composite": None}, ""

    def steer(image: Any, painted: Any, minus: list[str], plus: list[str], *values: Any) -> Any:
        try:
            answer = page.steer(image, painted, minus or [], plus or [], *values)
        except EludeSteerError as error:
            return None, pages.complaint(error), [], [], "", None
        settings = page.settings(values)
        names = (None, minus or [], plus or [], settings, page.steerer.atlas.name)
        return (
            answer,
            pages.captions(answer),
            page.maps(answer),
            pages.matches(answer.plan),
            pages.python_call(*names),
            _file(pages.recipe_text(*names)),
        )

    def find(image: Any, minus: list[str], plus: list[str], progress: Any = gr.Progress()) -> Any:  # noqa: B008
        try:
            if not minus:
                raise SpecError("say what should go: settings are judged by whether it does.")
            progress(0.1, desc="captions under every setting")
            tuned = page.steerer.tune(page.take(image), minus=minus[0], plus=plus[0] if plus else None, grid=GRID)
        except EludeSteerError as error:
            return [], pages.complaint(error)
        return [[row["nu"], row["kappa"], round(row["kept"], 2), row["caption"]] for row in tuned.rows], gr.skip()

    def use(rows: Any, event: gr.SelectData) -> Any:
        row = rows.iloc[event.index[0]]
        return str(row["nu"]), int(row["kappa"])

    def load(recipe: Any) -> Any:
        step = recipe.steps[0]
        settings = {name: value for name, value in vars(step.settings).items() if value is not None}
        now = vars(page.own) | settings
        image = open_image(recipe.image) if recipe.image else None
        shown = {"background": fitted(image, SHOWN), "layers": [], "composite": None} if image else gr.skip()
        fields = [str(now[name]) if name == "nu" else now[name] for name in TUNABLE]
        return [image or gr.skip(), shown, list(step.minus), list(step.plus), "", *fields]

    def loaded(read: Any) -> Any:
        try:
            return load(read())
        except EludeSteerError as error:
            return [gr.skip()] * 4 + [pages.complaint(error)] + [gr.skip()] * len(TUNABLE)

    gallery.select(choose, None, [picture, editor], show_progress="hidden")
    editor.upload(bring, editor, [picture, editor, said], show_progress="hidden")
    pressed = [picture, editor, minus, plus, *values]
    shown = [result, said, maps, reasons, code, save]
    steering = press.click(steer, pressed, shown, concurrency_limit=2, concurrency_id="model")
    finding = tune.click(find, [picture, minus, plus], [tried, said], concurrency_limit=2, concurrency_id="model")
    stop.click(None, cancels=[finding, steering])
    tried.select(use, tried, [values[TUNABLE.index("nu")], values[TUNABLE.index("kappa")]])
    reset.click(lambda: [str(own.nu) if n == "nu" else getattr(own, n) for n in TUNABLE], None, values)
    _on_choice(gr, page, reasons, specimens)
    filled = [picture, editor, minus, plus, said, *values]
    shipped.input(lambda name: loaded(lambda: load_recipe(name)), shipped, filled)
    given.upload(lambda path: loaded(lambda: pages.read_recipe(Path(path).read_text("utf-8"))), given, filled)


def _explore_tab(gr: Any, page: Page) -> None:
    labels = page.steerer.atlas.named()
    with gr.Row():
        with gr.Column(scale=2, min_width=260):
            wanted = gr.Textbox(label="Search a word", placeholder="puppy", elem_id="search")
            counts = gr.Dataframe(
                [[word, count] for word, count in labels.counts.items()],
                headers=["concept", "sub-units"],
                label="All concepts",
                interactive=False,
                max_height=420,
                elem_id="concepts",
            )
        with gr.Column(scale=5, min_width=300):
            problem = gr.HTML(elem_id="problem")
            rows = gr.Dataframe(
                headers=["label", "similarity", "score", "unit", "sub-unit"],
                label="Sub-units; choose one to see what it fires for",
                interactive=False,
                max_height=260,
                elem_id="found",
            )
            specimens = _specimens(gr)

    def search(word: str) -> Any:
        try:
            atlas = page.steerer.atlas
            return pages.found(labels.search(page.steerer.matcher, word, atlas.units.numpy(), limit=24, by="score")), ""
        except EludeSteerError as error:
            return [], pages.complaint(error)

    def pick(table: Any, event: gr.SelectData) -> Any:
        word = str(table.iloc[event.index[0]]["concept"])
        return (word, *search(word))

    wanted.submit(search, wanted, [rows, problem], show_progress="hidden")
    counts.select(pick, counts, [wanted, rows, problem], show_progress="hidden")
    _on_choice(gr, page, rows, specimens)


def _words(gr: Any, page: Page, label: str, name: str) -> Any:
    return gr.Dropdown(page.words, label=label, multiselect=True, allow_custom_value=True, elem_id=name, max_choices=8)


def _settings(gr: Any, own: Settings) -> list[Any]:
    made = []
    for name in TUNABLE:
        value, info = getattr(own, name), pages.HINTS[name]
        if name == "mode":
            made.append(gr.Radio(["place", "scale"], value=value, label=name, info=info, elem_id=f"set-{name}"))
        elif name == "nu":
            made.append(gr.Textbox(str(value), label=name, info=info + "; or all", elem_id=f"set-{name}"))
        else:
            made.append(gr.Number(value, label=name, info=info, elem_id=f"set-{name}"))
    return made


def _specimens(gr: Any) -> tuple[Any, Any]:
    with gr.Row():
        part = gr.Gallery(
            label="The sub-unit", columns=8, height=150, interactive=False, buttons=[], elem_classes="part"
        )
        whole = gr.Gallery(label="Its unit, before the split", columns=8, height=150, interactive=False, buttons=[])
    return part, whole


def _on_choice(gr: Any, page: Page, table: Any, galleries: tuple[Any, Any]) -> None:
    def choose(rows: Any, event: gr.SelectData) -> Any:
        row = rows.iloc[event.index[0]]
        sub_unit, unit = int(row["sub-unit"]), int(row["unit"])
        return page.specimens.of_sub_unit(sub_unit), page.specimens.of_unit(unit)

    table.select(choose, table, list(galleries), show_progress="hidden")


def _file(text: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="steering-", delete=False, encoding="utf-8") as file:
        file.write(text)
    return file.name


def serve(
    steerer: Steerer,
    *,
    examples: Sequence[Path] = (),
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    auth: tuple[str, str] | None = None,
    browse: bool = True,
    wait: bool = True,
    told: Callable[[str], object] | None = None,
) -> Any:
    """Serves the page.

    Args:
        steerer: what it steers.
        examples: pictures to choose from.
        host: who may see it; by default this machine alone.
        port: by default the first that is free from 7860 on.
        share: a public address through Gradio's servers, only where it is wished for.
        auth: a name and a password that visitors have to give.
        browse: whether a browser opens.
        wait: whether the call lasts as long as the page.
        told: told the page's address.
    """
    app = make_app(steerer, examples)
    # A few at a time; who comes when many wait is told so. Public pages take smaller files.
    app.queue(max_size=16 if share else 64, default_concurrency_limit=4)
    _, address, public = app.launch(
        server_name=host,
        server_port=port,
        share=share,
        auth=auth,
        inbrowser=browse,
        prevent_thread_lock=True,
        max_file_size="5mb" if share else "50mb",
        css=CSS,
        allowed_paths=[str(path.parent) for path in examples],
        quiet=True,
        ssr_mode=False,
        show_error=True,
    )
    if told is not None:
        told(public or address)
    if wait:
        app.block_thread()
    return app
