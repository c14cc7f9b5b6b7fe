import pytest
import torch

from elude_steer.utils import memory
from elude_steer.utils.memory import format_bytes, free_bytes, free_gpu_bytes


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine with 8 GB of free memory and no control groups."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16000000 kB\nMemFree: 1000000 kB\nMemAvailable: 8000000 kB\n")
    groups = tmp_path / "cgroup"
    groups.mkdir()
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_GROUPS", groups)
    return groups


def test_the_free_memory_of_a_machine(system):
    assert free_bytes() == 8_000_000 * 1024


def test_the_limit_of_a_container_counts(system):
    for name, text in (("max", "4000000000"), ("current", "3000000000"), ("stat", "anon 5\ninactive_file 500000000\n")):
        (system / f"memory.{name}").write_text(text)
    assert free_bytes() == 1_500_000_000
    (system / "memory.max").write_text("max\n")
    assert free_bytes() == 8_000_000 * 1024


def test_the_limit_of_an_older_container_counts(system):
    (system / "memory").mkdir()
    for name, text in (("limit_in_bytes", "2000000000"), ("usage_in_bytes", "2500000000"), ("stat", "cache 7\n")):
        (system / "memory" / f"memory.{name}").write_text(text)
    assert free_bytes() == 0


def test_without_proc_psutil_says_it(system, monkeypatch):
    monkeypatch.setattr(memory, "_MEMINFO", system / "nothing")
    assert free_bytes() > 0


def test_a_cpu_has_no_gpu_memory():
    assert free_gpu_bytes("cpu") is None
    assert free_gpu_bytes(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("count", "text"), [(1.28e12, "1.28 TB"), (6.6e9, "6.6 GB"), (22e9, "22 GB"), (310e6, "310 MB"), (10, "0 MB")]
)
def test_sizes_for_people(count, text):
    assert format_bytes(count) == text
