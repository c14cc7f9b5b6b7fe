"""Memory: how much is free, and the peak of a piece of work."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MEMINFO, _GROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """The memory that this process can still take, no more than its container allows; None if nobody says."""
    known = [free for free in (_free_of_machine(), _free_of_group(_GROUPS)) if free is not None]
    return min(known) if known else None


def free_gpu_bytes(device: torch.device | str) -> int | None:
    """The free memory of a GPU; None for other devices."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.mem_get_info(device)[0])


def format_bytes(count: float) -> str:
    """A number of bytes for people: `1.28 TB`, `310 MB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e6:.0f} MB"


def _free_of_machine() -> int | None:
    try:  # Linux; what the page cache would give back counts as free
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    import psutil

    return int(psutil.virtual_memory().available)


def _free_of_group(root: Path) -> int | None:
    """What is left of the limit of a control group, of version 2 or 1; None without a limit."""
    layouts = (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder, limit, usage, cache in layouts:
        try:
            allowed, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no control groups, or "max"
            continue
        # The kernel takes back cached files before it refuses memory.
        cached = sum(int(line.split()[1]) for line in lines if line.split()[0] == cache)
        return max(0, allowed - used + cached)
    return None


def reset_peak(device: torch.device) -> None:
    """Restart the measurement of peak memory, of a GPU or else of this process, if the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")  # Linux resets the process's peak
    except OSError:
        return


def peak_megabytes(device: torch.device) -> float | None:
    """The peak in megabytes since the last `reset_peak`; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    except (OSError, StopIteration):
        return None
