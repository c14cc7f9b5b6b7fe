"""A server that listens: with curl, the openai client, clients that go away, and signals."""

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

from elude_steer.errors import SpecError
from elude_steer.server.access import Limits
from elude_steer.server.launch import make_service, open_socket, serve
from tests.server.conftest import DOG, PROMPT, chat, live, wait_until

KEY = "k" * 24
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def address(steerer):
    with live(steerer, keys=(KEY,)) as found:
        yield found


def test_the_openai_client(address, steerer):
    import openai

    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    messages = chat()["messages"]
    edit = {"minus": ["dog"], "plus": ["biker"], "strength": 1.5}
    answer = client.chat.completions.create(model="toyland", messages=messages, extra_body={"steer": edit})
    expected = steerer.steer(DOG, **edit, baseline=False).caption
    assert answer.choices[0].message.content == expected
    assert answer.steer["notes"] == [] and answer.usage.completion_tokens > 5
    stream = client.chat.completions.create(model="toyland", messages=messages, stream=True, extra_body={"steer": edit})
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert parts[-1].steer["concepts"][0]["word"] == "dog"
    assert [model.id for model in client.models.list()] == ["toyland"]
    with DOG.open("rb") as file:
        upload = client.files.create(file=file, purpose="vision")
    content = [{"type": "file", "file": {"file_id": upload.id}}, {"type": "text", "text": PROMPT}]
    answer = client.chat.completions.create(model="toyland", messages=[{"role": "user", "content": content}])
    assert answer.choices[0].message.content == "a dog on a motorcycle with sunglasses on a street"
    assert client.files.delete(upload.id).deleted
    with pytest.raises(openai.BadRequestError, match=r"temperature is 0\.7"):
        client.chat.completions.create(model="toyland", messages=messages, temperature=0.7)
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.chat.completions.create(model="gpt", messages=messages)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address, api_key="no", max_retries=0).models.list()


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
def test_curl(address, tmp_path):
    body = chat(steer={"recipe": "toyland-dog"}, stream=True)
    (tmp_path / "request.json").write_text(json.dumps(body))
    head = ["curl", "-sS", "--noproxy", "*", "-H", f"Authorization: Bearer {KEY}"]
    asked = [*head, "-H", "Content-Type: application/json", "-d", f"@{tmp_path / 'request.json'}"]
    out = subprocess.run([*asked, f"{address}/chat/completions"], capture_output=True, text=True, check=True).stdout
    assert out.startswith("data: {") and out.endswith("data: [DONE]\n\n") and " motorcycle" in out
    form = [*head, "-F", "purpose=vision", "-F", f"file=@{DOG}", f"{address}/files"]
    assert json.loads(subprocess.run(form, capture_output=True, check=True).stdout)["filename"] == "toyland-dog.png"


def test_the_readme_shows_what_the_client_prints(steerer, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    python, expected = re.search(r"```python\n(import base64\n.*?)  # (.*?)\n```", text, re.DOTALL).groups()
    (shell,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert "http://127.0.0.1:8000/v1" in python and "http://127.0.0.1:8000/v1" in shell
    with live(steerer) as address:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(python.replace("http://127.0.0.1:8000/v1", address), {})
        assert out.getvalue() == f"{expected}\n"
        if shutil.which("curl"):
            command = shell.replace("http://127.0.0.1:8000/v1", address).replace("curl", "curl --noproxy '*'")
            done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, check=True)
            assert json.loads(done.stdout)["choices"][0]["message"]["content"].startswith("a motorcycle")


def test_the_guide_shows_what_the_client_prints(steerer, monkeypatch):
    monkeypatch.chdir(ROOT)
    guide = (ROOT / "demos" / "guides" / "serving.md").read_text(encoding="utf-8")
    python, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", guide, re.DOTALL).groups()
    (shell,) = re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)
    assert "http://127.0.0.1:8000/v1" in python and "http://127.0.0.1:8000/v1" in shell
    with live(steerer) as address:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(python.replace("http://127.0.0.1:8000/v1", address), {})
        assert out.getvalue() == printed
        if shutil.which("curl"):
            command = shell.replace("http://127.0.0.1:8000/v1", address).replace("curl", "curl --noproxy '*'")
            done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, check=True)
            answer = json.loads(done.stdout)
            assert answer["choices"][0]["message"]["content"] == "a motorcycle next to sunglasses on a street"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_its_answer(steerer, monkeypatch, stream):
    """Toyland ends its sentences by itself; without that end, the answer would go on for 600 tokens."""
    services = []
    monkeypatch.setattr(
        "elude_steer.server.launch.make_service",
        lambda *args, **options: services.append(make_service(*args, **options)) or services[-1],
    )
    monkeypatch.setattr(steerer.vlm.model.generation_config, "eos_token_id", None)
    steps, generate = [], type(steerer.vlm).generate

    def count_steps(self, inputs, max_new_tokens, on_step):
        return generate(self, inputs, max_new_tokens, lambda tokens: (steps.append(1), on_step(tokens))[1])

    monkeypatch.setattr(type(steerer.vlm), "generate", count_steps)

    async def go_away(address):
        async with httpx2.AsyncClient(timeout=60) as client:
            body = chat(max_tokens=600, stream=stream)
            task = asyncio.create_task(client.post(f"{address}/chat/completions", json=body))
            while not steps:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with live(steerer) as address:
        asyncio.run(go_away(address))
        engine = services[0].engine
        wait_until(lambda: not engine._open)
        assert 1 <= len(steps) < 500
        assert engine.metrics.registry.get_sample_value("elude_steer_clients_gone_total") == 1
        assert httpx2.get(address.removesuffix("/v1") + "/health").status_code == 200


def test_sigterm_ends_it_cleanly_and_lets_an_answer_finish():
    command = [sys.executable, "-m", "elude_steer", "serve", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            line = next(line for line in server.stderr if "http://" in line)
            address, answers = re.search(r"http://\S+", line).group(), []
            body = chat(text="dog " * 300)
            asked = threading.Thread(
                target=lambda: answers.append(httpx2.post(f"{address}/chat/completions", json=body, timeout=60))
            )
            asked.start()
            metrics = address.removesuffix("/v1") + "/metrics"
            wait_until(lambda: "waiting_requests 1.0" in httpx2.get(metrics).text or answers)
            server.send_signal(signal.SIGTERM)
            asked.join(60)
            assert server.wait(60) == 0
            assert answers[0].status_code == 200
            assert server.stderr.read() == "stopped; nothing is left running.\n"
        finally:
            server.kill()


def test_an_address_that_cannot_be_had_is_refused(steerer):
    taken = open_socket("127.0.0.1", 0)
    taken.listen()
    try:
        with pytest.raises(SpecError, match=r"port \d+ of 127.0.0.1 cannot be had .* choose another --port"):
            serve(steerer, port=taken.getsockname()[1])
    finally:
        taken.close()
    with pytest.raises(SpecError, match="without API keys anybody may use it"):
        serve(steerer, host="0.0.0.0")
    with pytest.raises(SpecError, match="cannot be had"):
        serve(steerer, host="203.0.113.7", keys=(KEY,))


def test_a_body_that_does_not_arrive_is_not_waited_for(steerer):
    with live(steerer, limits=Limits(body_seconds=0.2)) as address:
        host, port = re.search(r"http://(.*):(\d+)/", address).groups()
        with socket.create_connection((host, int(port)), timeout=5) as client:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"model"'.encode())
            answer = b"".join(iter(lambda: client.recv(2**16), b""))  # until the server closes the connection
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.2 seconds" in answer
