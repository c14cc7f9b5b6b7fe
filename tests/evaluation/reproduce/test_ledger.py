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
        work()
    assert third.to_dict()["pieces"]["one"]["measured"] == third.to_dict()["clock"]
    assert Ledger(path).to_dict() == found


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "3", '{"a": 3}', '{"a": {"cpu": "x"}}', '{"a": {"cpu": NaN}}'])
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / "hours.json").write_text(text)
    with pytest.raises(StorageError, match=r"hours.json' is damaged; delete it"):
        Ledger(tmp_path / "hours.json")
