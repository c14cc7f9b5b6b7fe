"""Serves the demo: who can reach the page, and the limits for strangers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.manifest import list_atlases
from elude_steer.demo import components
from elude_steer.demo.access import LOCAL_HOSTS, check_mcp
from elude_steer.demo.app import make_app
from elude_steer.demo.presenter import WORKERS, Decorator, Presenter
from elude_steer.demo.rate_limit import LIGHT, BoundedRequests, RateLimit
from elude_steer.demo.recipes import Example, shipped_examples
from elude_steer.errors import SpecError
from elude_steer.steering.steerer import Steerer
from elude_steer.utils import optional


def serve(
    steerer: Steerer[Atlas] | Sequence[Steerer[Atlas]],
    *,
    examples: Sequence[Example] | None = None,
    host: str | None = None,
    port: int | None = None,
    share: bool = False,
    auth: tuple[str, str] | None = None,
    browse: bool = True,
    wait: bool = True,
    mcp: bool = False,
    images: Any = None,
    gpu: Decorator | None = None,
    on_ready: Callable[[str], object] | None = None,
) -> Any:
    """Serve the page and return its Gradio app.

    Args:
        steerer: the model and the atlas; or several, each of which gets a page. The first is at the address itself.
        examples: images with recipes to choose from; by default the shipped recipes for the atlas. Only for one atlas.
        host: the address to listen on; by default GRADIO_SERVER_NAME, or else this machine only. If other machines can
            reach it, uploads are limited to 5 MB and visitors to 20 requests a minute.
        port: by default the first free one from 7860 on.
        share: whether to open a public address through Gradio's servers, with the same limits.
        auth: a name and a password that visitors must enter.
        browse: whether to open a browser.
        wait: whether to block until the page is closed.
        mcp: whether the functions of `api` are also tools of an MCP server, at `gradio_api/mcp/` of the page.
        images: the probing images of the atlas, which are shown for a sub-unit where the atlas has no thumbnails; by
            default those that its spec names, if it was built on this machine. Only for one atlas.
        gpu: decorates the functions that run the model, such as `spaces.GPU`.
        on_ready: called with the address of the page.
    """
    gr = optional.require("gradio", "the demo")
    check_mcp(mcp, auth)
    host = host or os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
    _check_host(host)  # with a wrong address Gradio would wait forever
    public = share or host not in LOCAL_HOSTS
    presenters = _make_presenters(steerer, examples, public, gpu)
    if images is not None:
        if len(presenters) > 1:
            raise SpecError("images are those of one atlas; serve one, or leave them out.")
        presenters[0].reference_images = replace(presenters[0].reference_images, source=images)
    rate_limit = RateLimit(20, 120) if public else None
    app = make_app(*presenters, rate_limit=rate_limit)
    # Few requests run at a time; when the queue is full, Gradio tells the visitor.
    app.queue(max_size=16 if public else 64, default_concurrency_limit=4)
    try:
        _, address, shared = app.launch(
            server_name=host,
            server_port=port,
            share=share,
            auth=auth,
            inbrowser=browse,
            prevent_thread_lock=True,
            max_file_size=presenters[0].max_bytes,
            css=components.read_asset("style.css"),
            theme=gr.themes.Base(  # system fonts only: any other would be loaded from another host
                primary_hue="indigo",
                neutral_hue="slate",
                font=["system-ui", "sans-serif"],
                font_mono=["ui-monospace", "monospace"],
            ).set(body_text_color_subdued="*neutral_600"),  # Gradio's own is too light to read on white
            quiet=True,
            ssr_mode=False,
            show_error=True,
            app_kwargs={"middleware": [_bound_requests(rate_limit, presenters[0].max_bytes)]},
            mcp_server=mcp,
            run_history=False,  # store nothing of what visitors do
        )
    except OSError as error:  # Gradio raises it for a port or an address that it cannot use
        what = f"port {port} of {host} is" if port else f"all ports of {host} from 7860 on are"
        raise SpecError(f"{what} in use or not permitted; choose another --port.") from error
    if app.mcp_error:  # Gradio goes on without
        app.close()
        raise SpecError(f"the page is served, but not as an MCP server ({app.mcp_error}); leave out --mcp.")
    if gpu is None:  # one that is lent for each request is not there before the first
        threading.Thread(target=_warm_up, args=(presenters,), daemon=True).start()
    if on_ready is not None:
        on_ready(shared or address)
    if wait:
        app.block_thread()
    return app


def _bound_requests(rate_limit: RateLimit | None, max_bytes: int) -> Any:
    """The middleware that paces uploads, and bounds requests: an image in base64, with its words."""
    from starlette.middleware import Middleware

    uploads = rate_limit and rate_limit.scaled(LIGHT)
    return Middleware(BoundedRequests, uploads=uploads, max_body=max_bytes * 3 // 2 + 2**20)


def _make_presenters(
    steerer: Steerer[Atlas] | Sequence[Steerer[Atlas]],
    examples: Sequence[Example] | None,
    public: bool,
    gpu: Decorator | None,
) -> list[Presenter]:
    """A presenter for each steerer. Together they run as many requests at a time as one alone."""
    if isinstance(steerer, Steerer):
        examples = shipped_examples(steerer.atlas.name) if examples is None else examples
        return [Presenter(steerer, examples, public=public, gpu=gpu)]
    if not steerer or examples is not None:
        raise SpecError("serve needs a steerer, or several without examples: serve([one, two]).")
    if len(steerer) == 1:
        return _make_presenters(steerer[0], None, public, gpu)
    workers = ThreadPoolExecutor(WORKERS)
    return [
        Presenter(
            one, shipped_examples(one.atlas.name), public=public, gpu=gpu, name=_listed_name(one.atlas), workers=workers
        )
        for one in steerer
    ]


def _listed_name(atlas: Atlas) -> str:
    """What `elude-steer atlases list` calls an atlas: a copy is listed by its folder. Others have their own name."""
    own = atlas.folder and atlas.folder.resolve()
    return next((name for name, folder in list_atlases() if folder.resolve() == own), atlas.name)


def _warm_up(presenters: Sequence[Presenter]) -> None:
    """Warm up one model after the other, so that one worker stays free for visitors."""
    for presenter in presenters:
        presenter.run_in_worker(presenter.warm_up)


def _check_host(host: str) -> None:
    """Raise if an address does not belong to this machine."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise SpecError(f"'{host}' is not an address of this machine; choose another --host.") from error
