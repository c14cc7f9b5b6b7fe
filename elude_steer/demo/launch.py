"""Serving the demo: who may see it, and what strangers may do."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from elude_steer.demo import components
from elude_steer.demo.app import LOCAL, make_app
from elude_steer.demo.presenter import Presenter
from elude_steer.demo.session import Example, RateLimit, shipped_examples
from elude_steer.errors import SpecError
from elude_steer.steering.steerer import Steerer
from elude_steer.utils import optional


def serve(
    steerer: Steerer,
    *,
    examples: Sequence[Example] | None = None,
    host: str | None = None,
    port: int | None = None,
    share: bool = False,
    auth: tuple[str, str] | None = None,
    browse: bool = True,
    wait: bool = True,
    on_ready: Callable[[str], object] | None = None,
) -> Any:
    """Serves the page.

    Args:
        steerer: what it steers.
        examples: pictures to choose from; by default those of the shipped recipes for the atlas.
        host: who may see it; by default what GRADIO_SERVER_NAME says, or else this machine alone. Where others may,
            files are held to 5 MB and a visitor to 20 presses a minute.
        port: by default the first that is free from 7860 on.
        share: a public address through Gradio's servers, with the same limits.
        auth: a name and a password that visitors have to give.
        browse: whether a browser opens.
        wait: whether the call lasts as long as the page.
        on_ready: called with the address of the page.
    """
    gr = optional.require("gradio", "the demo")
    host = host or os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
    _check_host(host)  # Gradio would wait for it for ever
    public = share or host not in LOCAL
    page = Presenter(steerer, shipped_examples(steerer.atlas.name) if examples is None else examples, public=public)
    app = make_app(page, rate_limit=RateLimit(20, 120) if public else None)
    # A few at a time; who comes when many wait is told so.
    app.queue(max_size=16 if public else 64, default_concurrency_limit=4)
    try:
        _, address, shared = app.launch(
            server_name=host,
            server_port=port,
            share=share,
            auth=auth,
            inbrowser=browse,
            prevent_thread_lock=True,
            max_file_size="5mb" if public else "50mb",
            css=components.asset("style.css"),
            theme=gr.themes.Base(  # its own fonts only: others would be fetched
                primary_hue="indigo",
                neutral_hue="slate",
                font=["system-ui", "sans-serif"],
                font_mono=["ui-monospace", "monospace"],
            ),
            quiet=True,
            ssr_mode=False,
            show_error=True,
            run_history=False,  # nothing of what visitors do is kept
        )
    except OSError as error:  # Gradio's words for a port or an address that cannot be had
        what = f"port {port} of {host} is" if port else f"the ports of {host} from 7860 on are"
        raise SpecError(f"{what} taken, or not for you to use; give another --port.") from error
    threading.Thread(target=page.run, args=(page.warm_up,), daemon=True).start()
    if on_ready is not None:
        on_ready(shared or address)
    if wait:
        app.block_thread()
    return app


def _check_host(host: str) -> None:
    """Raises where an address is none of this machine's."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host, 0))
    except OSError as error:
        raise SpecError(f"'{host}' is no address of this machine; give another --host.") from error
