"""The client for other engines, against toyland's bare model behind what vLLM 0.27.1 reads of a request."""

import base64
import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from elude_steer.errors import ModelError
from elude_steer.models.images import open_image
from elude_steer.server.client import EmbedsClient, EngineError, embeds_part
from tests.server.conftest import DOG, PROMPT

EDITS = ({}, {"minus": ["dog"]}, {"minus": ["dog"], "plus": ["biker"]}, {"plus": ["teddy"], "strength": 1.25})


def decode(text):
    """As `ImageEmbeddingMediaIO.load_base64` of vLLM 0.27.1 does."""
    return torch.load(io.BytesIO(base64.b64decode(text, validate=True)), weights_only=True)


@contextmanager
def engine(steerer, status=200):
    """A server that puts the embeddings of a request in the place of an image, and knows nothing of edits."""
    vlm, bodies = steerer.vlm, []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append((body, self.headers.get("Authorization")))
            part, question = body["messages"][0]["content"]
            inputs = vlm.inputs([open_image(DOG)], question["text"])  # only for the places of the image's tokens
            with torch.inference_mode():
                tokens = vlm.model.get_input_embeddings()(inputs["input_ids"])
                tokens[inputs["input_ids"] == vlm.model.config.image_token_id] = decode(part["image_embeds"])
                mask = inputs["attention_mask"]
                ids = vlm.model.generate(inputs_embeds=tokens, attention_mask=mask, max_new_tokens=body["max_tokens"])
            message = {"role": "assistant", "content": vlm.decode(ids)[0]}
            answer = {"choices": [{"message": message}]} if status == 200 else {"error": "no\nmore"}
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_engine_that_knows_no_edits_gives_the_librarys_answers(steerer):
    with engine(steerer) as (address, bodies):
        client = EmbedsClient(steerer, "toyland", address, api_key="secret")
        answers = [client.ask(DOG, **edit) for edit in EDITS]
    assert answers[0] == steerer.vlm.caption([open_image(DOG)])[0]
    assert answers[1:] == [steerer.steer(DOG, baseline=False, **edit).caption for edit in EDITS[1:]]
    assert len(set(answers)) == 4 and "secret" not in repr(client)
    assert {key for _, key in bodies} == {"Bearer secret"} and bodies[0][0]["messages"][0]["content"][1][
        "text"
    ] == PROMPT
    # An engine shares what it computes between requests with one uuid: each edit needs its own, and the same the same.
    assert len({body["messages"][0]["content"][0]["uuid"] for body, _ in bodies}) == 4


def test_the_uuid_is_that_of_what_is_sent(steerer):
    plan = steerer.plan(minus=["dog"])
    one, again = embeds_part(steerer, DOG, plan), embeds_part(steerer, DOG, steerer.plan(minus=["dog"]))
    assert one["uuid"] == again["uuid"]
    assert torch.equal(decode(one["image_embeds"]), steerer.embeds(DOG, plan))
    assert len(one["image_embeds"]) < 1.5 * steerer.embeds(DOG, plan).nbytes  # no batch around it


def test_what_goes_wrong_is_one_line(steerer, monkeypatch):
    refused = pytest.raises(EngineError, match=r"answers 400: \{.error.: .no")
    with engine(steerer, status=400) as (address, _), refused:
        EmbedsClient(steerer, "toyland", address).ask(DOG)
    with pytest.raises(EngineError, match="cannot be asked"):
        EmbedsClient(steerer, "toyland", address, timeout=5).ask(DOG)
    monkeypatch.setattr(steerer.vlm.model.config.vision_config, "deepstack_visual_indexes", [1], raising=False)
    with pytest.raises(ModelError, match="reads several layers of its tower"):
        embeds_part(steerer, DOG)
