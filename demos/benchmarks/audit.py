"""Known vulnerabilities of the packages that are installed here, and of the lowest versions that we allow, offline.

    git clone --depth 1 https://github.com/pypa/advisory-database
    python demos/benchmarks/audit.py --advisories advisory-database/vulns [--pins .ci/lowest.txt]

For machines that cannot reach the services that pip-audit asks. Reads a folder of advisories in the OSV format, YAML
(the Python packaging advisories) or JSON (GitHub's, osv.dev's). It says how old the newest advisory is, because it
knows nothing that was found later, and exits with 1 if there are findings.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, order=True)
class Finding:
    """An advisory that holds for a version."""

    package: str
    version: str
    id: str
    fixed: str
    summary: str


def main() -> None:
    """Look up all packages, and print what is found as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advisories", type=Path, required=True, help="folder of .yaml and .json files")
    parser.add_argument("--pins", type=Path, action="append", help="file of NAME==VERSION [default: .ci/lowest.txt]")
    given = parser.parse_args()
    groups = {"installed": installed()}
    groups |= {str(path): read_pins(path) for path in given.pins or [ROOT / ".ci" / "lowest.txt"]}
    wanted = {name for group in groups.values() for name, _ in group}
    advisories = [one for one in read_advisories(given.advisories) if wanted & affected_names(one)]
    newest = max((str(one.get("published", "")) for one in read_advisories(given.advisories)), default="never")
    print(f"the newest advisory is of {newest[:10]}; {len(advisories)} are about these packages")
    found = {where: find(group, advisories) for where, group in groups.items()}
    for where, findings in found.items():
        print(f"\n{where}: {len(groups[where])} packages, {len(findings)} findings")
        for one in findings:
            print(f"| {one.package} {one.version} | {one.id} | fixed in {one.fixed or 'no version'} | {one.summary} |")
    sys.exit(any(found.values()))


def installed() -> list[tuple[str, str]]:
    """Names and versions of the packages of this Python."""
    return sorted({(canonicalize_name(one.metadata["Name"]), one.version) for one in distributions()})


def read_pins(path: Path) -> list[tuple[str, str]]:
    """Names and versions in a file of pins."""
    lines = [line.split("#")[0].split(";")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line]
    return [(canonicalize_name(name.strip()), version.strip()) for name, version in pairs]


def read_advisories(folder: Path) -> Iterator[dict[str, Any]]:
    """All advisories below a folder that were not withdrawn."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".yaml", ".json"):
            continue
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.load(text, loader)
        if not content.get("withdrawn"):
            yield content


def affected_names(advisory: Mapping[str, Any]) -> set[str]:
    """The packages of PyPI that an advisory is about."""
    packages = [one.get("package", {}) for one in advisory.get("affected", ())]
    return {canonicalize_name(one["name"]) for one in packages if one.get("ecosystem") == "PyPI"}


def find(packages: list[tuple[str, str]], advisories: list[dict[str, Any]]) -> list[Finding]:
    """The advisories that hold for these versions."""
    found = set()
    for advisory in advisories:
        summary = " ".join(str(advisory.get("summary") or advisory.get("details", "")).split())[:120]
        for one in advisory["affected"]:
            package = one.get("package", {})
            if package.get("ecosystem") != "PyPI":
                continue
            for name, version in packages:
                if name == canonicalize_name(package["name"]) and holds(one, version):
                    fixed = ", ".join(event["fixed"] for event in _events(one) if "fixed" in event)
                    found.add(Finding(name, version, advisory["id"], fixed, summary))
    return sorted(found)


def holds(affected: Mapping[str, Any], version: str) -> bool:
    """Whether a version is one of those that an advisory lists, or is in one of its ranges."""
    if version in affected.get("versions", ()):
        return True
    here, inside = Version(version), False
    for event in sorted(_events(affected), key=lambda event: _parse(next(iter(event.values())))):
        if "introduced" in event and here >= _parse(event["introduced"]):
            inside = True
        if "fixed" in event and here >= _parse(event["fixed"]):
            inside = False
        if "last_affected" in event and here > _parse(event["last_affected"]):
            inside = False
    return inside


def _events(affected: Mapping[str, Any]) -> list[dict[str, str]]:
    """What happened at which version; commits say nothing about versions."""
    ranges = [one for one in affected.get("ranges", ()) if one.get("type") == "ECOSYSTEM"]
    return [{kind: str(value)} for one in ranges for event in one["events"] for kind, value in event.items()]


def _parse(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


if __name__ == "__main__":
    main()
