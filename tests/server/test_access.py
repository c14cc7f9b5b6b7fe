import pytest

from elude_steer.errors import SpecError
from elude_steer.server.access import Limits, RefusedError, check_reach, make_access, read_keys

ONE, TWO = "a" * 20, "b" * 20


def test_without_keys_everybody_on_this_machine_may_ask():
    assert make_access((), Limits()).identify(None, "127.0.0.1") == "address 127.0.0.1"
    assert make_access((), Limits()).identify("Bearer anything", "::1") == "address ::1"


def test_keys_tell_clients_apart():
    access = make_access((ONE, TWO), Limits())
    assert access.identify(f"Bearer {ONE}", "x") == "key 0"
    assert access.identify(f"bearer  {TWO}", "x") == "key 1"


@pytest.mark.parametrize("header", [None, "", ONE, f"Basic {ONE}", f"Bearer {ONE}x", "Bearer", f"Bearer {ONE} {TWO}"])
def test_a_wrong_key_is_refused_and_not_repeated(header):
    with pytest.raises(RefusedError) as refused:
        make_access((ONE, TWO), Limits()).identify(header, "x")
    assert refused.value.status == 401 and refused.value.code == "invalid_api_key"
    assert ONE not in str(refused.value)


def test_each_key_has_a_rate_of_its_own():
    now = [0.0]
    access = make_access((ONE, TWO), Limits(rate=2), lambda: now[0])
    access.count("key 0")
    access.count("key 0")
    with pytest.raises(RefusedError, match="2 requests a minute per key or address") as refused:
        access.count("key 0")
    assert (refused.value.status, refused.value.retry_after) == (429, 10)
    access.count("key 1")
    now[0] = 61
    access.count("key 0")


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("ELUDE_STEER_API_KEYS", raising=False)
    assert read_keys(None) == ()
    file = tmp_path / "keys.txt"
    file.write_text(f"# two people\n{ONE}\n\n{TWO}\n{ONE}\n")
    assert read_keys(str(file)) == (ONE, TWO)
    monkeypatch.setenv("ELUDE_STEER_API_KEYS", f"{TWO},{ONE}")
    assert read_keys(None) == (TWO, ONE)


@pytest.mark.parametrize(
    "text",
    ["# revoked: old,{two}\n{one}", "{one}, # no more,{two}", "{one} # not,{two}\n", "#,{two}\n{one}\n #\t,{two}"],
)
def test_a_key_in_a_comment_is_none(text, tmp_path):
    (tmp_path / "keys.txt").write_text(text.format(one=ONE, two=TWO))
    assert read_keys(str(tmp_path / "keys.txt")) == (ONE,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# none", "holds no API key"),
        ("short", "16 to 256 ASCII"),
        ("a b" * 10, "has a space in it"),
        ("ä" * 20, "16 to 256 ASCII"),
    ],
)
def test_files_without_good_keys_are_refused(text, message, tmp_path):
    (tmp_path / "keys.txt").write_text(text)
    with pytest.raises(SpecError, match=message):
        read_keys(str(tmp_path / "keys.txt"))


def test_a_key_in_the_place_of_a_file_is_not_repeated():
    with pytest.raises(SpecError, match="--api-keys is the path of a file") as refused:
        read_keys(ONE)
    assert ONE not in str(refused.value)


def test_other_machines_are_let_in_only_with_keys():
    check_reach("127.0.0.1", ())
    check_reach("0.0.0.0", (ONE,))
    with pytest.raises(SpecError, match="without API keys anybody may use it"):
        check_reach("0.0.0.0", ())
