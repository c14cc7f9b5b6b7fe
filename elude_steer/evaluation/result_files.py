"""Results as JSON files, so that a run that was interrupted continues where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elude_steer.utils.files import read_json, write_file


def load_or_make(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The content of a JSON file; a missing one is made first, with the CPU seconds it took as `seconds`."""
    if not path.exists():
        start = time.process_time()  # not the clock: a core may have other work, and a run may be paused
        found = make()
        text = json.dumps({**found, "seconds": time.process_time() - start}, indent=1)
        write_file(path, lambda file: file.write(text.encode()))
    return dict(read_json(path))
