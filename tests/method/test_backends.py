import importlib.machinery
import json
import subprocess
import sys
from types import ModuleType

import pytest

from elude_steer.errors import MissingPackageError, SpecError
from elude_steer.method.backends import (
    EXACT_INSTANCES,
    ClusteringSize,
    gpu_memory_needed,
    largest_that_fits,
    memory_needed,
    resolve_backend,
)

GB = 10**9
PAPER = ClusteringSize(400_000, 3072, 1000)  # DINOv2-B, layer 12
SMALL = ClusteringSize(4000, 512, 30)  # toyland


@pytest.fixture
def cuml(monkeypatch):
    module = ModuleType("cuml")
    module.__spec__ = importlib.machinery.ModuleSpec("cuml", None)
    monkeypatch.setitem(sys.modules, "cuml", module)


@pytest.fixture
def no_cuml(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuml", None)


def test_small_problems_stay_exact():
    assert resolve_backend("auto", SMALL, free=2 * GB) == "exact"
    assert resolve_backend("auto", SMALL) == "exact", "also where nobody knows the free memory"
    assert resolve_backend("auto", ClusteringSize(EXACT_INSTANCES, 4304), free=16 * GB) == "exact"


def test_the_papers_sizes_take_fast_in_the_memory_of_a_small_machine():
    for instances, dimensions in ((400_000, 3072), (400_000, 4096), (100_000, 3072), (500_000, 4096)):
        assert resolve_backend("auto", ClusteringSize(instances, dimensions), free=14 * GB) == "fast"
    assert memory_needed("exact", PAPER) > 1.28e12


def test_auto_takes_fast_if_exact_does_not_fit():
    size = ClusteringSize(10_000, 1024)
    assert resolve_backend("auto", size, free=4 * GB) == "exact"
    assert resolve_backend("auto", size, free=820_000_000) == "fast"


def test_what_does_not_fit_is_refused_with_what_would():
    line = (
        r"^clusters.backend 'exact' needs 1.3 TB of memory for 400,000 instances of 3,072 inputs, and 22 GB are free; "
        r"set clusters.backend: fast, which needs 1.\d+ GB, or clusters.top_k: 49000.$"
    )
    with pytest.raises(SpecError, match=line):
        resolve_backend("exact", PAPER, free=22 * GB)
    line = r"^clusters.backend 'fast' needs 1.\d+ GB .* and 700 MB are free; set clusters.top_k: 8400.$"
    for backend in ("fast", "auto"):
        with pytest.raises(SpecError, match=line):
            resolve_backend(backend, PAPER, free=700 * 10**6)
    with pytest.raises(SpecError, match=r"'hdbscan' needs .*; set clusters.backend: fast, which needs"):
        resolve_backend("hdbscan", PAPER, free=10 * GB)
    with pytest.raises(SpecError, match="1 MB are free; free some memory, or use another machine"):
        resolve_backend("exact", PAPER, free=10**6)


@pytest.mark.parametrize("backend", ["exact", "fast", "hdbscan"])
def test_the_number_that_is_offered_fits(backend):
    for free in (GB, 5 * GB, 22 * GB):
        largest = largest_that_fits(backend, PAPER, free)
        assert memory_needed(backend, ClusteringSize(largest, 3072)) <= free
        assert resolve_backend(backend, ClusteringSize(largest, 3072), free=free) == backend
        assert memory_needed(backend, ClusteringSize(round(largest * 1.2), 3072)) > free or largest == 400_000


@pytest.mark.parametrize("backend", ["exact", "fast", "hdbscan"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_backends_other_than_auto_resolve_to_themselves(backend, device):
    assert resolve_backend(backend, SMALL, device=device) == backend


def test_auto_is_cuml_only_on_a_gpu_with_cuml_installed(cuml, monkeypatch):
    assert resolve_backend("auto", PAPER, device="cuda:1") == "cuml"
    assert resolve_backend("auto", SMALL, device="cpu") == "exact"
    assert resolve_backend("cuml", SMALL) == "cuml"
    monkeypatch.setitem(sys.modules, "cuml", None)
    assert resolve_backend("auto", SMALL, device="cuda") == "exact"


def test_auto_leaves_cuml_what_it_can_do(cuml):
    assert resolve_backend("auto", ClusteringSize(400_000, 3072, 1500), device="cuda") == "fast"
    assert resolve_backend("auto", PAPER, device="cuda", free_gpu=gpu_memory_needed(PAPER) - 1) == "fast"


def test_cuml_is_refused_before_it_starts(cuml):
    with pytest.raises(
        SpecError, match=r"^cuml takes min_samples up to 1023, not 1500; set clusters.min_samples: 1023"
    ):
        resolve_backend("cuml", ClusteringSize(400_000, 3072, 1500), device="cuda")
    with pytest.raises(SpecError, match=r"'cuml' needs .* and 4 GB of the GPU are free; set clusters.backend: fast"):
        resolve_backend("cuml", PAPER, device="cuda", free=22 * GB, free_gpu=4 * GB)


def test_a_missing_cuml_gives_the_pip_command(no_cuml):
    with pytest.raises(MissingPackageError, match=r"elude-steer\[gpu\]'`, or set clusters.backend: auto.$"):
        resolve_backend("cuml", SMALL)


MEASURE = """
import json, sys, torch
from elude_steer.atlas.build.unit_clusters import cluster_unit
from elude_steer.specs import ClustersSpec
from elude_steer.utils.memory import peak_megabytes, reset_peak
n, d, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
groups = torch.randn(4, d)

class Rows:
    shape = (n, d)
    def __getitem__(self, rows):
        noise = torch.randn(len(rows), d, generator=torch.Generator().manual_seed(int(rows[0])))
        return groups[rows % 4] * 3 + noise

settings = ClustersSpec(top_k=n, min_cluster_size=n // 20, backend=backend)
small = Rows()
small.shape = (500, d)
cluster_unit(small, torch.ones(d), ClustersSpec(top_k=500, min_cluster_size=25, backend=backend))  # imports
reset_peak(torch.device("cpu"))
before = peak_megabytes(torch.device("cpu"))
found = cluster_unit(Rows(), torch.ones(d), settings)
print(json.dumps([peak_megabytes(torch.device("cpu")) - before, len(found["sizes"])]))
"""


@pytest.mark.parametrize(
    ("instances", "dimensions", "backend"),
    [(6000, 512, "exact"), (30_000, 256, "fast"), (12_000, 1536, "fast"), (4000, 100, "hdbscan")],
)
def test_no_more_memory_is_used_than_estimated(instances, dimensions, backend):
    command = [sys.executable, "-c", MEASURE, str(instances), str(dimensions), backend]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    used, clusters = json.loads(done.stdout)
    estimate = memory_needed(backend, ClusteringSize(instances, dimensions, instances // 20)) / 1e6
    assert clusters == 4
    assert 0.4 * (estimate - 64) < used < estimate
