"""What each task of a build asks its engine for: `--resource KEY=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from elude_steer.errors import SpecError, did_you_mean

LAUNCHERS = ("local", "ray", "slurm")


@dataclass(frozen=True)
class Resources:
    """What each task asks for.

    Attributes:
        cpus: Cores of a task; a SLURM job does so many pieces at a time, a Ray task one.
        gpus: GPUs of a task; Ray takes shares such as 0.5, SLURM whole ones.
        memory: Gigabytes of memory of a task; 0 does not ask.
        retries: How often a task is begun again after its process or machine was lost.
        jobs: Jobs of one SLURM array; each does an equal share of a stage.
        minutes: Time limit of a SLURM job.
        cluster: The executor of submitit: slurm, local (processes of this machine) or debug (this process).
        partition: The partition of SLURM.
        account: The account of SLURM.
        qos: The quality of service of SLURM.
        constraint: The constraint of SLURM on nodes.
    """

    cpus: int = 1
    gpus: float = 0.0
    memory: float = 0.0
    retries: int = 10
    jobs: int = field(default=16, metadata={"for": "slurm"})
    minutes: int = field(default=240, metadata={"for": "slurm"})
    cluster: str = field(default="slurm", metadata={"for": "slurm"})
    partition: str = field(default="", metadata={"for": "slurm"})
    account: str = field(default="", metadata={"for": "slurm"})
    qos: str = field(default="", metadata={"for": "slurm"})
    constraint: str = field(default="", metadata={"for": "slurm"})


def read_resources(launcher: str, settings: Sequence[str], address: str | None = None) -> Resources:
    """Read `KEY=VALUE` texts; raise for all that this launcher does not take."""
    if launcher not in LAUNCHERS:
        raise SpecError(
            f"launcher is '{launcher}'; it must be one of {', '.join(LAUNCHERS)}.{did_you_mean(launcher, LAUNCHERS)}"
        )
    if address is not None and launcher != "ray":
        raise SpecError(f"--address is that of a Ray cluster, and the launcher is '{launcher}'; add --launcher ray.")
    if settings and launcher == "local":
        raise SpecError("--resource is for --launcher ray or slurm; here, use --processes and --threads.")
    known = {f.name: f for f in fields(Resources) if f.metadata.get("for", launcher) == launcher}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for text in settings:
        name, _, value = text.partition("=")
        if name not in known or not value:
            choices = ", ".join(f"{choice}=…" for choice in known)
            problems.append(f"resource '{text}' is not one of {choices}.{did_you_mean(name, list(known))}")
            continue
        try:
            values[name] = type(getattr(Resources, name))(value)
        except ValueError:
            problems.append(f"resource {name} is '{value}'; it must be a number.")
            continue
        low = 1 if name in ("cpus", "jobs", "minutes") else 0
        if not isinstance(values[name], str) and not low <= values[name] <= 1e6:
            problems.append(f"resource {name} is {value}; it must be between {low} and a million.")
    if launcher == "slurm" and values.get("gpus", 0.0) % 1 > 0:
        problems.append(f"resource gpus is {values['gpus']:g}; a SLURM job has whole GPUs: write gpus=1.")
    if values.get("cluster", "slurm") not in ("slurm", "local", "debug"):
        problems.append(f"resource cluster is '{values['cluster']}'; it must be slurm, local or debug.")
    if problems:
        raise SpecError(problems)
    return Resources(**values)
