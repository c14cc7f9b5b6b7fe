"""The routes of the server: OpenAI's chat completions, models and files, and health and metrics."""

# Without `from __future__ import annotations`: FastAPI reads the annotations of functions made inside a function.

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from elude_steer.demo.access import LOCAL_HOSTS
from elude_steer.models.images import open_image
from elude_steer.server.access import Access, Limits, RefusedError
from elude_steer.server.answers import Answer, Completion
from elude_steer.server.engine import Engine, Event, as_refusal
from elude_steer.server.metrics import Metrics
from elude_steer.server.requests import ChatRequest, parse_chat
from elude_steer.server.uploads import Uploads
from elude_steer.utils import optional

_THREADS = 2  # that parse bodies, and as many that decode uploads; each takes a few times the memory of what it reads
_BODIES = 512 * 2**20  # bytes of bodies that are read and parsed at a time


@dataclass
class Service:
    """What the routes work with.

    Attributes:
        engine: answers.
        name: of the model, as clients call it.
        access: keys and rates.
        limits: what a request may ask.
        metrics: counts.
        only_local: whether requests must name this machine as their host; a page of a browser that was sent here
            under another name is refused then.
        uploads: uploaded images.
        reading: bytes of bodies that are being read and parsed.
    """

    engine: Engine
    name: str
    access: Access
    limits: Limits
    metrics: Metrics
    only_local: bool = True
    uploads: Uploads = field(init=False)
    reading: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.uploads = Uploads(self.limits)
        self.parsing, self.decoding = (asyncio.Semaphore(_THREADS) for _ in range(2))

    def enter(self, request: Any) -> str:
        """Whose request this is; raises if it is nobody's who may ask."""
        host = request.headers.get("host", "").rpartition("@")[2]
        host = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
        if self.only_local and host.casefold() not in LOCAL_HOSTS:
            raise RefusedError("this server answers requests to 127.0.0.1 and localhost only.", 403)
        return self.access.identify(request.headers.get("authorization"), request.client.host if request.client else "")

    @asynccontextmanager
    async def read_body(self, request: Any, limit: int) -> AsyncIterator[bytearray]:
        """The body of a request, which counts as long as the block lasts; raises as soon as it is too long."""
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:12]) > limit:
            raise _too_large(limit)
        body, seconds = bytearray(), self.limits.body_seconds
        try:
            try:
                async with asyncio.timeout(seconds):
                    await self._receive(request, limit, body)
            except TimeoutError as error:
                text = f"the body did not arrive within {seconds:g} seconds; send fewer or smaller images."
                raise RefusedError(text, 408) from error
            yield body
        finally:
            self.reading -= len(body)

    async def _receive(self, request: Any, limit: int, body: bytearray) -> None:
        async for part in request.stream():
            body += part
            self.reading += len(part)
            if len(body) > limit:
                raise _too_large(limit)
            if self.reading > _BODIES:
                raise RefusedError("too many large requests at once; try again.", 429, retry_after=2)

    async def read_chat(self, request: Any, owner: str) -> tuple[ChatRequest, list[bytes]]:
        """The chat request in a body without its images, and the bytes of these, of which there is no other copy."""
        kind = request.headers.get("content-type", "")
        async with self.read_body(request, self.limits.body_bytes) as body, self.parsing:
            chat = await asyncio.to_thread(self.parse, body, kind)
        return replace(chat, images=()), self.image_files(owner, chat)

    def parse(self, body: bytes | bytearray, content_type: str) -> ChatRequest:
        """The chat request in a body."""
        # A page of another site can send a browser's other types here without asking, but not this one.
        if content_type.partition(";")[0].strip().casefold() != "application/json":
            raise RefusedError("the body has another type; send the header 'Content-Type: application/json'.", 415)
        chat = parse_chat(body, self.limits)
        if chat.model != self.name:
            raise RefusedError(
                f'there is no such model here; send "model": "{self.name}", as /v1/models lists it.',
                404,
                code="model_not_found",
                param="model",
            )
        return chat

    def image_files(self, owner: str, chat: ChatRequest) -> list[bytes]:
        """The bytes of the images of a request."""
        return [self.uploads.get(owner, one).data if isinstance(one, str) else one for one in chat.images]

    def describe_model(self) -> dict[str, Any]:
        """The model as `/v1/models` lists it, with what edits it takes."""
        about = {"id": self.name, "object": "model", "created": self.created, "owned_by": "elude-steer"}
        return {**about, "atlas": self.engine.steerer.atlas.name, "recipes": list(self.engine.edits.recipes)}


def make_app(service: Service) -> Any:
    """The ASGI application; the engine begins when the server starts, and ends with it."""
    fastapi = optional.require("fastapi", "elude-steer serve")
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    class Stream(StreamingResponse):
        """A stream that always says when it has ended, also if the client goes away before its first byte."""

        def __init__(self, events: AsyncIterator[str], ended: ExitStack) -> None:
            super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
            self.ended = ended

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            with self.ended:
                await super().__call__(scope, receive, send)

    @asynccontextmanager
    async def run_engine(_app: Any) -> AsyncIterator[None]:
        await asyncio.to_thread(service.engine.start)
        try:
            yield
        finally:
            await asyncio.to_thread(service.engine.close)

    app = fastapi.FastAPI(lifespan=run_engine, openapi_url=None, docs_url=None, redoc_url=None)

    def answer(status: int, body: dict[str, Any], retry_after: int | None = None) -> Any:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        headers |= {"Connection": "close"} if status == 408 else {}  # the rest of the body may still be on its way
        return JSONResponse(body, status, headers=headers)

    def add(method: str, path: str, respond: Callable[..., Awaitable[Any]]) -> None:
        """Serve a path; whatever goes wrong becomes an error of OpenAI's API."""

        async def endpoint(request: Request) -> Response:
            try:
                response = await respond(request)
            except Exception as error:  # noqa: BLE001 - the client gets a sentence, and the server goes on
                refusal = as_refusal(error)
                response = answer(refusal.status, refusal.to_dict(), refusal.retry_after)
            service.metrics.requests.labels(path, response.status_code).inc()
            return response

        app.add_api_route(path, endpoint, methods=[method], response_model=None)

    async def show_health(_request: Any) -> Any:
        alive = service.engine.is_alive
        return JSONResponse({"status": "ok" if alive else "failed", "model": service.name}, 200 if alive else 503)

    async def show_metrics(request: Any) -> Any:
        service.enter(request)
        text, media_type = service.metrics.render()
        return Response(text, media_type=media_type)

    async def list_models(request: Any) -> Any:
        service.enter(request)
        return JSONResponse({"object": "list", "data": [service.describe_model()]})

    async def show_model(request: Any) -> Any:
        service.enter(request)
        if request.path_params["name"] != service.name:
            raise RefusedError(f"there is no such model here; there is '{service.name}'.", 404, code="model_not_found")
        return JSONResponse(service.describe_model())

    async def add_file(request: Any) -> Any:
        owner = service.enter(request)
        service.access.count(owner)
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise RefusedError("send the image as a form: curl -F purpose=vision -F file=@dog.png.", 415)
        limit = service.limits.image_bytes
        async with service.read_body(request, limit + 2**14) as body:
            name, data = await _read_form(request, body, limit)
            async with service.decoding:
                await asyncio.to_thread(open_image, data, max_pixels=service.limits.pixels)
        return JSONResponse(service.uploads.add(owner, name, data).to_dict())

    async def list_files(request: Any) -> Any:
        files = service.uploads.list(service.enter(request))
        return JSONResponse({"object": "list", "data": [upload.to_dict() for upload in files], "has_more": False})

    async def show_file(request: Any) -> Any:
        return JSONResponse(service.uploads.get(service.enter(request), request.path_params["name"]).to_dict())

    async def delete_file(request: Any) -> Any:
        service.uploads.delete(service.enter(request), request.path_params["name"])
        return JSONResponse({"id": request.path_params["name"], "object": "file", "deleted": True})

    async def complete_chat(request: Any) -> Any:
        owner = service.enter(request)
        service.access.count(owner)
        chat, files = await service.read_chat(request, owner)
        completion = Completion(service.name, service.engine.steerer.atlas.fingerprint)
        waiting = _submit(service, chat, files, owner)
        if chat.stream:
            return await _respond_stream(waiting, completion, request, Stream, chat.include_usage)
        with waiting as events:
            event = await _next_unless_gone(events, request)
        if isinstance(event, RefusedError):
            raise event
        return JSONResponse(completion.whole(event))

    add("GET", "/health", show_health)
    add("GET", "/metrics", show_metrics)
    add("GET", "/v1/models", list_models)
    add("GET", "/v1/models/{name:path}", show_model)
    add("POST", "/v1/files", add_file)
    add("GET", "/v1/files", list_files)
    add("GET", "/v1/files/{name}", show_file)
    add("DELETE", "/v1/files/{name}", delete_file)
    add("POST", "/v1/chat/completions", complete_chat)

    async def refuse_path(_request: Any, error: Any) -> Any:
        what = {404: "there is nothing at this address", 405: "this address takes another method"}
        text = (
            f"{what.get(error.status_code, 'the request is refused')}; see POST /v1/chat/completions, GET /v1/models."
        )
        return answer(error.status_code, RefusedError(text, error.status_code).to_dict())

    app.add_exception_handler(HTTPException, refuse_path)
    return app


@contextmanager
def _submit(service: Service, chat: ChatRequest, files: list[bytes], owner: str) -> Iterator["asyncio.Queue[Event]"]:
    """Give a request to the engine and get its events; at the end the engine learns that nobody waits any more."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def send(event: Event) -> None:
        # At the very end of the server its loop may be closed, and nobody waits for the event.
        if not loop.is_closed():
            loop.call_soon_threadsafe(events.put_nowait, event)

    job = service.engine.submit(chat, files, send, owner=owner, share=service.access.share)
    try:
        yield events
    finally:
        service.engine.leave(job)


async def _next_unless_gone(events: "asyncio.Queue[Event]", request: Any) -> Any:
    """The next event; raises if the client goes away first."""
    wanted, gone = asyncio.ensure_future(events.get()), asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait((wanted, gone), return_when=asyncio.FIRST_COMPLETED)
        if wanted.done():
            return wanted.result()
        raise RefusedError("the client is gone.", 499)
    finally:
        wanted.cancel()
        gone.cancel()


async def _wait_until_gone(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _respond_stream(
    waiting: AbstractContextManager["asyncio.Queue[Event]"],
    completion: Completion,
    request: Any,
    stream: Any,
    include_usage: bool,
) -> Any:
    """A stream of events. It begins with the first text, so that what is refused before has the status of an error."""
    with ExitStack() as stack:
        events = stack.enter_context(waiting)
        first = await _next_unless_gone(events, request)
        if isinstance(first, RefusedError):
            raise first
        ended = stack.pop_all()

    async def write() -> AsyncIterator[str]:
        yield completion.begin()
        event: Event = first
        while isinstance(event, str):
            yield completion.text(event)
            event = await events.get()
        yield (completion.end(event, include_usage) if isinstance(event, Answer) else completion.error(event.to_dict()))

    return stream(write(), ended)


async def _read_form(request: Any, body: bytearray, limit: int) -> tuple[str, bytes]:
    """The name and the bytes of the file in a form."""
    from starlette.datastructures import UploadFile
    from starlette.requests import Request

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    try:
        async with Request(request.scope, receive).form(max_files=1, max_fields=8, max_part_size=2**12) as form:
            file = form.get("file")
            data = await file.read() if isinstance(file, UploadFile) else b""
            name = getattr(file, "filename", None) or "image"
    except Exception as error:  # the parser raises errors of several kinds, all about the form
        raise RefusedError("the form cannot be read; send it as curl -F file=@dog.png does.") from error
    if not data:
        raise RefusedError("the form has no file, or an empty one; send it as curl -F file=@dog.png.", param="file")
    if len(data) > limit:
        raise _too_large(limit)
    return name, data


def _too_large(limit: int) -> RefusedError:
    return RefusedError(f"the request has more than {limit / 2**20:.0f} MB; send fewer or smaller images.", 413)
