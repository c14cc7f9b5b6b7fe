import ast
import subprocess
import sys
from pathlib import Path

import pytest

import elude_steer

PACKAGE = Path(elude_steer.__file__).parent

# The parts of the package in the order of the data: each imports only itself and what stands before it.
ORDER = (
    "errors", "trust", "utils", "specs", "recipe_files", "method", "toyland", "photoland", "models", "atlas",
    "steering", "evaluation", "demo", "server", "cli",
)  # fmt: skip
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, anywhere in it, as paths without a suffix."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "elude_steer":
            inside = node.module.split(".")[1:]
            for alias in node.names:
                whole = "/".join([*inside, alias.name])
                found.add(whole if whole in MODULES else "/".join(inside) or alias.name)
        elif isinstance(node, ast.Import):
            found |= {a.name.replace(".", "/")[12:] for a in node.names if a.name.startswith("elude_steer.")}
    return found - {""}


def test_every_part_has_its_place():
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "__main__"} == set(ORDER)


@pytest.mark.parametrize("module", [name for name in MODULES if name.split("/")[0] in ORDER])
def test_arrows_go_one_way(module):
    part = module.split("/")[0]
    allowed = {*ORDER[: ORDER.index(part) + 1], "__version__"}
    later = {name for name in imported(PACKAGE / f"{module}.py") if name.split("/")[0] not in allowed}
    assert not later, f"{module} imports {later}, which stand after {part}"


def test_no_module_needs_itself():
    graph = {name: imported(PACKAGE / f"{name}.py") & set(MODULES) for name in MODULES}
    while free := [name for name, needs in graph.items() if not needs & set(graph)]:
        for name in free:
            del graph[name]
    assert not graph, f"these modules import each other in a circle: {sorted(graph)}"


def test_the_house_is_as_small_as_it_should_be():
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    files = [path for path in PACKAGE.iterdir() if path.is_file()]
    assert len(folders) <= 11 and len(files) <= 8
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert len([path for path in folder.glob("*.py") if path.stem != "__init__"]) <= 12, folder
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 450, path


@pytest.mark.parametrize(
    "statement",
    [
        "import elude_steer",
        "import elude_steer.cli",
        "from elude_steer import AtlasSpec",
        "from elude_steer import specs",
    ],
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


def test_names_that_moved_into_a_namespace_are_still_found():
    for name in ("AtlasSpec", "TokensSpec", "ClustersSpec", "SplitSpec", "ReferencesSpec", "LabelsSpec", "MatcherSpec"):
        assert getattr(elude_steer, name) is getattr(elude_steer.specs, name)
