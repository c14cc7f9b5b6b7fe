"""A server of toyland in this process, and requests for it."""

import base64
import io
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from elude_steer.server.app import make_app
from elude_steer.server.launch import make_service, serve
from tests.conftest import model_state

DOG = Path(__file__).parents[2] / "demos" / "images" / "toyland-dog.png"
PROMPT = "Describe this image in one sentence."


def data_uri(image):
    """An image, or the bytes of one, as a data URI."""
    if not isinstance(image, bytes):
        data = io.BytesIO()
        image.save(data, "PNG")
        image = data.getvalue()
    return "data:image/png;base64," + base64.b64encode(image).decode()


def chat(*images, text=PROMPT, **fields):
    """The body of a request about some images."""
    content = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in images or (DOG.read_bytes(),)]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
    return {"model": "toyland", "messages": messages, **fields}


def answer_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def refusal(response, status):
    """The message of an error in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"] and error["message"].isprintable() and len(error["message"]) < 1000
    return error["message"]


@contextmanager
def serving(steerer, **options):
    """A client of a service in this process, as `with serving(steerer) as (client, service)`."""
    service = make_service(steerer, **options)
    with TestClient(make_app(service), base_url="http://127.0.0.1") as client:
        yield client, service


@contextmanager
def live(steerer, **options):
    """The address of a server that listens on this machine, in a thread; it stops at the end."""
    import uvicorn

    ready, servers, start = threading.Event(), [], uvicorn.Server.startup
    addresses = []

    async def startup(self, sockets=None):
        servers.append(self)
        await start(self, sockets)

    uvicorn.Server.startup = startup
    options = {"port": 0, "on_ready": lambda address: (addresses.append(address), ready.set()), **options}
    thread = threading.Thread(target=serve, args=(steerer,), kwargs=options, daemon=True)
    try:
        thread.start()
        assert ready.wait(60)
        yield addresses[0]
    finally:
        uvicorn.Server.startup = start
        for server in servers:
            server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def wait_until(is_true, seconds=30):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def batches_are_over(shared_models_stay_unchanged, steerer):
    """An answer leaves before its batch has ended; wait for that before the model is looked at."""
    before = model_state(steerer.vlm.model)
    yield
    wait_until(lambda: model_state(steerer.vlm.model) == before)


@pytest.fixture(scope="session")
def served(steerer):
    with serving(steerer) as both:
        yield both


@pytest.fixture
def client(served):
    return served[0]
