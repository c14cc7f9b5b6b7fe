import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from elude_steer.errors import EludeSteerError, ProcessError, SpecError
from elude_steer.utils import parallel
from elude_steer.utils.parallel import (
    WorkerGroup,
    checkout,
    import_settings,
    launch,
    set_variables,
    worker_group,
)


def test_every_piece_is_done_once():
    done = []
    lock = threading.Lock()

    def work(piece):
        with lock:
            done.append(piece)

    for rank in range(3):
        # only the share is tested, so no process waits at the barrier
        workers = WorkerGroup(rank, 3, threads=2)
        object.__setattr__(workers, "barrier", lambda: None)
        workers.each(range(10), work)
    assert sorted(done) == list(range(10))


def test_a_stream_is_never_read_far_ahead():
    taken, gate = [], threading.Event()

    def stream():
        for i in range(100):
            taken.append(i)
            yield i

    def work(piece):
        gate.wait(5)

    thread = threading.Thread(target=lambda: WorkerGroup(threads=2).each(stream(), work))
    thread.start()
    time.sleep(0.2)
    assert len(taken) <= 4
    gate.set()
    thread.join()
    assert len(taken) == 100


def test_the_first_error_stops_the_other_pieces():
    workers, done = WorkerGroup(threads=2), []

    def work(piece):
        if piece == 3:
            raise ValueError("piece 3")
        time.sleep(0.01)
        done.append(piece)

    with pytest.raises(ValueError, match="piece 3"):
        workers.each(range(1000), work)
    assert len(done) < 20
    assert workers.stopped.is_set()


def test_torch_has_one_thread_inside_and_its_old_number_afterwards():
    before = torch.get_num_threads()
    with worker_group(threads=2) as workers:
        assert torch.get_num_threads() == 1
        assert (workers.rank, workers.world, workers.threads) == (0, 1, 2)
    assert torch.get_num_threads() == before


def test_another_number_of_processes_than_requested_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with (
        pytest.raises(ProcessError, match="2 processes were requested, and there are 1; start them with `torchrun"),
        worker_group(processes=2),
    ):
        pass


def test_launch_reports_the_error_of_a_process_once(capfd):
    with pytest.raises(EludeSteerError, match="'nowhere' is neither a file nor a shipped recipe"):
        launch(2, ["recipes", "show", "nowhere"])
    assert capfd.readouterr().err == ""
    launch(2, ["recipes", "list"])
    with pytest.raises(SpecError, match="processes is 0; it must be at least 1"):
        launch(0, [])


def test_a_killed_process_ends_the_others_with_one_line(tmp_path):
    # Instead of a build, one process kills itself and the other sleeps.
    code = (
        "import subprocess, sys, os, signal, threading, time\n"
        "from elude_steer.utils import parallel\n"
        "real = subprocess.Popen\n"
        "def popen(command, **k):\n"
        "    k['env']['WHO'] = k['env']['RANK']\n"
        "    return real([sys.executable, '-c', 'import os, time, signal;'\n"
        '        \'os.kill(os.getpid(), signal.SIGKILL) if os.environ["WHO"] == "1" else time.sleep(60)\'], **k)\n'
        "parallel.subprocess.Popen = popen\n"
        "try:\n"
        "    parallel.launch(2, [])\n"
        "except parallel.ProcessError as error:\n"
        "    print(error)\n"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "process 2 of 2 was ended by SIGKILL; the others were stopped too." in done.stdout
    assert time.monotonic() - start < 50


def test_the_cause_of_a_killed_process_is_not_hidden_by_the_errors_of_the_others(tmp_path):
    """The first and the last fail with the text of a broken connection, because the second was killed."""
    for rank in (0, 2):
        (tmp_path / f"{rank}.txt").write_text("unexpected RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed")
    fail, kill = "raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)"
    children = [subprocess.Popen([sys.executable, "-c", code]) for code in (fail, kill, fail)]
    for child in children:
        child.wait()
    with pytest.raises(ProcessError, match=r"^process 2 of 3 was ended by SIGKILL; the others were stopped too"):
        parallel._wait_for(children, tmp_path)


def test_a_broken_barrier_is_told_without_the_text_of_gloo(monkeypatch):
    def fail():
        raise RuntimeError("[/pytorch/third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    monkeypatch.setattr(parallel.torch.distributed, "barrier", fail)
    with pytest.raises(ProcessError, match=r"^another of the processes has ended; finished work is kept"):
        WorkerGroup(0, 2).barrier()


def test_a_process_stops_if_the_one_that_started_it_has_ended(monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_PARENT", str(os.getppid() + 1))
    with pytest.raises(ProcessError, match="the process that started this one has ended"):
        WorkerGroup().each(range(3), lambda piece: None)
    monkeypatch.setenv("ELUDE_STEER_PARENT", str(os.getppid()))
    WorkerGroup().each(range(3), lambda piece: None)


def leave_marker(folder, *modules):
    """Files of a stranger, whose names are those of installed packages."""
    for name in modules:
        (folder / f"{name}.py").write_text(f"from pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n")
    return folder / "ran"


@pytest.mark.parametrize("given", [None, "", os.pathsep])
def test_started_processes_import_nothing_from_the_current_folder(given, tmp_path, monkeypatch):
    marker = leave_marker(tmp_path, "click", "torch", "elude_steer")
    monkeypatch.chdir(tmp_path)
    if given is not None:
        monkeypatch.setenv("PYTHONPATH", given)
    launch(2, ["recipes", "list"])
    assert not marker.exists()
    subprocess.run([sys.executable, "-c", "import click"], check=True)
    assert marker.exists()


def test_variables_are_put_back(monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_A", "old")
    with suppress(RuntimeError), set_variables({"ELUDE_STEER_A": "new", "ELUDE_STEER_B": "new"}):
        assert os.environ["ELUDE_STEER_A"] == os.environ["ELUDE_STEER_B"] == "new"
        raise RuntimeError
    assert os.environ["ELUDE_STEER_A"] == "old" and "ELUDE_STEER_B" not in os.environ


def test_an_installed_package_adds_no_folder(monkeypatch):
    folder = str(Path(parallel.__file__).resolve().parents[2])
    assert checkout() == [folder]
    monkeypatch.setattr(parallel.sysconfig, "get_path", lambda _: folder)
    assert checkout() == [] and import_settings()["PYTHONSAFEPATH"] == "1"
