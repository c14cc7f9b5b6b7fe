import pytest

from elude_steer.errors import StorageError
from elude_steer.evaluation.reproduce.ledger import Ledger


def work():
    return sum(number * number for number in range(20_000))


def test_pieces_add_up_over_interruptions_and_stay_once_they_are_done(tmp_path):
    path = tmp_path / "hours.json"
    ledger = Ledger(path)
    ledger.predict({"one": 3600.0, "two": 7200.0})
    with pytest.raises(KeyboardInterrupt), ledger.count("one"):
        work()
        raise KeyboardInterrupt
    first = ledger.measured("one")
    assert first > 0 and ledger.measured("two") is None

    again = Ledger(path)
    again.predict({"one": 1.0, "two": 1800.0})  # the rest of a piece that was begun is not predicted anew
    with again.count("one"):
        work()
    assert again.measured("one") > first
    again.finish()
    found = again.to_dict()
    assert found["pieces"].keys() == {"one"} and found["pieces"]["one"]["predicted"] == 1.0
    assert found["measured"] == pytest.approx(again.measured("one") / 3600)
    assert found["unit"] == "CPU hours"

    third = Ledger(path, on_gpu=True)
    with third.count("one"):
        work()  # of a piece that is done, which adds nothing
    assert third.to_dict()["pieces"]["one"]["measured"] == third.to_dict()["clock"]
    fourth = Ledger(path)
    fourth.predict({"one": 9.0})
    assert fourth.to_dict() == found


def test_runs_of_different_things_share_a_file_and_nothing_else(tmp_path):
    path = tmp_path / "hours.json"
    tiny = Ledger(path, find_key=lambda name: f"tiny {name}")
    tiny.predict({"one": 3600.0, "two": 3600.0})
    for name in ("one", "two"):
        with tiny.count(name):
            work()
    tiny.finish()
    before = tiny.to_dict()

    paper = Ledger(path, find_key=lambda name: f"paper {name}")
    paper.predict({"one": 7200.0})
    assert paper.measured("one") is None and not paper.to_dict()["pieces"], "nothing of it was begun"
    with paper.count("one"):
        work()
        work()
    paper.finish()
    found = paper.to_dict()
    assert found["pieces"].keys() == {"one"}, "the other run's pieces are not this run's"
    assert found["predicted"] == found["pieces"]["one"]["predicted"] == 2.0 and found["measured"] > 0

    again = Ledger(path, find_key=lambda name: f"tiny {name}")
    again.predict({"two": 0.1, "one": 0.1})
    assert again.to_dict()["pieces"] == before["pieces"]


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "3", '{"a": 3}', '{"a": {"cpu": "x"}}', '{"a": {"cpu": NaN}}'])
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / "hours.json").write_text(text)
    with pytest.raises(StorageError, match=r"hours.json' is damaged; delete it"):
        Ledger(tmp_path / "hours.json")
