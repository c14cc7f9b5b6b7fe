"""Files of a stranger: models, atlases, recipes and specs that bring code, which leaves a marker if it runs."""

import json
import shutil
from pathlib import Path

import yaml

from elude_steer.atlas.manifest import write_manifest
from elude_steer.toyland.scenes import write_scenes
from elude_steer.utils.files import resolve_id

COMMIT = "c" * 40
_AUTO = ("AutoConfig", "AutoModel", "AutoModelForImageTextToText", "AutoModelForImageClassification")


class Stranger:
    """Writes malicious files into a folder, or into a cache of the Hub that looks as if they had been downloaded.

    Args:
        folder: for the files, the marker, and recipes and specs.
        cache: the Hub's cache; None writes models and atlases as plain folders.
        claims: what specs and manifests say of `trust_remote_code`.
    """

    def __init__(self, folder: Path, cache: Path | None = None, *, claims: bool = True) -> None:
        self.folder, self.cache, self.claims = folder, cache, claims
        self.marker = folder / "the code ran"

    @property
    def code_ran(self) -> bool:
        return self.marker.exists()

    def model(self) -> str:
        """A model of a class that only its own code has."""
        name, folder = self._place("model")
        config = {"model_type": "stranger", "auto_map": {auto: f"stranger.{auto}" for auto in _AUTO}}
        self._write(folder, {"config.json": config, "stranger.py": self.code()})
        return name

    def disguised(self, shipped: str) -> str:
        """A copy of a shipped model that works without its code, and has some for every part."""
        name, folder = self._place(f"disguised-{shipped}")
        shutil.copytree(resolve_id(f"toyland/{shipped}"), folder, dirs_exist_ok=True)
        maps = {
            "config.json": {auto: f"stranger.{auto}" for auto in _AUTO},
            "tokenizer_config.json": {"AutoTokenizer": ["stranger.Tokenizer", "stranger.Tokenizer"]},
            "processor_config.json": {"AutoProcessor": "stranger.Processor"},
        }
        for file, auto_map in maps.items():
            content = json.loads((folder / file).read_text())
            if "image_processor" in content:
                content["image_processor"]["auto_map"] = {"AutoImageProcessor": "stranger.ImageProcessor"}
            self._write(folder, {file: {**content, "auto_map": auto_map}})
        self._write(folder, {"stranger.py": self.code(), "custom_generate/generate.py": self.code()})
        return name

    def with_code_in(self, part: str) -> str:
        """A copy of toyland's captioner with code in one of its parts only."""
        name = self.disguised("captioner")
        folder = self._folder_of("disguised-captioner")
        for file in ("config.json", "tokenizer_config.json", "processor_config.json"):
            content = json.loads((folder / file).read_text())
            if file != f"{part}.json":
                content.pop("auto_map")
            if part != "image_processor" and "image_processor" in content:
                content["image_processor"].pop("auto_map")
            self._write(folder, {file: content})
        if part != "custom_generate":
            shutil.rmtree(folder / "custom_generate")
        return name

    def change_config(self, model: str, part: str, key: str, value: object) -> None:
        """Change the settings of a model, or of a part of it."""
        path = self._folder_of(model.split("/")[-1]) / "config.json"
        config = json.loads(path.read_text())
        (config if part == "model" else config[part])[key] = value
        path.write_text(json.dumps(config))

    def coco(self) -> tuple[str, str, str]:
        """The option that names images with COCO's files, as harmless as can be."""
        if not (self.folder / "scenes").exists():
            write_scenes(self.folder / "scenes", 8, 5, coco=True)
        return "--coco", str(self.folder / "scenes" / "instances.json"), str(self.folder / "scenes")

    def matcher(self) -> str:
        """A matcher whose module is its own."""
        name, folder = self._place("matcher")
        modules = [{"idx": 0, "name": "0", "path": "", "type": "stranger.Matcher"}]
        config = {"__version__": {"sentence_transformers": "6.0.0"}, "model_type": "SentenceTransformer"}
        files = {"modules.json": modules, "config_sentence_transformers.json": config, "config.json": {}}
        self._write(folder, {**files, "stranger.py": self.code()})
        return name

    def atlas(self, **parts: str) -> str:
        """Toyland's atlas with other models: `model`, `matcher` or `scorer`."""
        name, folder = self._place("atlas-" + "-".join(parts))
        shutil.copytree(resolve_id("toyland/atlas"), folder, dirs_exist_ok=True)
        about = json.loads((folder / "manifest.json").read_text())
        about = {key: value for key, value in about.items() if key not in ("format", "files", "checksum")}
        about["spec"] = self._change(about["spec"], parts)
        about["model"]["id"] = about["spec"]["model"]["id"]
        write_manifest(folder, about)
        return name

    def spec(self, name: str = "spec.yaml", **parts: str) -> str:
        """Toyland's build spec with other models."""
        spec = yaml.safe_load((Path(__file__).parents[2] / "recipes" / "atlases" / "toyland.yaml").read_text())
        return self._document(name, self._change(spec, parts))

    def recipe(self, **parts: str) -> str:
        """A steering recipe that names an atlas of the stranger's; it can be exported, too."""
        image = Path(__file__).parents[2] / "demos" / "images" / "toyland-dog.png"
        shutil.copy(image, self.folder)
        settings = {"mode": "scale", "nu": "all"}
        steps = [{"minus": ["dog"], "settings": settings}]
        return self._document(
            "recipe.yaml", {"name": "innocent", "atlas": self.atlas(**parts), "image": image.name, "steps": steps}
        )

    def _change(self, spec: dict, parts: dict[str, str]) -> dict:
        for part, id in parts.items():
            section, key = ("labels", "scorer") if part == "scorer" else (part, "id")
            spec[section] = {**spec[section], key: id}
            if part != "scorer":
                spec[section]["trust_remote_code"] = self.claims
        return spec

    def _document(self, name: str, content: dict) -> str:
        path = self.folder / name
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return str(path)

    def _place(self, name: str) -> tuple[str, Path]:
        """What one types to load something, and the folder of its files."""
        folder = self._folder_of(name)
        folder.mkdir(parents=True, exist_ok=True)
        if self.cache is None:
            return str(folder), folder
        ref = self.cache / f"models--stranger--{name}" / "refs" / "main"
        ref.parent.mkdir(exist_ok=True)
        ref.write_text(COMMIT)
        return f"stranger/{name}", folder

    def _folder_of(self, name: str) -> Path:
        if self.cache is None:
            return self.folder / name
        return self.cache / f"models--stranger--{name}" / "snapshots" / COMMIT

    def _write(self, folder: Path, files: dict) -> None:
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")

    def code(self) -> str:
        """It stops at once, so that a test with permission takes no longer than one without."""
        return f"from pathlib import Path\n\nPath({str(self.marker)!r}).touch()\nraise RuntimeError('the code ran')\n"


def save_tiny_matcher(folder: Path) -> Path:
    """Save a matcher that is a transformer, of random weights and without code."""
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    config = BertConfig(
        vocab_size=40_000, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    BertModel(config).save_pretrained(folder)
    tokenizer = str(Path(resolve_id("toyland/matcher")) / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder
