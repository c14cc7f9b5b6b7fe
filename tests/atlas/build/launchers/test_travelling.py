"""Pieces that are done by another process: here the other one is this one, with a home and a memory of its own."""

import os
import shlex
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import elude_steer as es
from elude_steer.atlas.build import pipeline, stages
from elude_steer.atlas.build.launchers import ray_launcher, slurm_launcher, worker
from elude_steer.atlas.build.launchers.ray_launcher import RayLauncher
from elude_steer.atlas.build.launchers.resources import Resources, read_resources
from elude_steer.errors import EludeSteerWarning, ProcessError, SpecError, StorageError
from elude_steer.specs import AtlasSpec, ClustersSpec, ModelSpec, SplitSpec, TokensSpec
from elude_steer.utils.parallel import Slots, WorkerGroup
from elude_steer.utils.remote import mirror, root
from tests.models.sources.test_tar import pack

ROOT = Path(__file__).parents[4]
cloudpickle = pytest.importorskip("cloudpickle", reason="brought by submitit and Ray")


@pytest.fixture(autouse=True)
def clean_process(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(worker, "_loaded", {})
    monkeypatch.setattr(stages, "_OPENED", {})
    monkeypatch.setattr(root, "_current", [])
    monkeypatch.setattr(mirror, "_brought", {})
    monkeypatch.setattr(mirror, "_looked", set())


@pytest.fixture(scope="module")
def spec(tiny_llava):
    return AtlasSpec(
        "tiny",
        ModelSpec(str(tiny_llava), "layers.1.mlp.fc2"),
        tokens=TokensSpec(per_image=8, batch_size=4),
        clusters=ClustersSpec(top_k=200, min_cluster_size=6, min_samples=3),
        split=SplitSpec(winner_rule="gap"),
    )


@pytest.fixture(scope="module")
def reference(spec, image_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return files(es.build(spec, images=image_folder, out=folder / "a", work=folder / "work", quiet=True))


def files(atlas):
    return {path.name: path.read_bytes() for path in atlas.folder.iterdir()}


@dataclass
class Loopback(RayLauncher):
    """Does what an engine does, pickles included, on a machine whose home is `home`; counts the pieces."""

    home: Path | None = None
    done: list = field(default_factory=list)
    fail: int = 0  # so many tasks are lost before they begin, and begun again

    def each(self, pieces, work, on_done=None):
        payload = cloudpickle.dumps(self.origin), cloudpickle.dumps(work)
        for task in pieces:
            for _ in range(2 if len(self.done) < self.fail else 1):
                with self.elsewhere():
                    read = [lambda data=data: cloudpickle.loads(data) for data in payload]
                    problem = worker.run_task(
                        worker.hash_bytes(payload[0]), read[0], str(hash(payload[1])), read[1], task
                    )
            if problem:
                raise ProcessError(problem)
            self.done.append(task)
            if on_done:
                on_done(task)

    @contextmanager
    def elsewhere(self):
        home, known = os.environ["ELUDE_STEER_HOME"], (mirror._brought, mirror._looked)
        threads = torch.get_num_threads()
        try:
            if self.home is not None:
                os.environ["ELUDE_STEER_HOME"] = str(self.home)
                mirror._brought, mirror._looked = self.__dict__.setdefault("_known", ({}, set()))
            yield
        finally:
            os.environ["ELUDE_STEER_HOME"], (mirror._brought, mirror._looked) = home, known
            torch.set_num_threads(threads)


@pytest.fixture
def loopback(monkeypatch):
    """Call it with options to let the next builds use that launcher."""

    def use(**options):
        launcher = Loopback(Resources(), **options)

        @contextmanager
        def open_launcher(*_):
            yield launcher

        monkeypatch.setattr(pipeline, "_open_launcher", open_launcher)
        return launcher

    return use


def test_pieces_of_another_process_give_the_same_bytes(spec, reference, image_folder, tmp_path, loopback):
    launcher = loopback(fail=5)
    built = es.build(spec, images=image_folder, out=tmp_path / "a", quiet=True, launcher="ray")
    assert files(built) == reference
    assert len(launcher.done) == 1 + 1 + 16 + 1, "shards, blocks to rank, units, blocks to split"
    again = loopback()
    assert files(es.build(spec, images=image_folder, out=tmp_path / "b", quiet=True, launcher="ray")) == reference
    assert again.done == [], "what is finished does not travel"


def test_machines_without_a_folder_in_common_give_the_same_bytes(
    spec, reference, image_folder, tmp_path, loopback, monkeypatch
):
    """The images are tar shards, the work is behind a URL, and so is the atlas."""
    monkeypatch.setattr(stages, "SHARD_IMAGES", 8)
    options = {
        "images": pack(image_folder, tmp_path / "shards", 3), "out": f"file://{tmp_path}/atlas",
        "work": f"file://{tmp_path}/store", "launcher": "ray", "quiet": True,
    }  # fmt: skip
    launcher = loopback(home=tmp_path / "elsewhere")
    assert files(es.build(spec, **options)) == reference
    assert {path.name: path.read_bytes() for path in (tmp_path / "atlas").iterdir()} == reference
    assert len(launcher.done) == 5 + 1 + 16 + 1
    assert not list((tmp_path / "store").glob("tokens-*/shard-*")), "the store keeps the tokens once"

    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "a third"))
    monkeypatch.setattr(mirror, "_brought", {})
    again = loopback(home=tmp_path / "elsewhere")
    assert files(es.build(spec, **options)) == reference
    assert again.done == [], "another machine finds the work done"


def test_labels_and_calibration_travel_too(tmp_path, loopback):
    settings = [
        "images.limit=120",
        "clusters.units=4",
        "clusters.top_k=300",
        "labels.top_k=20",
        "clusters.min_cluster_size=8",
    ]
    options = {"settings": settings, "quiet": True}
    alone = es.build("toyland", out=tmp_path / "a", work=tmp_path / "w", **options)
    loopback(home=tmp_path / "elsewhere")
    other = es.build("toyland", out=tmp_path / "b", work=f"file://{tmp_path}/store", launcher="ray", **options)
    assert files(alone) == files(other)
    assert other.labels is not None


def test_a_machine_that_would_compute_other_numbers_is_refused(spec, image_folder, tmp_path, loopback, monkeypatch):
    launcher = loopback()
    describe = pipeline.describe_build
    other = lambda build, threads: replace(describe(build, threads), source=("other weights", *build.source[1:]))  # noqa: E731
    monkeypatch.setattr(pipeline, "describe_build", other)
    with pytest.raises(ProcessError, match=r"has [0-9a-f]+ where the first one has other weights; give all machines"):
        es.build(spec, images=image_folder, out=tmp_path / "a", quiet=True, launcher="ray")
    assert launcher.done == [] and not (tmp_path / "a").exists()


def test_a_machine_without_the_images_is_refused(spec, image_folder, tmp_path, loopback, monkeypatch):
    """It would leave all of them out as unreadable."""
    loopback()
    describe = pipeline.describe_build
    lost = lambda build, threads: replace(describe(build, threads), samples=("00",))  # noqa: E731
    monkeypatch.setattr(pipeline, "describe_build", lost)
    with pytest.raises(ProcessError, match=r"does not read the same images of .*; give all machines the same folder"):
        es.build(spec, images=image_folder, out=tmp_path / "a", quiet=True, launcher="ray")


def test_a_work_folder_that_is_not_shared_is_noticed(spec, image_folder, tmp_path, loopback, monkeypatch):
    launcher = loopback()
    monkeypatch.setattr(stages, "wait_for", lambda paths: real(paths, seconds=0.0))
    from elude_steer.utils.files import wait_for as real

    monkeypatch.setattr(launcher, "each", lambda tasks, work, on_done: [on_done(task) for task in tasks])
    with pytest.raises(StorageError, match="was written by another machine and is not seen here; give --work a folder"):
        es.build(spec, images=image_folder, out=tmp_path / "a", quiet=True, launcher="ray")


def test_an_error_of_a_piece_is_one_line(spec, image_folder, tmp_path, loopback, monkeypatch):
    loopback()
    monkeypatch.setattr(worker, "load_tower", lambda *_, **__: 1 / 0)
    with pytest.raises(ProcessError, match=r"^unexpected ZeroDivisionError in test_travelling\.py, line \d+: division"):
        es.build(spec, images=image_folder, out=tmp_path / "a", quiet=True, launcher="ray")


def test_streams_and_models_in_memory_stay(spec, tmp_path, loopback):
    loopback()
    with pytest.raises(SpecError, match="several processes cannot share a stream"):
        es.build(spec, images=iter([torch.zeros(3, 28, 28)]), out=tmp_path / "a", quiet=True, launcher="ray")
    with pytest.raises(ProcessError, match="a model that was given in memory stays in its process"):
        stages.reopen("", spec, "exact")
    with pytest.raises(SpecError, match="is a URL, which `build` alone takes"):
        es.disentangle(
            nn.Sequential(nn.Linear(4, 3)), layer="0", images=torch.rand(9, 4), work="s3://a/b", out=tmp_path / "a"
        )


def test_slots_are_one_elsewhere():
    slots = Slots(3)
    with slots, slots, slots:
        other = cloudpickle.loads(cloudpickle.dumps(slots))
    with other:
        assert not other._places.acquire(blocking=False)


def test_resources_are_read_with_all_problems_at_once():
    asked = read_resources("slurm", ["gpus=2", "partition=a100", "minutes=30"])
    assert (asked.gpus, asked.partition, asked.minutes, asked.jobs) == (2.0, "a100", 30, 16)
    with pytest.raises(SpecError) as failed:
        read_resources("slurm", ["gpu=1", "minutes=soon", "jobs=0", "cluster=moon"])
    assert [problem.split(";")[0][:40] for problem in failed.value.problems] == [
        "resource 'gpu=1' is not one of cpus=…, g", "resource minutes is 'soon'", "resource jobs is 0",
        "resource cluster is 'moon'",
    ]  # fmt: skip
    assert "Did you mean 'gpus'?" in failed.value.problems[0]
    for launcher, settings, address, why in (
        ("ray", ["partition=x"], None, "is not one of cpus"), ("local", ["gpus=1"], None, "is for --launcher ray or"),
        ("slurm", [], "auto", "add --launcher ray"), ("rya", [], None, "Did you mean 'ray'"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=why):
            read_resources(launcher, settings, address)


def test_numbers_may_be_shares_where_the_engine_takes_them():
    asked = read_resources("ray", ["gpus=0.125", "memory=1.5", "cpus=2"], "auto")
    assert (asked.gpus, asked.memory, asked.cpus) == (0.125, 1.5, 2)
    assert read_resources("slurm", ["memory=1.5", "gpus=2"]).memory == 1.5
    for settings, why in (
        (["gpus=0.5"], r"gpus is 0\.5; a SLURM job has whole GPUs: write gpus=1"),
        (["gpus=1.5"], "whole GPUs"), (["gpus=nan"], "must be between"), (["gpus=inf"], "must be between"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=why):
            read_resources("slurm", settings)


def test_the_resources_of_every_command_in_the_documents_are_taken():
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "demos" / "guides").glob("*.md"))):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("elude-steer ") and "--launcher" in line:
                words = shlex.split(line, comments=True)
                value = dict(pairwise(words))
                settings = [after for word, after in pairwise(words) if word == "--resource"]
                found.append(read_resources(value["--launcher"], settings, value.get("--address")))
    assert len(found) >= 3 and any(asked.gpus == 0.125 for asked in found)


def test_the_command_refuses_before_a_model_is_loaded(run, image_folder):
    code, _, err = run("build", "toyland", "--launcher", "ray", "--resource", "gpu=1")
    assert code == 1 and "resource 'gpu=1' is not one of" in err
    code, _, err = run("build", "toyland", "--images", "nowhere/{0..3}.tar")
    assert code == 1 and err.count("\n") == 1 and "there is no" in err


@pytest.mark.skipif(bool(find_spec("ray")), reason="Ray is installed")
def test_a_missing_engine_is_named(run):
    code, _, err = run("build", "toyland", "--launcher", "ray")
    assert code == 1 and "pip install 'elude-steer[ray]'" in err


def test_ray_is_not_asked_for_what_no_machine_has():
    ray = type("Ray", (), {"nodes": staticmethod(lambda: [{"Alive": True, "Resources": {"CPU": 2.0, "memory": 8e9}}])})
    ray_launcher._check_fits(ray, Resources(cpus=2, memory=6))
    with pytest.raises(ProcessError, match=r"gpus=1.*the largest numbers are cpus=2, gpus=0, memory=8\.0"):
        ray_launcher._check_fits(ray, Resources(gpus=1))


def test_a_cluster_that_may_grow_is_waited_for():
    ray = type("Ray", (), {"nodes": staticmethod(lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])})
    with pytest.warns(EludeSteerWarning, match=r"gpus=1.*waits until the cluster has such a machine"):
        ray_launcher._check_fits(ray, Resources(gpus=1), may_grow=True)


# SLURM, through submitit's executors of this machine.


@pytest.fixture
def submitit():
    return pytest.importorskip("submitit", reason="pip install 'elude-steer[slurm]'")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_jobs_of_this_process_give_the_same_bytes(spec, reference, image_folder, tmp_path, submitit):
    options = {"launcher": "slurm", "resources": ["cluster=debug", "jobs=2"], "quiet": True}
    assert files(es.build(spec, images=image_folder, out=tmp_path / "a", **options)) == reference


@pytest.mark.slow
def test_jobs_of_other_processes_give_the_same_bytes(spec, reference, image_folder, tmp_path, submitit):
    options = {"launcher": "slurm", "resources": ["cluster=local", "jobs=2"], "quiet": True}
    assert files(es.build(spec, images=image_folder, out=tmp_path / "a", **options)) == reference


def test_jobs_import_nothing_from_the_current_folder(submitit, tmp_path, monkeypatch):
    """`sbatch` hands on the environment in which it is called."""
    seen = []
    look = lambda *_: seen.append(os.environ.get("PYTHONSAFEPATH"))  # noqa: E731
    executor = SimpleNamespace(map_array=look, update_parameters=lambda **_: None)
    monkeypatch.setattr(submitit, "AutoExecutor", lambda **_: executor)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    slurm_launcher.SlurmLauncher(Resources(), tmp_path)._submit((b"", b""), [[0]])
    assert seen == ["1"] and "PYTHONSAFEPATH" not in os.environ


def test_lost_jobs_are_submitted_again_and_given_up_in_the_end(submitit, tmp_path, monkeypatch):
    class Job:
        def __init__(self, share, lost):
            self.share, self.lost = share, lost

        def done(self):
            return True

        def result(self):
            if self.lost:
                raise submitit.core.utils.UncompletedJobError("job 7 was preempted")
            done.extend(self.share)

    done, arrays = [], []

    def submit(self, payload, shares):
        arrays.append([list(share) for share in shares])
        return [Job(share, number == 0 and len(arrays) <= lost) for number, share in enumerate(shares)]

    monkeypatch.setattr(slurm_launcher.SlurmLauncher, "_submit", submit)
    launcher, lost = slurm_launcher.SlurmLauncher(Resources(jobs=3, retries=2), tmp_path), 2
    launcher.each(range(7), print)
    assert sorted(done) == list(range(7)) and arrays[1:] == [[[0], [3], [6]], [[0]]]
    arrays.clear()
    lost = 9
    with pytest.raises(ProcessError, match=r"pieces were lost with their jobs 3 times \(job 7 was preempted\)"):
        launcher.each(range(7), print)


@pytest.fixture
def slurm(submitit, tmp_path, monkeypatch):
    """The programs of SLURM, as far as submitting goes: `sbatch` takes every script as job 42."""
    for name, text in (("srun", "exit 1"), ("sacct", "exit 1"), ("sbatch", "echo Submitted batch job 42")):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(submitit.SlurmExecutor, "_throttle", lambda self: None)


def submit_script(settings, folder, shares):
    """The lines of the script that a launcher with these settings submits for so many shares."""
    launcher = slurm_launcher.connect(read_resources("slurm", settings), folder)
    payload = slurm_launcher.Payload(folder, "a", "b", 8)
    assert len(launcher._submit(payload, [[number] for number in range(shares)])) == shares
    text = (folder / "42_submission.sh").read_text().replace(str(folder), "WORK/slurm")
    return [line for line in text.replace(sys.executable, "python").splitlines() if line]


def test_the_script_in_the_guide_is_the_one_that_its_command_submits(slurm, tmp_path):
    guide = (ROOT / "demos" / "guides" / "scaling.md").read_text(encoding="utf-8")
    shown = guide[guide.index("#!/bin/bash") :].partition("\n```")[0].replace(" \\\n ", "")
    (command,) = [line for line in guide.splitlines() if line.startswith("elude-steer") and "--launcher slurm" in line]
    settings = [value for word, value in pairwise(shlex.split(command)) if word == "--resource"]
    script = submit_script(settings, tmp_path / "jobs", read_resources("slurm", settings).jobs)
    kinds = ("#!", "#SBATCH", "export", "srun")
    wanted = [line for line in shown.splitlines() if line.startswith(kinds)]
    assert [line for line in script if line.startswith(kinds)] == wanted and len(wanted) == 15


def test_the_generated_script_asks_for_what_was_said(slurm, tmp_path):
    asked = ["memory=32", "account=vision", "constraint=80gb", "qos=low", "minutes=90"]
    script = submit_script(asked, tmp_path / "jobs", 3)
    for line in ("array=0-2%3", "mem=32GB", "account=vision", "constraint=80gb", "qos=low", "time=90"):
        assert f"#SBATCH --{line}" in script
    assert not any("gpus" in line or "partition" in line for line in script)


class FakeJob:
    """A job that has ended if it has a result, and counts how often it was cancelled."""

    def __init__(self, result=None):
        self.outcome, self.cancelled = result, 0

    def done(self):
        return self.outcome is not None

    def result(self):
        return self.outcome or None

    def cancel(self):
        self.cancelled += 1
        raise OSError("scancel is not there")


def test_an_error_of_the_last_job_ends_the_others_at_once(tmp_path, monkeypatch):
    jobs = [FakeJob(), FakeJob(), FakeJob("the disk is full")]
    monkeypatch.setattr(slurm_launcher.SlurmLauncher, "_submit", lambda *_: jobs)
    launcher = slurm_launcher.SlurmLauncher(Resources(jobs=3), tmp_path)
    with pytest.raises(ProcessError, match=r"^the disk is full$"):
        launcher.each(range(3), print)
    assert [job.cancelled for job in jobs] == [1, 1, 0] and launcher.stopped.is_set()


def test_an_interruption_cancels_the_jobs(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    jobs = [FakeJob(), FakeJob()]
    monkeypatch.setattr(slurm_launcher.SlurmLauncher, "_submit", lambda *_: jobs)
    monkeypatch.setattr(slurm_launcher.time, "sleep", interrupt)
    launcher = slurm_launcher.SlurmLauncher(Resources(jobs=2), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        launcher.each(range(2), print)
    assert [job.cancelled for job in jobs] == [1, 1] and launcher.stopped.is_set()


def test_what_all_jobs_read_is_written_once(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(
        slurm_launcher.SlurmLauncher, "_submit", lambda _, payload, shares: sent.append(payload) or [FakeJob("")]
    )
    launcher = slurm_launcher.SlurmLauncher(Resources(jobs=1), tmp_path)
    launcher.origin = SimpleNamespace(threads=3, images=["x" * 1000] * 1000)
    for stage in (print, len):
        launcher.each([1], stage)
        assert len(cloudpickle.dumps(sent[-1])) < 1000 and sent[-1].threads == 3
        assert sent[-1].read(sent[-1].work) is stage
        assert sent[-1].read(sent[-1].origin).images == launcher.origin.images
    assert len(list(tmp_path.iterdir())) == 3, "the build, and two stages"
    slurm_launcher.payload_path(tmp_path, sent[0].work).write_bytes(b"other")
    with pytest.raises(ProcessError, match="is damaged; delete it and run"):
        sent[0].read(sent[0].work)


def test_without_slurm_the_launcher_says_so(submitit, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ProcessError, match=r"`srun` is not on this machine.*--resource cluster=local"):
        slurm_launcher.connect(Resources(), tmp_path)


# Ray itself.


@pytest.mark.slow
def test_ray_workers_give_the_same_bytes(spec, reference, image_folder, tmp_path):
    pytest.importorskip("ray", reason="pip install 'elude-steer[ray]'")
    options = {"launcher": "ray", "processes": 2, "quiet": True}
    assert files(es.build(spec, images=image_folder, out=tmp_path / "a", **options)) == reference


def test_threads_of_a_group_see_what_is_done():
    seen = []
    WorkerGroup(threads=2).each(range(5), lambda piece: None, seen.append)
    assert sorted(seen) == list(range(5))
