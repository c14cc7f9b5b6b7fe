"""Calls handlers of the page as a client could, and prints what it is told, as JSON."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import gradio

from elude_steer import Steerer
from elude_steer.demo.app import make_app
from elude_steer.demo.presenter import Presenter
from elude_steer.demo.rate_limit import RateLimit
from elude_steer.demo.session import ImageState


def request_from(host):
    return SimpleNamespace(client=SimpleNamespace(host=host), session_hash="visitor")


def main():
    """Send what no page sends, and more than a visitor may."""
    app = make_app(Presenter(Steerer.load("toyland")), rate_limit=RateLimit(1, 100))
    handlers = {block.fn.__name__: block.fn for block in app.fns.values() if block.fn}
    strange = {
        "choose_shipped": (request_from("::1"), "no/number"),
        "choose_example": (SimpleNamespace(example="../../etc"), request_from("::1"), ImageState(), *[None] * 12),
        "put_instead": (SimpleNamespace(),),
        "use_dose": (SimpleNamespace(),),
    }
    errors = {}
    for name, arguments in strange.items():
        try:
            handlers[name](*arguments)
        except gradio.Error as error:
            errors[name] = error.message
    with tempfile.TemporaryDirectory() as folder:
        path, rest = Path(folder) / "x.yaml", (ImageState(), "", "")
        path.write_text("[")
        recipes = [handlers["load_recipe_file"](request_from("203.0.113.5"), path, *rest)[5] for _ in range(4)]
        uploads = [
            handlers["upload_image"](request_from(host), path.with_name("none.png"), *rest)[5]
            for host in ("203.0.113.5", "203.0.113.6")
        ]
    print(json.dumps({"errors": errors, "recipes": recipes, "upload": uploads[0], "other visitor": uploads[1]}))


if __name__ == "__main__":
    main()
