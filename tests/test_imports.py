import ast
import subprocess
import sys
from pathlib import Path

import pytest

import elude_steer

PACKAGE = Path(elude_steer.__file__).parent

# The files in the order of the data: each imports only what stands before it.
ORDER = [
    "errors", "backends", "keys", "meters", "storage", "documents", "recipe", "shipped", "hooks", "surveying",
    "layouts", "towers", "vlm", "images", "probing", "looks", "sketching", "clusters", "contributions", "splitting",
    "dissection", "vocabulary", "scoring", "concepts", "labels", "cards", "manifest", "atlas", "workers", "stages",
    "streams", "naming", "pipeline", "figures", "regions", "settings", "plans", "patches", "editing", "resuming",
    "applying", "fluency", "edits", "coco", "sweep", "tuning", "results", "steering", "exporting", "saes", "evaluation",
    "baselines", "entries", "comparing", "contest", "standings", "running", "report", "specimens", "heads",
    "exhibits", "evaluating", "judging", "ablating", "fragments", "visiting", "pages", "widgets", "webapp", "serving",
    "commands", "laboratory", "workshop", "cli",
]  # fmt: skip


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "elude_steer":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elude_steer."):
            found.add(node.module.split(".")[1])
    return found & set(ORDER)


def test_every_file_has_its_place():
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert files | {"evaluation"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_arrows_go_one_way(name):
    files = [PACKAGE / f"{name}.py"] if name != "evaluation" else list((PACKAGE / name).glob("*.py"))
    later = set().union(*map(imported, files)) - set(ORDER[: ORDER.index(name)]) - {name}
    assert not later, f"{name} imports {later}, which stand after it"


@pytest.mark.parametrize(
    "statement", ["import elude_steer", "import elude_steer.cli", "from elude_steer import AtlasSpec"]
)
def test_no_torch_is_loaded_before_it_is_needed(statement):
    heavy = "{'torch', 'transformers', 'numpy', 'sklearn', 'hdbscan'}"
    code = f"import sys; {statement}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_load():
    for name in elude_steer.__all__:
        assert getattr(elude_steer, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'stear'; it has steer, Steerer"):
        _ = elude_steer.stear
