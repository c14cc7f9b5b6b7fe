"""Collect what the Space of the demo needs, and upload it to the Hugging Face Hub.

    python demos/publish_space.py --out space                 # only collect; `python app.py` in that folder runs it
    python demos/publish_space.py you/elude-steer --private   # needs `hf auth login`

The package goes along, so that the Space works before the package is on PyPI.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from elude_steer.errors import EludeSteerError, StorageError
from elude_steer.utils.files import check_folder
from elude_steer.utils.hub import why_unreachable

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("elude_steer", "recipes", "demos/images")
FILES = ("LICENSE", "NOTICE")


def collect(folder: Path) -> Path:
    """Copy the page, the package, the recipes and the images into a new folder."""
    folder = check_folder(folder, new=True)
    shutil.copytree(ROOT / "demos" / "space", folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    return folder


def publish(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder as a Space; returns the address of the commit."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if problem := why_unreachable():
        raise StorageError(f"the Space was not uploaded: {problem}; connect to the Hub, or use --out FOLDER alone.")
    try:
        api = HfApi()
        api.create_repo(repo, repo_type="space", space_sdk="gradio", private=private, exist_ok=True)
        info = api.upload_folder(repo_id=repo, repo_type="space", folder_path=folder, commit_message="Upload the demo")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        cause = str(error).strip().splitlines()[0]
        raise StorageError(
            f"the Space was not uploaded to '{repo}' ({cause}); check the id (user/name), or log in: `hf auth login`."
        ) from error
    return str(info.commit_url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo", nargs="?", metavar="USER/NAME", help="id of the Space")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder to collect the files in")
    parser.add_argument("--private", action="store_true", help="only you can see the Space")
    arguments = parser.parse_args()
    if not arguments.repo and not arguments.out:
        parser.error("give the id of a Space, or a folder: --out FOLDER")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            folder = collect(arguments.out or Path(temporary) / "space")
            print(publish(folder, arguments.repo, private=arguments.private) if arguments.repo else folder)
        except EludeSteerError as error:
            parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
