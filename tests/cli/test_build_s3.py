"""Builds whose images, work and atlas are in an object store; moto plays the store, on this machine."""

import os
import socket
import subprocess
import sys
import time

import pytest

from tests.models.sources.test_tar import pack

pytest.importorskip("s3fs", reason="pip install 'elude-steer[s3]'")
pytest.importorskip("moto", reason="pip install 'elude-steer[test]'")
boto3 = pytest.importorskip("boto3", reason="brought by moto")


@pytest.fixture(scope="module")
def store():
    """The environment of a client of the store, and the client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        client = boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.create_bucket(Bucket="bucket")
        yield environment, client
    finally:
        process.terminate()
        process.wait(30)


def run_build(*arguments, **environment):
    command = [sys.executable, "-m", "elude_steer", "build", *map(str, arguments), "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def list_objects(client, prefix):
    return {
        one["Key"]: client.get_object(Bucket="bucket", Key=one["Key"])["Body"].read()
        for one in client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", ())
    }


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_shards_work_and_atlas_in_a_store_give_the_bytes_of_the_folder(store, spec_file, image_folder, tmp_path, run):
    """A second machine, with nothing on its disk, finds the work done."""
    environment, client = store
    code, _, err = run("build", spec_file, "--images", image_folder, "--out", tmp_path / "a", "--work", tmp_path / "w")
    assert code == 0, err
    expected = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}

    pack(image_folder, tmp_path / "shards", 4)
    for path in (tmp_path / "shards").iterdir():
        client.upload_file(str(path), "bucket", path.name)
    urls = ("--images", "s3://bucket/{000..003}.tar", "--work", "s3://bucket/work", "--out", "s3://bucket/atlas")
    done = run_build(spec_file, *urls, ELUDE_STEER_HOME=str(tmp_path / "home"), **environment)
    assert (done.returncode, done.stdout) == (0, "s3://bucket/atlas\n"), done.stderr
    found = list_objects(client, "atlas/")
    assert {key.removeprefix("atlas/"): data for key, data in found.items()} == expected

    work = list_objects(client, "work/")
    assert work
    done = run_build(spec_file, *urls, ELUDE_STEER_HOME=str(tmp_path / "another"), **environment)
    assert done.returncode == 0, done.stderr
    assert list_objects(client, "atlas/") == found and list_objects(client, "work/") == work


def test_a_store_that_does_not_answer_is_one_line(spec_file, tmp_path):
    wrong = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    wrong |= {"AWS_MAX_ATTEMPTS": "1", "ELUDE_STEER_HOME": str(tmp_path / "home")}
    done = run_build(spec_file, "--images", "s3://bucket/{000..003}.tar", "--work", "s3://bucket/work", **wrong)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("elude-steer: ")]) == 1
