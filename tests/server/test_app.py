"""The routes, as programs use them: what they answer, and what they refuse."""

import base64
import json
import struct
import threading
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from elude_steer.errors import EludeSteerWarning
from elude_steer.models import patch_layout
from elude_steer.models.images import open_image
from elude_steer.server import app, requests
from elude_steer.server.access import Limits
from elude_steer.server.batches import Batches
from tests.server.conftest import DOG, answer_of, chat, data_uri, refusal, serving, wait_until

CHAT = "/v1/chat/completions"
KEYS = ("a" * 20, "b" * 20)
EDITS = (
    {"minus": ["dog"]},
    {"minus": ["dog"], "plus": ["biker"]},
    {"plus": ["teddy"]},
    {"minus": ["street"], "plus": ["beach"]},
    {"minus": ["motorcycle"], "plus": ["chair"], "strength": 1.5},
    {"minus": ["dog"], "mode": "scale", "gamma": -50.0, "kappa": 24, "nu": "all"},
    {"minus": ["sunglasses"], "where": [10, 10, 60, 60]},
)


def library(steerer, image, edit):
    """What the library says by itself of one image."""
    if edit is None:
        return steerer.vlm.caption([image])[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EludeSteerWarning)
        return steerer.steer(image, baseline=False, **edit).caption


@pytest.fixture(scope="module")
def dog():
    return open_image(DOG)


def test_an_answer_is_the_librarys_and_says_what_was_changed(client, steerer, dog):
    bare = client.post(CHAT, json=chat())
    assert answer_of(bare) == library(steerer, dog, None) and bare.json()["steer"] is None
    response = client.post(CHAT, json=chat(steer=EDITS[1]))
    assert answer_of(response) == "a biker on a motorcycle with sunglasses on a street"
    body = response.json()
    assert body["steer"]["plan"] == str(steerer.plan(**EDITS[1])).splitlines()
    assert [(one["word"], one["role"]) for one in body["steer"]["concepts"]] == [("dog", "minus"), ("biker", "plus")]
    assert body["steer"]["concepts"][0]["seen"] > 0.5 and body["steer"]["notes"] == []
    assert body["usage"]["completion_tokens"] > 5 and body["choices"][0]["finish_reason"] == "stop"
    assert (body["object"], body["model"]) == ("chat.completion", "toyland")


def test_what_is_not_seen_is_said(client):
    notes = client.post(CHAT, json=chat(steer={"minus": ["tent"]})).json()["steer"]["notes"]
    assert len(notes) == 1 and "'tent' is not seen in this image" in notes[0] and '"force": true' in notes[0]


def test_a_recipe_is_named_and_not_read(client, steerer, dog):
    first = client.post(CHAT, json=chat(steer={"recipe": "toyland-dog"}))
    assert answer_of(first) == library(steerer, dog, {"minus": ["dog"]})
    assert answer_of(client.post(CHAT, json=chat(steer={"recipe": "toyland-dog", "step": 2}))) != answer_of(first)
    message = refusal(client.post(CHAT, json=chat(steer={"recipe": "toyland-dgo"})), 400)
    assert "Did you mean 'toyland-dog'?" in message
    for name in ("recipes/steering/toyland-dog.yaml", "/etc/passwd", "../toyland-dog"):
        assert "no recipe of that name" in refusal(client.post(CHAT, json=chat(steer={"recipe": name})), 400)
    assert "a step from 1 to" in refusal(client.post(CHAT, json=chat(steer={"recipe": "toyland-dog", "step": 99})), 400)


def events(response):
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("edit", [None, EDITS[1]])
def test_a_stream_adds_up_to_the_answer(client, edit):
    whole = client.post(CHAT, json=chat(steer=edit)).json()
    stream = client.post(CHAT, json=chat(steer=edit, stream=True, stream_options={"include_usage": True}))
    assert stream.headers["content-type"].startswith("text/event-stream")
    parts = events(stream)
    texts = [part["choices"][0]["delta"].get("content", "") for part in parts[:-1]]
    assert "".join(texts) == whole["choices"][0]["message"]["content"] and sum(map(bool, texts)) > 3
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert parts[-2]["choices"][0]["finish_reason"] == "stop" and parts[-2]["steer"] == whole["steer"]
    assert parts[-1]["usage"] == whole["usage"] and len({part["id"] for part in parts}) == 1


def test_a_stream_that_is_refused_has_the_status_of_an_error(client):
    assert "is empty" in refusal(
        client.post(CHAT, json=chat(stream=True, steer={"minus": ["dog"], "where": [9, 9, 1, 1]})), 400
    )


def test_an_answer_ends_where_it_should(client):
    whole = answer_of(client.post(CHAT, json=chat()))
    short = client.post(CHAT, json=chat(max_tokens=3)).json()
    assert whole.startswith(short["choices"][0]["message"]["content"])
    assert short["choices"][0]["finish_reason"] == "length" and short["usage"]["completion_tokens"] == 3
    stopped = client.post(CHAT, json=chat(stop=["motor", "street"]))
    assert answer_of(stopped) == "a dog on a" and stopped.json()["choices"][0]["finish_reason"] == "stop"
    stream = events(client.post(CHAT, json=chat(stop=["motor"], stream=True)))
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in stream) == "a dog on a"


def test_64_requests_at_once_with_different_edits_are_not_mixed(steerer, scene, dog):
    images = (dog, scene.image, scene.image.crop((0, 0, 96, 48)))
    cases = [(images[n % 3], ([None, *EDITS])[n % 8]) for n in range(64)]
    expected = {(n % 3, n % 8): library(steerer, *cases[n]) for n in range(24)}
    with serving(steerer, batch=16) as (client, service), ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda case: answer_of(client.post(CHAT, json=chat(case[0], steer=case[1]))), cases))
        assert answers == [expected[n % 3, n % 8] for n in range(64)]
        count = service.metrics.registry.get_sample_value
        assert count("elude_steer_tower_images_total") == 3  # once an image, however many edits ask for it
        assert count("elude_steer_batch_rows_count") < 32 and count("elude_steer_batch_rows_sum") == 64
        assert count("elude_steer_edited_requests_total") == 56


def test_one_bad_request_does_not_spoil_its_batch(steerer):
    endless = {"minus": ["dog"], "mode": "scale", "gamma": 1e6, "kappa": 400, "nu": "all", "min_similarity": -1}
    cases = [None, {"minus": {"dog": {**endless}}, "strength": 1e6}, EDITS[1], {"minus": ["dog"], "kappa": 2.5}, None]
    with serving(steerer) as (client, _), ThreadPoolExecutor(5) as pool:
        responses = list(pool.map(lambda edit: client.post(CHAT, json=chat(steer=edit)), cases))
    assert answer_of(responses[0]) == answer_of(responses[4])
    assert answer_of(responses[2]).startswith("a biker")
    assert "kappa" in refusal(responses[3], 400)


def test_a_failure_in_a_batch_is_tried_again_one_by_one(steerer, monkeypatch):
    from elude_steer.errors import ModelError
    from elude_steer.server.batches import Batches

    run, sizes = Batches.run, []

    def fail_for_biker(self, conversations, *rest):
        sizes.append(len(conversations))
        if any(one.edit is not None and one.edit.plan.words("plus") == ("biker",) for one in conversations):
            raise ModelError("the edit in '/home/me/secret/x' gives numbers that are not finite")
        run(self, conversations, *rest)

    monkeypatch.setattr(Batches, "run", fail_for_biker)
    monkeypatch.setattr("elude_steer.server.engine._GATHER", 0.5)
    with serving(steerer) as (client, _), ThreadPoolExecutor(3) as pool:
        responses = list(pool.map(lambda edit: client.post(CHAT, json=chat(steer=edit)), [None, EDITS[1], EDITS[0]]))
    assert "the edit in 'x' gives numbers that are not finite" in refusal(responses[1], 400)
    assert answer_of(responses[0]).startswith("a dog") and answer_of(responses[2]).startswith("a motorcycle")
    assert sorted(sizes) == [1, 1, 1, 3]


def test_what_a_template_refuses_is_the_requests_fault_and_all_else_is_not(client, steerer, monkeypatch):
    def refuse(error):
        monkeypatch.setattr(type(steerer.vlm), "chat_inputs", lambda *_: (_ for _ in ()).throw(error))

    refuse(ValueError("roles\nmust alternate in /home/me/template.jinja"))
    message = refusal(client.post(CHAT, json=chat()), 400)
    assert "refuses the messages (ValueError: roles must alternate in template.jinja)" in message
    refuse(MemoryError())
    assert "not enough memory" in refusal(client.post(CHAT, json=chat()), 503)
    monkeypatch.undo()
    monkeypatch.setattr(type(steerer.vlm), "grid", lambda *_: 1 / 0)
    assert refusal(client.post(CHAT, json=chat()), 500) == "the server failed (ZeroDivisionError); please report it."
    monkeypatch.undo()
    assert answer_of(client.post(CHAT, json=chat()))


def test_a_chat_of_several_turns_is_answered_under_one_edit(client, steerer, dog):
    messages = [
        {"role": "system", "content": "describe this image"},
        *chat()["messages"],
        {"role": "assistant", "content": "a dog on a street"},
        {"role": "user", "content": [{"type": "text", "text": "Describe this image in one sentence."}]},
    ]
    plan = steerer.plan(**EDITS[1])
    for edit, applied in ((None, None), (EDITS[1], plan)):
        response = client.post(CHAT, json={"model": "toyland", "messages": messages, "steer": edit})
        parts = [{"role": m["role"], "content": m["content"]} for m in messages]
        parts[0]["content"] = [{"type": "text", "text": "describe this image"}]
        parts[1]["content"] = [{"type": "image"}, {"type": "text", "text": "Describe this image in one sentence."}]
        parts[2]["content"] = [{"type": "text", "text": "a dog on a street"}]
        with steerer.applied(applied):
            expected = steerer.vlm.answer(steerer.vlm.chat_inputs(parts, [dog]), 64)[0]
        assert answer_of(response) == expected


def test_several_images_in_one_request(client, steerer, dog, scene):
    """The edit holds for each of them; the model sees one tile of each, as its processor makes them."""
    bare = client.post(CHAT, json=chat(dog, scene.image))
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Describe this image in one sentence."}]
    inputs = steerer.vlm.chat_inputs([{"role": "user", "content": parts}], [dog, scene.image])
    assert answer_of(bare) == steerer.vlm.answer(inputs, 64)[0]
    assert bare.json()["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]
    edited = client.post(CHAT, json=chat(dog, scene.image, steer={"minus": ["dog"], "plus": ["teddy"]}))
    assert answer_of(edited) != answer_of(bare) or edited.json()["steer"]["notes"]
    again = client.post(CHAT, json=chat(dog, scene.image))
    assert answer_of(again) == answer_of(bare)
    # Alone, an image has more tiles than among others: what is kept of one is not used for the other.
    assert answer_of(client.post(CHAT, json=chat(dog))) == library(steerer, dog, None)


def test_an_uploaded_image_is_used_by_its_name(client, steerer, dog):
    upload = client.post("/v1/files", files={"file": ("dog.png", DOG.read_bytes())}, data={"purpose": "vision"}).json()
    assert upload["object"] == "file" and upload["bytes"] == len(DOG.read_bytes())
    body = chat()
    body["messages"][0]["content"][0] = {"type": "file", "file": {"file_id": upload["id"]}}
    assert answer_of(client.post(CHAT, json=body)) == library(steerer, dog, None)
    assert upload in client.get("/v1/files").json()["data"]
    assert client.get(f"/v1/files/{upload['id']}").json() == upload
    assert client.delete(f"/v1/files/{upload['id']}").json()["deleted"] is True
    assert "no such file of yours" in refusal(client.post(CHAT, json=body), 404)


@pytest.mark.parametrize(
    ("files", "data", "status", "message"),
    [
        (None, {"purpose": "vision"}, 415, "send the image as a form"),
        ({"file": ("a.png", b"no image")}, None, 400, "no image in a format that is read here"),
        ({"file": ("a.png", b"")}, None, 400, "the form has no file"),
        ({"other": ("a.png", b"x")}, None, 400, "the form has no file"),
        ({"file": ("a.png", b"x"), "more": ("b.png", b"x")}, None, 400, "the form cannot be read"),
        ({"file": ("a.png", bytes(11 * 2**20))}, None, 413, "more than 10 MB"),
    ],
)
def test_bad_uploads_are_refused(client, files, data, status, message):
    assert message in refusal(client.post("/v1/files", files=files, data=data), status)
    assert client.get("/v1/files").json()["data"] == []


def png(width, height, data=b""):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"not an image", "no image in a format that is read here"),
        (png(50_000, 50_000), "more than 20,000,000"),
        (png(4000, 4000, zlib.compress(bytes(100))), "the file is damaged"),
        (DOG.read_bytes()[:200], "the file is damaged"),
        (b"%!PS-Adobe", "EPS is a program"),
    ],
)
def test_images_that_are_none_or_bombs_are_refused(client, image, message):
    assert message in refusal(client.post(CHAT, json=chat(image)), 400)


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "gpt-4o"}, 404, 'there is no such model here; send "model": "toyland"'),
        ({"steer": {"minus": ["dog"], "strength": -1}}, 400, "strength"),
        ({"steer": {"minus": ["dog"], "mode": "delete"}}, 400, "mode"),
        ({"steer": {"minus": ["dog"], "nu": "some"}}, 400, "nu"),
        ({"steer": {"minus": ["dog"], "plus": ["dog"]}}, 400, "'dog' is in minus and in plus"),
        ({"steer": {"minus": ["dog"], "where": [500, 500, 600, 600]}}, 400, "lies outside the image"),
        ({"steer": {"minus": ["qqq"], "min_similarity": 0.9}}, 400, "knows nothing like 'qqq'"),
        ({"text": "what is <image> this"}, 400, "stands for the image itself"),
        ({"text": "word " * 6000}, 400, "are allowed"),
        ({"text": "x" * 33_000}, 400, "more than 32,000 characters"),
    ],
)
def test_what_only_the_model_can_refuse_is_refused_in_one_line(client, fields, status, message):
    assert message in refusal(client.post(CHAT, json=chat(**fields)), status)


def test_a_prompt_leaves_room_for_its_answer(client):
    """Toyland takes 1,024 tokens: an answer that would go beyond ends there."""
    response = client.post(CHAT, json=chat(text="dog " * 870, max_tokens=1024)).json()
    assert response["usage"]["total_tokens"] <= 1024


def test_bodies_are_bounded_and_json(steerer):
    with serving(steerer, limits=Limits(image_bytes=2**12, images=1, text=1000)) as (client, service):
        limit = service.limits.body_bytes
        assert "send fewer or smaller images" in refusal(client.post(CHAT, content=b"x" * (limit + 1)), 413)

        def parts():
            for _ in range(limit // 1000 + 2):
                yield b"x" * 1000

        assert "send fewer or smaller images" in refusal(client.post(CHAT, content=parts()), 413)
        assert "application/json" in refusal(client.post(CHAT, content=json.dumps(chat())), 415)
        head = {"Content-Type": "application/json"}
        assert "is no JSON" in refusal(client.post(CHAT, content="{", headers=head), 400)
        assert service.reading == 0


def test_unknown_addresses_and_methods_have_errors_of_the_same_form(client):
    assert "nothing at this address" in refusal(client.get("/v1/nothing"), 404)
    assert "another method" in refusal(client.get(CHAT), 405)
    assert "no such model" in refusal(client.get("/v1/models/other"), 404)


def test_a_name_for_this_machine_that_is_not_its_own_is_refused(client):
    refusal(client.post(CHAT, json=chat(), headers={"Host": "attacker.example"}), 403)
    assert client.get("/v1/models", headers={"Host": "localhost:8000"}).status_code == 200
    assert client.get("/v1/models", headers={"Host": "[::1]:8000"}).status_code == 200


def test_two_keys(steerer):
    one, two = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    with serving(steerer, keys=KEYS, limits=Limits(rate=2), only_local=False) as (client, _):
        for path in ("/v1/models", "/v1/files", "/metrics"):
            refusal(client.get(path), 401)
            assert client.get(path, headers=one).status_code == 200
        assert client.get("/health").status_code == 200
        assert refusal(client.post(CHAT, json=chat(), headers={"Authorization": "Bearer nobody"}), 401)
        files = {"file": ("dog.png", DOG.read_bytes())}
        name = client.post("/v1/files", files=files, headers=one).json()["id"]
        refusal(client.get(f"/v1/files/{name}", headers=two), 404)
        body = chat()
        body["messages"][0]["content"][0] = {"type": "file", "file": {"file_id": name}}
        assert "no such file of yours" in refusal(client.post(CHAT, json=body, headers=two), 404)
        assert client.post(CHAT, json=body, headers=one).status_code == 200
        response = client.post(CHAT, json=body, headers=one)
        assert "2 requests a minute" in refusal(response, 429) and response.headers["retry-after"] == "10"
        assert client.post(CHAT, json=chat(), headers=two).status_code == 200


def test_too_many_waiting_requests_are_refused(steerer):
    with serving(steerer, limits=Limits(waiting=4)) as (client, _), ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(lambda _: client.post(CHAT, json=chat()), range(16)))
        counts = [response.status_code for response in responses]
        assert counts.count(200) >= 4 and counts.count(429) >= 1 and counts.count(200) + counts.count(429) == 16
        assert "too many requests are waiting" in refusal(responses[counts.index(429)], 429)
        assert client.post(CHAT, json=chat()).status_code == 200
    with serving(steerer, limits=Limits(waiting_bytes=100_000)) as (client, _):
        refusal(client.post(CHAT, json=chat()), 429)


def test_models_health_and_metrics(client):
    answer_of(client.post(CHAT, json=chat()))
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("toyland", "model") and "toyland-dog" in model["recipes"]
    assert client.get("/v1/models/toyland").json() == model
    assert client.get("/health").json() == {"status": "ok", "model": "toyland"}
    text = client.get("/metrics").text
    assert 'elude_steer_requests_total{path="/v1/chat/completions",status="200"}' in text
    assert "elude_steer_waiting_requests 0.0" in text and "elude_steer_image_cache_bytes" in text


def test_no_answer_holds_a_folder_or_an_address_of_the_server(client):
    uri = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/secret.png"}}
    body = {"model": "toyland", "messages": [{"role": "user", "content": [uri]}]}
    assert "secret" not in refusal(client.post(CHAT, json=body), 400)


def test_data_uris_of_other_types_are_images_too(client, steerer, scene):
    data = base64.b64decode(data_uri(scene.image).partition(",")[2])
    body = chat(data)
    content = body["messages"][0]["content"]
    content[0] = {
        "type": "image_url",
        "image_url": {"url": "DATA:image/x;a=b;base64," + base64.b64encode(data).decode()},
    }
    assert answer_of(client.post(CHAT, json=body)) == library(steerer, scene.image, None)


def test_grey_and_transparent_images_are_read(client):
    for mode in ("L", "RGBA", "P"):
        assert answer_of(client.post(CHAT, json=chat(Image.new(mode, (40, 70)))))


@pytest.fixture
def hold(monkeypatch):
    """The model waits before each batch until this event is set."""
    event, run = threading.Event(), Batches.run

    def wait(self, *rest):
        event.wait(30)
        run(self, *rest)

    monkeypatch.setattr(Batches, "run", wait)
    yield event
    event.set()


@pytest.mark.parametrize("stream", [False, True])
def test_the_files_of_images_are_freed_before_their_answer(steerer, hold, monkeypatch, stream):
    freed, decode = [], base64.b64decode

    class File(bytes):
        def __del__(self):
            freed.append(len(self))

    monkeypatch.setattr(requests.base64, "b64decode", lambda *args, **options: File(decode(*args, **options)))
    with serving(steerer) as (client, service), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, CHAT, json=chat(stream=stream))
        wait_until(lambda: freed)
        assert freed == [len(DOG.read_bytes())] and len(service.engine._open) == 1 and not answer.done()
        hold.set()
        assert answer.result().status_code == 200


def test_a_body_counts_until_it_is_parsed(steerer, monkeypatch):
    hold, parse, body = threading.Event(), requests.parse_chat, json.dumps(chat()).encode()
    begun = []
    monkeypatch.setattr(app, "_BODIES", int(3.5 * len(body)))
    monkeypatch.setattr(app, "parse_chat", lambda *args: begun.append(1) or (hold.wait(30) and parse(*args)))
    head = {"Content-Type": "application/json"}
    with serving(steerer) as (client, service), ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(client.post, CHAT, content=body, headers=head) for _ in range(3)]
        wait_until(lambda: service.reading == 3 * len(body))
        assert "too many large requests" in refusal(client.post(CHAT, content=body, headers=head), 429)
        assert len(begun) == 2, "the third waits for a thread"
        hold.set()
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert service.reading == 0


def test_few_uploads_are_decoded_at_a_time(steerer, monkeypatch):
    running, most = [], []

    def decode(*_, **__):
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()

    monkeypatch.setattr(app, "open_image", decode)
    with serving(steerer) as (client, _), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/files", files={"file": ("a.png", b"x")}), range(8)))
    assert {answer.status_code for answer in answers} == {200} and len(most) == 8 and max(most) == 2


def test_one_of_several_keys_cannot_take_all_places(steerer, hold):
    one, two = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    options = {"keys": KEYS, "limits": Limits(waiting=4), "only_local": False}
    with serving(steerer, **options) as (client, service), ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(client.post, CHAT, json=chat(), headers=one) for _ in range(2)]
        wait_until(lambda: len(service.engine._open) == 2)
        assert "too many requests are waiting" in refusal(client.post(CHAT, json=chat(), headers=one), 429)
        answers += [pool.submit(client.post, CHAT, json=chat(), headers=two) for _ in range(2)]
        wait_until(lambda: len(service.engine._open) == 4)
        hold.set()
        assert [answer.result().status_code for answer in answers] == [200] * 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_tells_when_the_model_has_stopped(steerer, monkeypatch):
    with serving(steerer) as (client, service):
        assert client.get("/health").status_code == 200
        monkeypatch.setattr(service.engine, "_answer", lambda jobs: 1 / 0)
        assert "the server has failed" in refusal(client.post(CHAT, json=chat()), 503)
        wait_until(lambda: client.get("/health").status_code == 503)
        assert client.get("/health").json() == {"status": "failed", "model": "toyland"}
        refusal(client.post(CHAT, json=chat()), 503)


def test_only_the_preparing_thread_measures_images(steerer, monkeypatch):
    """Other layouts ask the processor, which two threads must not use at once."""
    threads = set()
    monkeypatch.setattr(patch_layout, "_GRIDS", 1)
    for kind in (patch_layout.Layout, patch_layout.Canvases):
        make = kind._make_grid
        spy = lambda self, size, make=make: threads.add(threading.current_thread().name) or make(self, size)  # noqa: E731
        monkeypatch.setattr(kind, "_make_grid", spy)
    monkeypatch.setattr("elude_steer.server.engine._GATHER", 0.2)
    images = [Image.new("RGB", (60 + 7 * number, 50)) for number in range(4)]
    with serving(steerer) as (client, _), ThreadPoolExecutor(4) as pool:
        ask = lambda image: client.post(CHAT, json=chat(image, steer={"minus": ["dog"], "where": [1, 1, 30, 30]}))  # noqa: E731
        assert {answer.status_code for answer in pool.map(ask, images)} == {200}
    assert threads and all(name.startswith("prepare") for name in threads)


def test_a_stream_whose_text_changes_ends_with_an_error(client, steerer, monkeypatch):
    decode = type(steerer.vlm).decode
    turn = lambda text: text.upper() if text.endswith("street") else text  # noqa: E731
    monkeypatch.setattr(type(steerer.vlm), "decode", lambda self, tokens: list(map(turn, decode(self, tokens))))
    assert answer_of(client.post(CHAT, json=chat())) == "A DOG ON A MOTORCYCLE WITH SUNGLASSES ON A STREET"
    lines = client.post(CHAT, json=chat(stream=True)).text.split("\n\n")
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert "is not what was sent of it; ask again, without stream" in error["message"]


def test_an_empty_answer_may_be_sent_back(client):
    messages = chat()["messages"]
    again = [*messages, {"role": "assistant", "content": ""}, {"role": "user", "content": "Describe this image."}]
    assert answer_of(client.post(CHAT, json={"model": "toyland", "messages": again}))


def test_inputs_wait_in_the_machines_memory_and_batches_go_to_the_model(steerer, dog, monkeypatch):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
    moved = steerer.vlm.chat_inputs(messages, [dog], torch.device("meta"))
    assert moved["pixel_values"].device.type == moved["input_ids"].device.type == "meta"
    with serving(steerer) as (client, service):
        prepare, found = service.engine._make_conversation, []
        monkeypatch.setattr(service.engine, "_make_conversation", lambda job: found.append(prepare(job)) or found[-1])
        monkeypatch.setattr("elude_steer.models.vlm.input_device", lambda model: torch.device("meta"))
        answer_of(client.post(CHAT, json=chat()))
        (one,) = found
        assert {value.device.type for value in one.inputs.values() if isinstance(value, torch.Tensor)} == {"cpu"}
        monkeypatch.setattr(service.engine._batches, "device", torch.device("meta"))
        assert service.engine._batches._join(found)["pixel_values"].device.type == "meta"
