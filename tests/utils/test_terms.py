import pytest

from elude_steer.utils import terms


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A model of the package with terms, on a machine where nobody has seen them."""
    folder = tmp_path / "elude_steer" / "someland" / "data" / "captioner"
    folder.mkdir(parents=True)
    (folder.parent / "TERMS.txt").write_text("For research.\n")
    monkeypatch.setattr(terms, "__file__", str(tmp_path / "elude_steer" / "utils" / "terms.py"))
    monkeypatch.setattr(terms, "_SHOWN", set())
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))
    return folder


def test_terms_are_shown_once_on_a_machine(shipped, capsys, monkeypatch):
    terms.show_terms(str(shipped))
    assert capsys.readouterr() == ("", "For research.\n")
    terms.show_terms(str(shipped))
    monkeypatch.setattr(terms, "_SHOWN", set())  # another process
    terms.show_terms(str(shipped))
    assert capsys.readouterr() == ("", "")


def test_changed_terms_are_shown_again(shipped, capsys, monkeypatch):
    terms.show_terms(str(shipped))
    (shipped.parent / "TERMS.txt").write_text("For everybody.\n")
    monkeypatch.setattr(terms, "_SHOWN", set())
    terms.show_terms(str(shipped))
    assert capsys.readouterr().err == "For research.\nFor everybody.\n"


def test_texts_of_other_folders_are_not_shown(shipped, tmp_path, capsys):
    other = tmp_path / "downloaded" / "model"
    other.mkdir(parents=True)
    (other.parent / "TERMS.txt").write_text("Send me money.\n")
    terms.show_terms(str(other))
    terms.show_terms("user/model")
    assert capsys.readouterr() == ("", "")


def test_a_home_that_cannot_be_written_does_not_stop_anybody(shipped, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "file"))
    terms.show_terms(str(shipped))
    terms.show_terms(str(shipped))
    assert capsys.readouterr().err == "For research.\n"
