"""How much memory a piece of work takes at its peak."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """From now on the peak counts anew, of a GPU or else of this process, where the system can do that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")  # Linux: the peak counts anew from now on
    except OSError:
        return


def peak_megabytes(device: torch.device) -> float | None:
    """Megabytes since the last `reset_peak`; None where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    except (OSError, StopIteration):
        return None
