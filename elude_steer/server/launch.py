"""Starts the server, and stops it cleanly: what is being answered is finished, what waits is refused."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from elude_steer.atlas.atlas import Atlas
from elude_steer.demo.access import LOCAL_HOSTS
from elude_steer.errors import SpecError
from elude_steer.server.access import Limits, check_reach, make_access
from elude_steer.server.app import Service, make_app
from elude_steer.server.edits import read_recipes
from elude_steer.server.engine import Engine
from elude_steer.server.metrics import Metrics
from elude_steer.steering.caption_batches import MAX_BATCH_IMAGES
from elude_steer.steering.steerer import Steerer
from elude_steer.utils import optional

PORT = 8000
_DRAIN = 30  # seconds that answers have to be finished after SIGTERM
_IDLE = 2048  # connections that may be open besides those that wait; uvicorn's limit counts them too
_KEEP_ALIVE = 75  # of silence; a client that pauses for uvicorn's 5 would meet a connection that is just being closed


def make_service(
    steerer: Steerer[Atlas],
    *,
    name: str | None = None,
    keys: tuple[str, ...] = (),
    recipes: Sequence[str] = (),
    limits: Limits | None = None,
    batch: int = MAX_BATCH_IMAGES,
    cache_bytes: int = 2**30,
    only_local: bool = True,
) -> Service:
    """The service that an application serves.

    Args:
        steerer: the model and its atlas.
        name: what clients call the model; by default the name of the atlas.
        keys: the API keys.
        recipes: files that requests can name besides the shipped recipes.
        limits: what a request may ask.
        batch: requests that are answered together at most.
        cache_bytes: memory for what is kept of images.
        only_local: see `Service`.
    """
    limits, metrics = limits or Limits(), Metrics()
    known = read_recipes(steerer.atlas.name, recipes)
    engine = Engine(steerer, known, limits, metrics, batch=batch, cache_bytes=cache_bytes)
    return Service(engine, name or steerer.atlas.name, make_access(keys, limits), limits, metrics, only_local)


def serve(
    steerer: Steerer[Atlas],
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    keys: tuple[str, ...] = (),
    on_ready: Callable[[str], object] | None = None,
    name: str | None = None,
    recipes: Sequence[str] = (),
    limits: Limits | None = None,
    batch: int = MAX_BATCH_IMAGES,
    cache_bytes: int = 2**30,
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        steerer: the model and its atlas.
        host: the address to listen on.
        port: the port; 0 takes a free one.
        keys: the API keys; needed where other machines can reach the address.
        on_ready: called with the address once the server answers.
        name: what clients call the model; by default the name of the atlas.
        recipes: files that requests can name besides the shipped recipes.
        limits: what a request may ask.
        batch: requests that are answered together at most.
        cache_bytes: memory for what is kept of images.
    """
    check_reach(host, keys)
    uvicorn = optional.require("uvicorn", "elude-steer serve")
    listening = open_socket(host, port)
    service = make_service(
        steerer,
        name=name,
        keys=keys,
        recipes=recipes,
        limits=limits,
        batch=batch,
        cache_bytes=cache_bytes,
        only_local=host in LOCAL_HOSTS and not keys,
    )
    config = uvicorn.Config(
        make_app(service),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_DRAIN,
        timeout_keep_alive=_KEEP_ALIVE,
        limit_concurrency=2 * service.limits.waiting + _IDLE,
        server_header=False,
    )

    class Server(uvicorn.Server):  # type: ignore[name-defined]
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Stop on SIGTERM and Ctrl-C. uvicorn's own raises them again afterwards, as if the end were an error."""
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for one, handler in before.items():
                    signal.signal(one, handler)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if on_ready is not None and not self.should_exit:
                shown = f"[{host}]" if ":" in host else host
                on_ready(f"http://{shown}:{listening.getsockname()[1]}/v1")

    try:
        Server(config).run(sockets=[listening])
    finally:
        listening.close()


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; raises if that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except (OSError, OverflowError) as error:
        opened.close()
        raise SpecError(
            f"port {port} of {host} cannot be had ({getattr(error, 'strerror', None) or error}); choose another --port "
            "or --host."
        ) from error
    return opened
