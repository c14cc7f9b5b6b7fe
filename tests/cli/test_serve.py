"""What `serve` refuses before a model is loaded, and what it passes on."""

import pytest

from elude_steer.server import launch
from elude_steer.steering.steerer import Steerer
from tests.helpers.cli import only_error

KEY = "k" * 24


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.delenv("ELUDE_STEER_API_KEYS", raising=False)
    monkeypatch.setattr(Steerer, "load", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "without API keys anybody may use it"),
        (("--api-keys", KEY), "--api-keys is the path of a file with one key a line"),
        (("--atlas", "nowhere"), "nowhere"),
        (("--model", "./nowhere"), "there is no folder './nowhere'"),
        (("--recipe", "toyland-dgo"), "Did you mean 'toyland-dog'?"),
        (("--host", "203.0.113.7", "--api-keys", "{keys}"), "cannot be had"),
        (("--device", "gpu"), "'gpu' is not a device"),
    ],
)
def test_it_refuses_before_a_model_is_loaded(run, no_model, tmp_path, arguments, message):
    (tmp_path / "keys.txt").write_text(KEY)
    code, out, err = run("serve", *(one.format(keys=tmp_path / "keys.txt") for one in arguments))
    assert code in (1, 2) and out == ""
    assert message in only_error(err) and KEY not in err


def test_options_reach_the_server(run, monkeypatch, tmp_path):
    (tmp_path / "keys.txt").write_text(KEY)
    called = {}
    monkeypatch.setattr(Steerer, "load", lambda atlas, **options: options | {"atlas": atlas})
    monkeypatch.setattr(launch, "serve", lambda steerer, **options: called.update(options, steerer=steerer))
    options = (
        "--name",
        "mine",
        "--batch",
        "4",
        "--image-cache",
        "2",
        "--rate",
        "7",
        "--max-mb",
        "3",
        "--max-tokens",
        "9",
    )
    code, out, err = run("serve", "--port", "0", "--api-keys", tmp_path / "keys.txt", "--threads", "1", *options)
    assert (code, out) == (0, "") and err == "stopped; nothing is left running.\n"
    assert called["keys"] == (KEY,) and called["steerer"]["threads"] == 1 and called["steerer"]["atlas"] == "toyland"
    assert (called["name"], called["batch"], called["cache_bytes"]) == ("mine", 4, 2 * 2**20)
    limits = called["limits"]
    assert (limits.rate, limits.image_bytes, limits.answer_tokens, limits.default_tokens) == (7, 3 * 2**20, 9, 9)
