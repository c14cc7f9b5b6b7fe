"""A checklist for a machine with a GPU: `pytest -m gpu -s`, ten minutes; its last lines can be pasted into an issue.

    pytest -m gpu -s
    ELUDE_STEER_CHECK_MODEL=llava-hf/llava-onevision-qwen2-0.5b-ov-hf pytest -m gpu -s

The variable names a vision-language model that is tried out, too: a folder, or an id on the Hub; its code, if it
brings some, does not run. ELUDE_STEER_CHECK_DEVICE takes another device than cuda. Each check says what it saw; one
that cannot run here is skipped with the reason.
"""

import importlib.util
import os
import platform
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from elude_steer import toyland
from elude_steer.atlas.build.pipeline import build
from elude_steer.method.clustering import cluster
from elude_steer.models.loading import as_dtype
from elude_steer.models.vlm import Vlm
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.fingerprint import versions
from elude_steer.utils.memory import format_bytes, peak_megabytes, reset_peak

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("ELUDE_STEER_CHECK_DEVICE", "cuda")
MODEL = os.environ.get("ELUDE_STEER_CHECK_MODEL")
LINES: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def summary():
    """Print what all checks saw, as a block to paste."""
    yield
    names = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    card = f"{torch.cuda.get_device_name()}, {format_bytes(torch.cuda.get_device_properties(0).total_memory)}" if (
        torch.cuda.is_available()
    ) else "no CUDA device"  # fmt: skip
    head = [
        "elude_steer GPU checklist",
        f"{card}; CUDA {torch.version.cuda}; Python {platform.python_version()}",
        names,
    ]
    print("\n\n```\n" + "\n".join([*head, *LINES]) + "\n```")


@contextmanager
def check(name):
    """Add a line to the summary: what a check found, why it was skipped, or how it failed."""
    found, start = [], time.perf_counter()
    try:
        yield found.append
    except BaseException as error:
        state = "skipped" if isinstance(error, pytest.skip.Exception) else "FAILED "
        LINES.append(f"{state} {name}: {str(error).splitlines()[0][:160] if str(error) else type(error).__name__}")
        raise
    LINES.append(f"passed  {name}: {'; '.join(found)} ({time.perf_counter() - start:.0f} s)")


def require_device():
    kind = DEVICE.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if kind == "mps" and not torch.backends.mps.is_available():
        pytest.skip("torch sees no MPS device")


def planted(count=3000, groups=6, width=256):
    """Contributions of a unit that has groups, as sparse as those of a network."""
    rng = np.random.default_rng(0)
    centres = rng.random((groups, width)) * (rng.random((groups, width)) < 0.1)
    labels = rng.integers(groups, size=count)
    return torch.from_numpy(centres[labels] + 0.02 * rng.standard_normal((count, width))).float(), labels


def test_cuml_clusters_as_the_exact_backend():
    with check("cuML against exact clustering") as saw:
        require_device()
        if importlib.util.find_spec("cuml") is None:
            pytest.skip("cuml is not installed: pip install 'elude-steer[gpu]'")
        vectors, truth = planted()
        vectors = torch.nn.functional.normalize(vectors, dim=1)
        exact, other = (cluster(vectors, backend=name, min_cluster_size=100) for name in ("exact", "cuml"))
        score = adjusted_rand_score(exact.labels, other.labels)
        saw(f"clusters {exact.count} and {other.count}, adjusted Rand index {score:.3f}")
        assert adjusted_rand_score(truth, exact.labels) > 0.9, "the exact backend itself finds what was planted"
        assert exact.count == other.count and score > 0.9


def test_autocast_changes_little():
    with check("autocast of the tower") as saw:
        require_device()
        images = [scene.image for scene in toyland.scenes(7, 8)]
        tower = Vlm.load("toyland/captioner", device=DEVICE)
        plain = torch.cat([q.flatten(0, 1) for q in tower.encode(images)]).float().cpu()
        for dtype in ("bfloat16", "float16"):
            half = replace(tower, autocast=as_dtype(dtype)).encode(images)
            inputs = torch.cat([q.flatten(0, 1) for q in half]).float().cpu()
            similar = float(torch.nn.functional.cosine_similarity(plain, inputs, dim=1).mean())
            saw(f"{dtype} cosine {similar:.4f}")
            assert similar > 0.98


def test_device_map_gives_the_same_captions():
    with check("device_map='auto'") as saw:
        require_device()
        images = [scene.image for scene in toyland.scenes(11, 16)]
        one, other = (Steerer.load("toyland", **{name: value}) for name, value in PLACES.items())
        plans = [steerer.plan(minus=["dog"], force=True) for steerer in (one, other)]
        captions = [s.explain_each(images, plan) for s, plan in zip((one, other), plans, strict=True)]
        same = sum(a.caption == b.caption for a, b in zip(*captions, strict=True))
        saw(f"{same} of {len(images)} captions the same, placed on {other.vlm.device}")
        assert other.vlm.device.type == DEVICE.partition(":")[0]
        assert same >= len(images) - 1


PLACES = {"device": DEVICE, "device_map": "auto" if DEVICE.startswith("cuda") else {"": DEVICE}}


@pytest.mark.parametrize("mode", ["place", "scale"])
def test_steering_on_the_gpu_says_what_it_says_on_the_cpu(mode):
    with check(f"steering, CPU against {DEVICE}, mode {mode}") as saw:
        require_device()
        scenes = [scene for scene in toyland.scenes(13, 120) if scene.objects][:24]
        results = {}
        for device in ("cpu", DEVICE):
            steerer = Steerer.load("toyland", device=device)
            plans = {scene.objects[0]: steerer.plan(minus=[scene.objects[0]], mode=mode) for scene in scenes}
            results[device] = [steerer.explain(scene.image, plans[scene.objects[0]]) for scene in scenes]
        pairs = list(zip(results["cpu"], results[DEVICE], strict=True))
        before = sum(a.baseline == b.baseline for a, b in pairs)
        after = sum(a.caption == b.caption for a, b in pairs)
        reading = max((abs(a.seen[word] - b.seen[word]) for a, b in pairs for word in a.seen), default=0.0)
        saw(f"captions the same {before} before and {after} after of {len(pairs)}; readings differ by {reading:.1e}")
        assert min(before, after) >= len(pairs) - 2
        assert reading < 0.02


def test_a_build_on_the_gpu_finds_the_same_sub_units(tmp_path):
    with check(f"build, CPU against {DEVICE}") as saw:
        require_device()
        small = ["images.limit=60", "clusters.top_k=400", "clusters.min_cluster_size=12", "clusters.units=16"]
        small += ["labels.scorer=null", "clusters.backend=exact"]
        atlases = [
            build("toyland", out=tmp_path / name, work=tmp_path / f"work-{name}", settings=small, device=device)
            for name, device in (("cpu", "cpu"), ("gpu", DEVICE))
        ]
        counts = [torch.bincount(atlas.units, minlength=atlas.d_out)[:16] for atlas in atlases]
        same = int((counts[0] == counts[1]).sum())
        saw(f"sub-units {len(atlases[0])} and {len(atlases[1])}; {same} of 16 units have as many")
        assert same >= 14


def test_a_real_checkpoint(tmp_path):
    with check(f"real checkpoint {os.path.basename((MODEL or 'none').rstrip('/'))}") as saw:  # noqa: PTH119
        require_device()
        if MODEL is None:
            pytest.skip("ELUDE_STEER_CHECK_MODEL names no model; give a folder, or an id on the Hub")
        device = torch.device(DEVICE)
        reset_peak(device)
        vlm = Vlm.load(MODEL, device=DEVICE, dtype="bfloat16" if device.type == "cuda" else "float32")
        images = [scene.image for scene in toyland.scenes(17, 4)]
        start = time.perf_counter()
        captions = vlm.caption(images, max_new_tokens=24)
        spent = time.perf_counter() - start
        peak = peak_megabytes(device)
        saw(f"layer {vlm.layer_name}, {vlm.layer.in_features} to {vlm.layer.out_features}")
        saw(f"{spent / len(images):.2f} s a caption, peak {peak:,.0f} MB" if peak else f"{spent:.1f} s")
        saw(f"'{captions[0][:70]}'")
        assert all(captions), "empty captions"
        inputs = vlm.encode(images[:1])[0]
        assert torch.isfinite(inputs).all()
