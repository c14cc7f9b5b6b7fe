import pytest

from elude_steer.errors import ModelError
from elude_steer.models.execution.device_maps import read_device_map


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "[1]", "{}", '{"a": -1}', '{"a": null}'])
def test_a_file_that_is_no_device_map_is_refused_in_one_short_line(text, tmp_path):
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(ModelError, match=r"map.json' (is not a JSON file|must be an object)") as refused:
        read_device_map(str(tmp_path / "map.json"))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "missing.json"])
def test_what_is_no_file_is_refused(name):
    with pytest.raises(ModelError, match="give auto, balanced, balanced_low_0, sequential, or a JSON file"):
        read_device_map(name)


def test_strategies_and_files(tmp_path):
    (tmp_path / "map.json").write_text('{"model": 0, "lm_head": "cpu"}')
    assert read_device_map(str(tmp_path / "map.json")) == {"model": 0, "lm_head": "cpu"}
    assert (read_device_map("auto"), read_device_map(None)) == ("auto", None)
