"""Passwords that no command line shows, and messages that tell nothing of the machine."""

import pytest

from elude_steer.demo.access import AUTH_VARIABLE, hide_folders, read_auth
from elude_steer.errors import SpecError


def test_a_password_is_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(AUTH_VARIABLE, raising=False)
    assert read_auth(None) is None
    (tmp_path / "password").write_text("me:se:cret\n")
    assert read_auth(str(tmp_path / "password")) == ("me", "se:cret")
    monkeypatch.setenv(AUTH_VARIABLE, "you:other")
    assert read_auth(None) == ("you", "other")
    assert read_auth(str(tmp_path / "password")) == ("me", "se:cret")


@pytest.mark.parametrize("auth", ["me:secret", "", "a\0b", "x" * 5000])
def test_a_password_on_the_command_line_is_refused_and_not_repeated(auth):
    with pytest.raises(SpecError, match="could be read by others on this machine") as caught:
        read_auth(auth)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["me", "me:", ":secret", "", "me:secret\nyou:other"])
def test_a_file_without_a_name_and_a_password_is_refused(tmp_path, text):
    (tmp_path / "password").write_text(text)
    with pytest.raises(SpecError, match="must hold one name and one password, as NAME:PASSWORD") as caught:
        read_auth(str(tmp_path / "password"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'/home/ann/files/atlas/x.png' cannot be read", "'x.png' cannot be read"),
        ("no file /tmp/gradio/a1/x.png, check", "no file x.png, check"),
        ("see http://localhost:8000/v1/x and data:image/png;base64,…", None),
        ("places and/or things; 1/2; `section/key`", None),
    ],
)
def test_messages_name_no_folders(text, shown):
    assert hide_folders(text) == (shown or text)
