"""Code of strangers runs only if the caller allows it: every command and function that loads anything is attacked.

A new command fails `test_no_command_is_forgotten` until `WALK` says how a stranger could reach it.
"""

import ast
import shutil
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from huggingface_hub import constants
from torch import nn

import elude_steer as es
from elude_steer.atlas.build import pipeline
from elude_steer.cli.entry_point import cli
from elude_steer.errors import AtlasError, EludeSteerError, ImageError
from elude_steer.evaluation.compare.run import Comparison
from elude_steer.models.dual_encoder import load_dual_encoder
from elude_steer.models.images import image_set, open_image
from elude_steer.models.matcher import load_matcher
from elude_steer.models.vision import load_timm, load_vision
from elude_steer.recipe_files import load_spec
from elude_steer.specs import LabelsSpec
from elude_steer.trust import UntrustedCodeError
from elude_steer.utils.files import resolve_id
from elude_steer.utils.parallel import launch
from tests.helpers.strangers import COMMIT, Stranger, save_tiny_matcher
from tests.helpers.tiny import save_classifier

ROOT = Path(__file__).parents[1]
IMAGE = str(ROOT / "demos" / "images" / "toyland-dog.png")
IMAGES = ("--images", "toyland:7")
COMPARE = ("--work", "{out}", "--out", "{out}-2", "--small", "--processes", "1", "--method", "ELUDe (gap)")
TABLES = ("--limit", "4", "--held-out-limit", "4", "--work", "{out}", "--out", "{out}-2", "--method", "raw units")
BENCHMARK = ("--minus", "dog", "--limit", "2", "--no-controls", "--work", "{out}")
BENCHMARKS = {**dict.fromkeys(("absent", "chair", "side-effects"), BENCHMARK), "pope": (*BENCHMARK, "--per-image", "1")}
REPRODUCE = ("--images", "toyland:7", "--limit", "8", "--preset", "tiny", "--work", "{out}", "--out", "{out}-2")
EXPORT = ("--set", "mode=scale", "--set", "nu=all")
BACKBONE = "dinov2-base-layer12"
INTERPRET = ("interpretability", "--backbones", BACKBONE)
JUDGE = ("--judge", "nobody@http://127.0.0.1:9/v1")


def backbone(stranger):
    """The options that run a table on a tiny model without code."""
    folder = save_classifier(stranger.folder / "benign", ("a", "b")) / "backbone"
    return "interpretability", "--backbones", f"{BACKBONE}={folder}", "--set", "model.layer=1.mlp.fc2"


# command -> attacks; of each the arguments, which the stranger's files are part of. `{out}` is a new folder.
WALK = {
    "ablate": {
        "model": lambda s: (s.spec(model=s.model()), *IMAGES, "--work", "{out}"),
        "scorer": lambda s: (s.spec(scorer=s.model()), *IMAGES, "--work", "{out}"),
        "option": lambda s: (s.spec(), "--set", f"model.id={s.model()}", *IMAGES, "--work", "{out}"),
    },
    "atlases calibrate": {
        "model": lambda s: (s.atlas(model=s.model()), *IMAGES, "--out", "{out}"),
        "scorer": lambda s: (s.atlas(scorer=s.model()), *IMAGES, "--out", "{out}"),
    },
    "atlases check": {
        "model": lambda s: (s.atlas(model=s.model()),),
        "option": lambda s: ("toyland", "--model", s.model()),
    },
    **{
        f"benchmark {name}": {
            "model": lambda s, more=more: (*s.coco(), *more, "--atlas", s.atlas(model=s.model())),
            "matcher": lambda s, more=more: (*s.coco(), *more, "--atlas", s.atlas(matcher=s.matcher())),
            "option": lambda s, more=more: (*s.coco(), *more, "--model", s.model()),
        }
        for name, more in BENCHMARKS.items()
    },
    "build": {
        "model": lambda s: (s.spec(model=s.model()), "--out", "{out}"),
        "scorer": lambda s: (s.spec(scorer=s.model()), "--out", "{out}"),
        "option": lambda s: (s.spec(), "--set", f"model.id={s.model()}", "--out", "{out}"),
    },
    "caption": {"model": lambda s: (IMAGE, "--model", s.model())},
    "compare": {
        "model": lambda s: (s.spec(model=s.model()), *IMAGES, "--held-out", "toyland:8", *TABLES),
        "head": lambda s: (s.spec(), *IMAGES, "--held-out", "toyland:8", *TABLES, "--head", s.model()),
    },
    "concepts": {"matcher": lambda s: (s.atlas(matcher=s.matcher()), "--like", "puppy")},
    "demo": {
        "model": lambda s: ("--atlas", s.atlas(model=s.model()), "--no-browser"),
        "matcher": lambda s: ("--atlas", s.atlas(matcher=s.matcher()), "--no-browser"),
        "option": lambda s: ("--atlas", "toyland", "--model", s.model(), "--no-browser"),
    },
    "evaluate": {
        "model": lambda s: (s.atlas(model=s.model()), *IMAGES, "--limit", "4"),
        "option": lambda s: ("toyland", "--model", s.model(), *IMAGES, "--limit", "4"),
        "head": lambda s: ("toyland", "--head", s.model(), *IMAGES, "--limit", "4", "--measures", "faithfulness"),
    },
    "export": {
        "model": lambda s: (s.recipe(model=s.model()), "{out}"),
        "matcher": lambda s: (s.recipe(matcher=s.matcher()), "{out}"),
        "option": lambda s: ("toyland-dog", "{out}", *EXPORT, "--model", s.model()),
        "atlas": lambda s: ("toyland-dog", "{out}", *EXPORT, "--atlas", s.atlas(matcher=s.matcher())),
    },
    "judge": {"model": lambda s: (s.atlas(model=s.model()), *IMAGES, "--limit", "9", *JUDGE, "--yes")},
    "reproduce": {
        "option": lambda s: ("interpretability", "--backbones", f"{BACKBONE}={s.model()}", *REPRODUCE),
        "plan": lambda s: ("interpretability", "--backbones", f"{BACKBONE}={s.model()}", "--plan", *REPRODUCE),
        "set": lambda s: (*INTERPRET, "--set", f"model.id={s.model()}", *REPRODUCE),
        "head": lambda s: (*backbone(s), "--head", f"{BACKBONE}={s.model()}", "--rows", "raw units", *REPRODUCE),
        "atlas": lambda s: ("steering", "--recipe", "toyland-dog", "--atlas", s.atlas(model=s.model()), *REPRODUCE),
        "model": lambda s: ("steering", "--recipe", s.recipe(model=s.model()), *REPRODUCE),
        "matcher": lambda s: ("steering", "--recipe", s.recipe(matcher=s.matcher()), *REPRODUCE),
    },
    "run": {
        "model": lambda s: (s.recipe(model=s.model()),),
        "matcher": lambda s: (s.recipe(matcher=s.matcher()),),
        "option": lambda s: ("toyland-dog", "--atlas", s.atlas(matcher=s.matcher())),
    },
    "serve": {
        "model": lambda s: ("--atlas", s.atlas(model=s.model()), "--port", "0"),
        "matcher": lambda s: ("--atlas", s.atlas(matcher=s.matcher()), "--port", "0"),
        "option": lambda s: ("--atlas", "toyland", "--model", s.model(), "--port", "0"),
    },
    "steer": {
        "model": lambda s: (IMAGE, "--minus", "dog", "--atlas", s.atlas(model=s.model())),
        "matcher": lambda s: (IMAGE, "--minus", "dog", "--atlas", s.atlas(matcher=s.matcher())),
        "option": lambda s: (IMAGE, "--minus", "dog", "--model", s.model()),
    },
    "sweep": {
        "model": lambda s: (IMAGE, "--minus", "dog", "--atlas", s.atlas(model=s.model())),
        "matcher": lambda s: (IMAGE, "--minus", "dog", "--atlas", s.atlas(matcher=s.matcher())),
        "option": lambda s: (IMAGE, "--minus", "dog", "--model", s.model()),
    },
}

# Commands that load no model, or only those of the package: nothing that a stranger sends makes them run code, and they
# have no switch that would allow it.
NEVER = {
    "atlases list": lambda s: (),
    "atlases show": lambda s: (s.atlas(model=s.model(), matcher=s.matcher()),),
    "recipes check": lambda s: (s.recipe(model=s.model()), s.spec(model=s.model())),
    "recipes copy": lambda s: (s.recipe(model=s.model()), "{out}/"),
    "recipes list": lambda s: (),
    "recipes show": lambda s: (s.recipe(model=s.model()),),
    "toyland draw": lambda s: ("{out}", "--count", "1"),
    "env": lambda s: (),
}
# Options and arguments, by their names in Python, that can name a model: of each command, each has an attack.
NAMING = {
    "atlas", "atlases", "backbones", "changes", "files", "head", "heads", "model", "name", "recipe", "recipes",
    "settings", "spec",
}  # fmt: skip
# Those that name something else, or of which nothing is loaded by a library that could run code.
OTHERS = {
    "address", "again", "api_keys", "auth", "captions", "coco", "device", "device_map", "grids", "heatmap", "held_out",
    "host", "image", "images", "judges", "like", "measures", "methods", "minus", "nu", "out", "plot", "plus", "preset",
    "prompt", "report", "resources", "revision", "rows", "scenes", "seeds", "synonyms", "target", "varied", "where",
    "work", "write",
}  # fmt: skip
# `--set` of settings that are none of a build, the name under which a server offers a model, and recipes of which it
# takes the edits alone.
NOT_NAMING = {("atlases calibrate", "settings"), ("export", "changes"), ("serve", "name"), ("serve", "recipes")}
EXTRAS = {"demo": "gradio", "serve": "fastapi"}  # without these the command ends before it loads anything
HAS_NO_NAMES = (click.Choice, click.types.IntParamType, click.types.FloatParamType)
CASES = [(command, attack) for command, attacks in WALK.items() for attack in attacks]


def commands(command=cli, name=""):
    """All commands that do something, by the words that call them."""
    if not isinstance(command, click.Group):
        return {name: command}
    return {
        path: found
        for word in command.commands
        for path, found in commands(command.commands[word], f"{name} {word}".strip()).items()
    }


@pytest.fixture(autouse=True)
def separate_folders(tmp_path, monkeypatch):
    """Everything that is written, code of models too, lies in the folder of the test, and there is no network."""
    import transformers.dynamic_module_utils as dynamic

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    (tmp_path / "hub").mkdir()


@pytest.fixture(params=["folder", "hub"])
def stranger(request, tmp_path):
    """Whose files are folders that somebody unzipped, or repositories in the Hub's cache."""
    return Stranger(tmp_path / "here", tmp_path / "hub" if request.param == "hub" else None)


@pytest.fixture
def attack(run, tmp_path):
    def call(command, arguments, *more):
        if (package := EXTRAS.get(command)) and not find_spec(package):
            pytest.skip(f"{package} is not installed, so '{command}' loads nothing")
        return run(*command.split(), *(text.replace("{out}", str(tmp_path / "out")) for text in arguments), *more)

    return call


def test_no_command_is_forgotten():
    assert set(commands()) == {*WALK, *NEVER}
    assert not set(WALK) & set(NEVER)


def attacked_parameters(command, attack, folder):
    """The options and arguments of a command through which an attack reaches it."""
    folder.mkdir()
    stranger = Stranger(folder)
    found = commands()[command]
    parser = found.make_parser(click.Context(found, help_option_names=["-h", "--help"]))  # which click keeps
    given, _, _ = parser.parse_args([text.replace("{out}", "out") for text in attack(stranger)])
    return {(command, name) for name, value in given.items() if str(folder) in str(value)}


def test_no_option_is_forgotten(tmp_path):
    texts = {
        (name, parameter.name)
        for name, found in commands().items()
        for parameter in found.params
        if not getattr(parameter, "is_flag", False) and not isinstance(parameter.type, HAS_NO_NAMES)
    }
    assert {name for _, name in texts} <= NAMING | OTHERS, "a new option: can it name a model?"
    naming = {(command, name) for command, name in texts if name in NAMING} - NOT_NAMING
    attacks = [(command, attack) for command, kinds in WALK.items() for attack in kinds.values()] + [*NEVER.items()]
    attacked = set().union(*(attacked_parameters(*pair, tmp_path / str(number)) for number, pair in enumerate(attacks)))
    assert not sorted(naming - attacked)


def test_commands_that_load_models_have_the_switch_and_no_others():
    switches = {name: [p for p in found.params if p.name == "trust_remote_code"] for name, found in commands().items()}
    assert {name for name, options in switches.items() if options} == set(WALK)
    for (option,) in filter(None, switches.values()):
        assert option.is_flag and not option.envvar and option.get_default(click.Context(cli)) is False


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_no_command_runs_code_of_strangers(command, kind, stranger, attack):
    code, _, err = attack(command, WALK[command][kind](stranger))
    assert not stranger.code_ran
    assert code == 1 and "--trust-remote-code" in err, err


@pytest.mark.parametrize(("command", "kind"), [case for case in CASES if case[1] in ("model", "matcher")])
def test_no_command_runs_code_that_no_file_announces(command, kind, tmp_path, attack):
    """The spec says that nothing is needed, so it is the library that wants to run the code."""
    stranger = Stranger(tmp_path / "here", claims=False)
    code, _, err = attack(command, WALK[command][kind](stranger))
    assert not stranger.code_ran
    assert code == 1 and "brings code of its own" in err and "--trust-remote-code" in err, err


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_commands_run_it_if_the_caller_says_so(command, kind, stranger, attack):
    code, _, err = attack(command, WALK[command][kind](stranger), "--trust-remote-code")
    assert stranger.code_ran, err
    assert code == 1 and "the code ran" in err, err


@pytest.mark.parametrize("command", NEVER)
def test_the_other_commands_run_no_code(command, stranger, attack):
    code, _, err = attack(command, NEVER[command](stranger))
    assert not stranger.code_ran
    assert code == 0 or (command == "atlases show" and stranger.cache), err  # which shows only what was installed


# The commands above go through most functions; these are what one calls in Python.
PYTHON = {
    "steer": lambda s, **o: es.steer(IMAGE, minus="dog", atlas=s.atlas(matcher=s.matcher()), **o),
    "Steerer.load": lambda s, **o: es.Steerer.load(s.atlas(model=s.model()), **o),
    "Steerer.load with a model": lambda s, **o: es.Steerer.load("toyland", model=s.model(), **o),
    "Atlas.matcher": lambda s, **o: es.Atlas.load(s.atlas(matcher=s.matcher())).matcher(**o),
    "Atlas.search": lambda s, **o: es.Atlas.load(s.atlas(matcher=s.matcher())).search("dog", **o),
    "Vlm.load": lambda s, **o: es.Vlm.load(s.model(), **o),
    "build": lambda s, **o: es.build(s.spec(model=s.model()), out=s.folder / "out", **o),
    "build from a spec": lambda s, **o: es.build(load_spec(s.spec(model=s.model())), out=s.folder / "out", **o),
    "disentangle": lambda s, **o: es.disentangle(
        nn.Sequential(nn.Linear(4, 3)), layer="0", images=torch.rand(9, 2, 4), out=s.folder / "out", quiet=True,
        labels=LabelsSpec(scorer=s.model(), vocabulary="toyland"), **o,
    ),
    "evaluate": lambda s, **o: es.evaluate(s.atlas(model=s.model()), images="toyland:7", limit=3, **o),
    "load_vision": lambda s, **o: load_vision(s.model(), layer="fc2", **o),
    "load_matcher": lambda s, **o: load_matcher(s.matcher(), **o),
    "load_dual_encoder": lambda s, **o: load_dual_encoder(s.model(), **o),
}  # fmt: skip


@pytest.mark.parametrize("claims", [True, False], ids=["needs", "needs nothing"])
@pytest.mark.parametrize("name", PYTHON)
def test_functions_run_code_only_if_the_caller_says_so(name, claims, tmp_path):
    stranger = Stranger(tmp_path / "here", claims=claims)
    for refused in ({}, {"trust_remote_code": False}, {"trust_remote_code": None}, {"trust_remote_code": "yes"}):
        with pytest.raises(UntrustedCodeError, match=r"code of its own, which does not run .*trust_remote_code=True"):
            PYTHON[name](stranger, **refused)
    assert not stranger.code_ran
    with pytest.raises(EludeSteerError, match="the code ran"):
        PYTHON[name](stranger, trust_remote_code=True)
    assert stranger.code_ran


@pytest.mark.parametrize(
    "part", ["config", "tokenizer_config", "processor_config", "image_processor", "custom_generate"]
)
def test_no_part_of_a_model_brings_code_in(part, stranger):
    """The model works without its code, so nothing is refused, and nothing runs."""
    model = stranger.with_code_in(part)
    vlm = es.Vlm.load(model, layer="layers.5.mlp.fc2")
    assert vlm.caption([open_image(IMAGE)], max_new_tokens=3) and not stranger.code_ran
    if part == "processor_config":  # its class is known by the model's type, so its code is not used at all
        return
    with pytest.raises(EludeSteerError, match="the code ran"):
        es.Vlm.load(model, layer="layers.5.mlp.fc2", trust_remote_code=True)
    assert stranger.code_ran


def test_a_dual_encoder_that_works_without_its_code(stranger):
    scorer = stranger.disguised("labeller")
    assert load_dual_encoder(scorer).embed_texts(["dog"]).shape[0] == 1 and not stranger.code_ran


def test_permission_is_for_one_call(tmp_path):
    """A matcher that was loaded with permission is not handed to whoever asks without."""
    stranger = Stranger(tmp_path / "here", claims=False)
    matcher = stranger.matcher()
    with pytest.raises(EludeSteerError, match="the code ran"):
        load_matcher(matcher, trust_remote_code=True)
    with pytest.raises(UntrustedCodeError):
        load_matcher(matcher)


def test_processes_of_a_build_are_told_what_the_caller_said(tmp_path, monkeypatch):
    stranger, started = Stranger(tmp_path / "here"), []
    monkeypatch.setattr(pipeline, "launch", lambda count, arguments: started.append(arguments))
    for allowed in (False, True):
        with pytest.raises(AtlasError):  # nobody built it
            es.build(stranger.spec(model="x"), out=tmp_path / "out", processes=2, trust_remote_code=allowed)
    assert ["--trust-remote-code" in arguments for arguments in started] == [False, True]


def test_processes_of_a_build_refuse_the_code_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "launch", lambda _, arguments: launch(1, arguments))  # one takes half the time
    stranger = Stranger(tmp_path / "here", claims=False)
    with pytest.raises(EludeSteerError, match=r"model' brings code of its own, .* --trust-remote-code"):
        es.build(stranger.spec(model=stranger.model()), out=tmp_path / "out", processes=2)
    assert not stranger.code_ran


def test_compare_loads_what_comes_with_the_package(stranger, monkeypatch, attack):
    """Although the folder in which it runs has a spec of the same name."""
    stranger.spec("toyland", scorer=stranger.model(), model=stranger.model())
    seen = []
    monkeypatch.setattr(Comparison, "run", lambda self, *_: seen.extend([self.vlm.id, self.vocabulary.encoder.id]))
    monkeypatch.setattr("elude_steer.evaluation.compare.table.write_results", lambda *_: "written")
    code, _, err = attack("compare", COMPARE)
    assert code == 0 and not stranger.code_ran, err
    assert seen == [resolve_id("toyland/captioner"), "toyland/labeller"]


# What the gate knows without the libraries that are not installed here.


def test_kernels_of_the_hub_are_code():
    with pytest.raises(UntrustedCodeError, match="captioner' brings the kernel 'stranger/kernel', which"):
        es.Vlm.load("toyland/captioner", attn_implementation="stranger/kernel")


@pytest.mark.parametrize("value", ["stranger/kernel", {"vision_config": "stranger/kernel@main:run"}])
@pytest.mark.parametrize("part", ["model", "vision_config"])
def test_kernels_that_the_settings_of_a_model_name_are_code(part, value, stranger):
    model = stranger.with_code_in("nothing")
    stranger.change_config(model, part, "_attn_implementation", value)
    with pytest.raises(UntrustedCodeError, match="disguised-captioner' brings the kernel 'stranger/kernel"):
        es.Vlm.load(model)


def test_kernels_that_the_settings_of_a_matcher_name_are_code(tmp_path):
    stranger = Stranger(tmp_path / "here")
    matcher = stranger.matcher()
    (Path(matcher) / "config.json").write_text('{"_attn_implementation": "stranger/kernel"}')
    with pytest.raises(UntrustedCodeError, match="matcher' brings the kernel 'stranger/kernel"):
        load_matcher(matcher)


@pytest.mark.parametrize(
    ("id", "refused"),
    [
        ("vit_base_patch16_224", False),
        ("timm/vit_base_patch16_224", False),
        ("hf-hub:timm/vit_base_patch16_224", False),
        ("local-dir:safe", False),
        ("local-dir:pickled", True),
        ("hf-hub:stranger/vit", True),
        ("hf_hub:stranger/vit", True),
        ("HF-HUB:timm/vit", True),
        (" hf-hub:stranger/vit", True),
    ],
)
def test_timm_gets_no_pickles_of_strangers(id, refused, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=lambda name, **_: asked.append(name)))
    for name, file in (("safe", "model.safetensors"), ("pickled", "pytorch_model.bin")):
        (tmp_path / "here" / name).mkdir()
        (tmp_path / "here" / name / file).touch()
    with pytest.raises(EludeSteerError, match="may be a pickle" if refused else "could not be loaded"):
        load_timm(id, layer="fc2")
    assert asked == ([] if refused else [id])
    with pytest.raises(EludeSteerError, match="could not be loaded"):
        load_timm(id, layer="fc2", trust_remote_code=True)
    assert asked[-1] == id


@pytest.mark.parametrize(
    ("id", "weights", "refused"),
    [
        ("ViT-B-32", "openai", None),
        ("ViT-B-32", "weights.safetensors", None),
        ("ViT-B-32", "weights.pt", "the pickle 'weights.pt'"),
        ("hf-hub:stranger/clip", None, "settings of its own"),
        ("local-dir:clip", None, "settings of its own"),
    ],
)
def test_open_clip_gets_no_settings_or_pickles_of_strangers(id, weights, refused, tmp_path, monkeypatch):
    asked = []
    names = {"list_models": lambda: ["ViT-B-32"], "get_pretrained_cfg": lambda _id, tag: tag == "openai"}
    names["create_model_from_pretrained"] = lambda name, *_, **__: asked.append(name)
    monkeypatch.setitem(sys.modules, "open_clip", SimpleNamespace(**names))
    for name in ("weights.safetensors", "weights.pt"):
        (tmp_path / "here" / name).touch()
    with pytest.raises(EludeSteerError, match=refused or "could not be loaded"):
        load_dual_encoder(id, library="open_clip", pretrained=weights)
    assert asked == ([] if refused else [id])
    with pytest.raises(EludeSteerError, match="could not be loaded"):
        load_dual_encoder(id, library="open_clip", pretrained=weights, trust_remote_code=True)
    assert asked[-1] == id


def test_readers_of_files_are_no_datasets(monkeypatch):
    """One of those that come with the library reads pickles of the current folder."""
    asked = []
    data = SimpleNamespace(column_names=["image"], _fingerprint="1", __len__=lambda: 0)
    load = lambda id, **options: asked.append((id, options)) or data  # noqa: E731
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load, load_dataset_builder=load))
    for kind in ("hf", "hf-stream"):
        with pytest.raises(ImageError, match=rf"dataset 'pandas' has no owner; write images\.source: {kind}:OWNER/pa"):
            image_set(f"{kind}:pandas")
    with suppress(TypeError):  # it has no length
        image_set("hf:somebody/photos")
    assert asked == [("somebody/photos", {"split": "train"})]


def test_pickled_weights_are_not_read(tmp_path):
    """Of a model, a dual encoder and a matcher; the pickle would leave a file."""
    import pickle

    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "here" / "exploded",)

    for shipped, load in (("captioner", es.Vlm.load), ("labeller", load_dual_encoder)):
        folder = tmp_path / "here" / shipped
        shutil.copytree(resolve_id(f"toyland/{shipped}"), folder)
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(EludeSteerError, match=r"no file named model\.safetensors"):
            load(str(folder))
    matcher = save_tiny_matcher(tmp_path / "here" / "matcher")
    assert load_matcher(str(matcher)).embed(["dog"]).shape == (1, 8)
    (matcher / "model.safetensors").unlink()
    (matcher / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(EludeSteerError, match=r"no file named model\.safetensors"):
        load_matcher(str(matcher), device="cpu:0")  # another device, because matchers are loaded once in a process
    assert not (tmp_path / "here" / "exploded").exists()


def test_a_pinned_atlas_is_that_commit_or_nothing(tmp_path):
    stranger = Stranger(tmp_path / "here", tmp_path / "hub")
    name = stranger.atlas(matcher=stranger.matcher())
    assert es.Atlas.load(name).commit == es.Atlas.load(name, revision=COMMIT).commit == COMMIT
    assert es.Atlas.load(name, revision="main").commit == COMMIT
    with pytest.raises(AtlasError, match=f"'{name}' is neither installed nor on the Hub"):
        es.Atlas.load(name, revision="d" * 40)


# The shape of the source.

LOADERS = {
    "from_pretrained", "SentenceTransformer", "CrossEncoder", "create_model", "create_model_from_pretrained",
    "create_model_and_transforms", "get_tokenizer", "load_dataset", "load_from_disk", "get_class_from_dynamic_module",
    "load_dataset_builder", "from_config", "pipeline",
}  # fmt: skip
PICKLES = {"torch", "pickle", "joblib", "hub", "dill", "cloudpickle"}  # whose `load` and `loads` run code
SOURCES = {
    path.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    for path in (ROOT / "elude_steer").rglob("*.py")
}


def last_name(node):
    """`load` of `torch.load`, `open` of `open`, None of anything but a name."""
    return getattr(node, "attr", None) or getattr(node, "id", None)


def test_every_loader_passes_the_gate():
    """Loaders of other libraries are only named as the first argument of `call_loader`."""
    through, around = set(), []
    for source, nodes in SOURCES.items():
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        gated = {id(call.args[0]) for call in calls if last_name(call.func) == "call_loader" and call.args}
        for node in nodes:
            name = last_name(node) or ""
            if (name in LOADERS or name.startswith("AutoPeftModel")) and isinstance(node.ctx, ast.Load):
                through.add(last_name(node)) if id(node) in gated else around.append((source, node.lineno))
    assert not around
    assert through >= {"from_pretrained", "SentenceTransformer", "create_model", "load_dataset"}  # the test finds some


def reads_pickles(node):
    """Whether a piece of code names one of the other ways to a pickle, or to YAML that makes any object."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] in PICKLES - {"hub"} and bool(
            {"load", "loads", "Unpickler", "hub"} & {alias.name for alias in node.names}
        )
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("yaml.load", "yaml.load_all"):
        loader = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "Loader"]
        return loader not in (["yaml.BaseLoader"], ["yaml.SafeLoader"])
    return last_name(node) in {
        "Unpickler",
        "read_pickle",
        "unsafe_load",
        "unsafe_load_all",
        "full_load",
        "UnsafeLoader",
        "shelve",
    }


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from torch import load", True),
        ("from torch import nn, load as read", True),
        ("from pickle import Unpickler", True),
        ("from torch.hub import load", True),
        ("pickle.Unpickler(file).load()", True),
        ("pandas.read_pickle(path)", True),
        ("yaml.load(text, Loader=Loader)", True),
        ("yaml.unsafe_load(text)", True),
        ("import shelve; shelve.open(path)", True),
        ("from json import load, loads", False),
        ("from torch import nn", False),
        ("yaml.safe_load(text)", False),
        ("yaml.load(text, Loader=yaml.BaseLoader)", False),
        ("json.loads(text)", False),
    ],
)
def test_other_ways_to_a_pickle_are_seen(code, found):
    assert any(map(reads_pickles, ast.walk(ast.parse(code)))) is found


def test_nothing_reads_a_pickle():
    """But what a build sends to its own workers on Ray or SLURM, which pickle all that they carry."""
    for source, nodes in SOURCES.items():
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in ("load", "loads"):
                if source.startswith("elude_steer/atlas/build/launchers/") and last_name(node.value) == "cloudpickle":
                    continue
                assert last_name(node.value) not in PICKLES, f"{source}:{node.lineno}"
            assert not reads_pickles(node), f"{source}:{node.lineno}"
            assert not (isinstance(node, ast.keyword) and node.arg == "allow_pickle"), (
                f"{source}: NumPy's default is no"
            )


# Of these objects, it is what their maker was given as an argument.
ALLOWED = {"False"} | {f"{owner}trust_remote_code" for owner in ("", "build.", "origin.", "options.", "setup.")}


def test_permission_is_passed_on_as_the_caller_gave_it():
    """Never what a spec says: each `trust_remote_code=` is the argument of that name, or False."""
    passed = []
    for source, nodes in SOURCES.items():
        for node in nodes:
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                passed.append(ast.unparse(node.value))
            elif isinstance(node, ast.FunctionDef):
                arguments = node.args.posonlyargs + node.args.args
                pairs = [*zip(arguments[::-1], node.args.defaults[::-1], strict=False)]
                pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                defaults = {ast.unparse(value) for one, value in pairs if one.arg == "trust_remote_code" and value}
                assert defaults <= {"False"}, f"{source}: {node.name}"
    assert len(passed) > 20 and set(passed) <= ALLOWED


def test_the_space_allows_nothing():
    assert "trust_remote_code" not in (ROOT / "demos" / "space" / "app.py").read_text(encoding="utf-8")
