import pytest

from elude_steer.server.access import Limits, RefusedError
from elude_steer.server.uploads import Uploads


def test_files_belong_to_who_uploaded_them():
    uploads = Uploads(Limits())
    upload = uploads.add("one", "dog\n.png", b"123")
    assert uploads.get("one", upload.id).data == b"123" and upload.name == "dog.png"
    with pytest.raises(RefusedError, match="no such file of yours") as refused:
        uploads.get("two", upload.id)
    assert refused.value.status == 404
    with pytest.raises(RefusedError):
        uploads.delete("two", upload.id)
    assert uploads.list("two") == [] and uploads.list("one") == [upload]
    uploads.delete("one", upload.id)
    assert uploads.list("one") == [] and uploads.nbytes == 0


def test_the_oldest_files_go_when_there_is_no_room_or_their_time_is_over():
    now = [0.0]
    uploads = Uploads(Limits(upload_bytes=3 * 5096, upload_seconds=100), lambda: now[0])
    files = [uploads.add("one", "", bytes(1000)) for _ in range(5)]
    assert uploads.list("one") == files[2:] and uploads.nbytes == 3 * 5096
    now[0] = 101
    assert uploads.list("one") == [] and uploads.nbytes == 0


def test_empty_files_take_room_too():
    uploads = Uploads(Limits(upload_bytes=10 * 4096))
    for _ in range(100):
        uploads.add("one", "", b"")
    assert len(uploads.list("one")) == 10
