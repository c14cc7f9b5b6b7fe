import shutil
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

from elude_steer.errors import EludeSteerWarning, ImageError, MissingPackageError, ModelError, SpecError
from elude_steer.models import dual_encoder
from elude_steer.models.dual_encoder import DualEncoder, EmbeddingCache, load_dual_encoder
from elude_steer.utils import optional
from tests.helpers.checks import run_in_own_environment

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
SENTENCE = "a photo of dog cat Dog the beach bird on red ball"
WORDS = [*SPECIAL, *SENTENCE.split()]
SIDE, PATCH = 28, 7


def images(count=3, seed=0):
    rng = np.random.default_rng(seed)
    sizes = [(40, 30), (30, 40), (28, 28)]
    return [Image.fromarray(rng.integers(0, 255, (*sizes[i % 3][::-1], 3), dtype=np.uint8)) for i in range(count)]


def tokenizer(**options):
    """A tokenizer of complete, case-sensitive words between two special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    marks = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **marks, **options)


def text_settings(positions, eos=3):
    marks = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": eos}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**sizes, **marks, "vocab_size": len(WORDS), "max_position_embeddings": positions}


VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = {**VISION, "image_size": SIDE, "patch_size": PATCH}
COLOURS = {"image_mean": [0.5] * 3, "image_std": [0.4] * 3}


def siglip(positions=24):
    from transformers import SiglipConfig, SiglipModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    text = {**text_settings(positions), "projection_size": 16}
    processor = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, **COLOURS)
    return SiglipModel(SiglipConfig(text_config=text, vision_config=SQUARE)), processor


def siglip2():
    from transformers import Siglip2Config, Siglip2Model
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    text = {**text_settings(80), "projection_size": 16}
    config = Siglip2Config(text_config=text, vision_config={**VISION, "num_patches": 16, "patch_size": PATCH})
    return Siglip2Model(config), Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=16, **COLOURS)


def clip():
    from transformers import CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = CLIPConfig(text_config=text_settings(12), vision_config=SQUARE, projection_dim=8)
    crop = {"height": SIDE, "width": SIDE}
    return CLIPModel(config), CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=crop, **COLOURS)


def save(folder, create, seed=0):
    torch.manual_seed(seed)
    model, processor = create()
    with torch.no_grad():  # freshly initialised weights hardly distinguish inputs
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {create.__name__: save(root / create.__name__, create) for create in (siglip, siglip2, clip)}


@pytest.fixture(scope="module")
def loaded(folders):
    return {name: load_dual_encoder(str(folder)) for name, folder in folders.items()}


def by_hand(folder):
    from transformers import AutoImageProcessor, AutoModel

    backend = "torchvision" if find_spec("torchvision") else "pil"
    return AutoModel.from_pretrained(folder).eval(), AutoImageProcessor.from_pretrained(folder, backend=backend)


def ids(texts, length):
    """The tokens of texts, padded to a length without the tokenizer."""
    rows = [[2, *(WORDS.index(word) if word in WORDS else 1 for word in text.split()), 3] for text in texts]
    rows = [row if len(row) <= length else [*row[: length - 1], 3] for row in rows]
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


@pytest.mark.parametrize("name", ["siglip", "siglip2", "clip"])
@torch.no_grad()
def test_image_vectors_equal_those_of_the_model(folders, loaded, name):
    model, processor = by_hand(folders[name])
    output = model.get_image_features(**processor(images=images(), return_tensors="pt"))
    vectors = loaded[name].embed_images(images())
    torch.testing.assert_close(vectors, F.normalize(output.pooler_output, dim=-1))
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    assert (vectors[0] - vectors[1:]).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("name", ["siglip", "siglip2", "clip"])
def test_a_vector_depends_on_its_image_only(loaded, name):
    together = loaded[name].embed_images(images(5))
    alone = torch.cat([loaded[name].embed_images([image]) for image in images(5)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_images_of_any_mode_are_converted_to_rgb(loaded):
    image = images(1)[0]
    for mode in ("L", "RGBA", "P", "1"):
        converted = image.convert(mode)
        rgb = loaded["siglip"].embed_images([converted.convert("RGB")])
        assert torch.equal(loaded["siglip"].embed_images([converted]), rgb)


@torch.no_grad()
def test_texts_of_siglip_are_lower_case_and_padded(folders, loaded, tmp_path):
    model = by_hand(folders["siglip"])[0]

    def features(**inputs):
        return F.normalize(model.get_text_features(**inputs).pooler_output, dim=-1)

    words = ["dog", "a photo of the Dog", "red Ball on BEACH", "dog " * 100]
    vectors = loaded["siglip"].embed_texts(words)
    lower = ids([word.lower() for word in words], 24)
    torch.testing.assert_close(vectors, features(input_ids=lower))
    # Each of these is wrong and gives another vector.
    assert (vectors - features(input_ids=ids(words, 24)))[1:3].abs().amax(1).min() > 1e-3
    assert (vectors[0] - features(input_ids=ids(words[:1], 3))).abs().max() > 1e-3
    assert (vectors - features(input_ids=lower, attention_mask=(lower != 0).long()))[0].abs().max() > 1e-3
    assert (vectors[0] - features(input_ids=lower[:1].roll(24 - 3, 1))).abs().max() > 1e-3
    # The tokenizer's own settings do not matter.
    folder = shutil.copytree(folders["siglip"], tmp_path / "left")
    tokenizer(padding_side="left", model_max_length=7).save_pretrained(folder)
    assert torch.equal(load_dual_encoder(str(folder)).embed_texts(words), vectors)


@torch.no_grad()
def test_texts_of_siglip2_have_64_tokens(folders, loaded):
    # transformers uses its own tokenizer class for this model, which splits our words into letters.
    model = by_hand(folders["siglip2"])[0]
    expected = model.get_text_features(input_ids=ids(["a", "a"], 64)).pooler_output
    torch.testing.assert_close(loaded["siglip2"].embed_texts(["a", "A"]), F.normalize(expected, dim=-1))


@torch.no_grad()
def test_siglip2_checkpoints_with_a_gemma_tokenizer(folders, tmp_path):
    """Most SigLIP2 checkpoints are of class SiglipModel with the tokenizer of Gemma, which pads on the left."""
    from transformers import GemmaTokenizer

    folder = shutil.copytree(folders["siglip"], tmp_path / "gemma")
    known = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", "d", "o", "g", "do", "dog"]
    words = {word: i for i, word in enumerate(known)}
    merges = [("d", "o"), ("do", "g")]
    GemmaTokenizer(vocab=words, merges=merges, add_bos_token=False, add_eos_token=True).save_pretrained(folder)
    tokens = [words[token] for token in ("dog", "▁", "d", "<eos>")]
    expected = by_hand(folder)[0].get_text_features(input_ids=torch.tensor([tokens + [0] * 20])).pooler_output
    torch.testing.assert_close(load_dual_encoder(str(folder)).embed_texts(["Dog D"]), F.normalize(expected, dim=-1))


@torch.no_grad()
def test_texts_of_clip_keep_their_case_and_are_cut_to_its_context(folders, loaded):
    model = by_hand(folders["clip"])[0]
    words = ["dog", "a photo of the Dog", "dog " * 100]
    expected = [model.get_text_features(input_ids=ids([word], 12)).pooler_output for word in words]
    torch.testing.assert_close(loaded["clip"].embed_texts(words), F.normalize(torch.cat(expected), dim=-1))
    different = loaded["clip"].embed_texts(["Dog", "dog"])
    assert (different[0] - different[1]).abs().max() > 0.01


def test_texts_are_embedded_in_batches(loaded, monkeypatch):
    sizes = []

    def count(words):
        sizes.append(len(words))
        return loaded["clip"].text_encoder(words)

    words = ["dog", "a cat", "the red ball on the beach", "bird", "a"]
    expected = loaded["clip"].embed_texts(words)
    monkeypatch.setattr(dual_encoder, "TEXT_BATCH", 2)
    torch.testing.assert_close(
        replace(loaded["clip"], text_encoder=count).embed_texts(words), expected, atol=1e-6, rtol=0
    )
    assert sizes == [2, 2, 1]


def test_models_may_return_a_plain_tensor(folders, monkeypatch):
    from transformers import CLIPModel

    encoder = load_dual_encoder(str(folders["clip"]))
    expected = encoder.embed_images(images())
    method = CLIPModel.get_image_features
    monkeypatch.setattr(CLIPModel, "get_image_features", lambda *args, **kwargs: method(*args, **kwargs).pooler_output)
    assert torch.equal(encoder.embed_images(images()), expected)


def test_other_dtypes_of_the_weights(folders, loaded):
    half = load_dual_encoder(str(folders["siglip"]), dtype="bfloat16")
    assert half.embed_images(images()).dtype == torch.float32
    torch.testing.assert_close(half.embed_images(images()), loaded["siglip"].embed_images(images()), atol=0.1, rtol=0)
    assert half.key != loaded["siglip"].key
    assert load_dual_encoder(str(folders["siglip"]), dtype="auto").key == loaded["siglip"].key


def test_the_key_changes_with_everything_that_vectors_depend_on(folders, loaded, tmp_path):
    def key_after(name, change):
        folder = shutil.copytree(folders["siglip"], tmp_path / name)
        change(folder)
        return load_dual_encoder(str(folder)).key

    def change_weight(folder):
        weights = load_file(folder / "model.safetensors")
        weights["logit_bias"] += 1
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def replace_text(file, old, new):
        def change(folder):
            text = (folder / file).read_text(encoding="utf-8")
            assert old in text
            (folder / file).write_text(text.replace(old, new), encoding="utf-8")

        return change

    assert key_after("same", lambda folder: None) == loaded["siglip"].key
    keys = {
        loaded["siglip"].key,
        key_after("weights", change_weight),
        key_after("images", replace_text("preprocessor_config.json", "0.4", "0.5")),
        key_after("texts", replace_text("tokenizer.json", '"dog"', '"dig"')),
        key_after("config", replace_text("config.json", "gelu_pytorch_tanh", "relu")),
        loaded["siglip2"].key,
        loaded["clip"].key,
    }
    assert len(keys) == 7
    assert all(len(key) == 24 for key in keys)


def test_a_path_may_begin_with_the_home_folder(folders, loaded, monkeypatch):
    monkeypatch.setenv("HOME", str(folders["clip"].parent))
    encoder = load_dual_encoder("~/clip")
    assert encoder.id == "~/clip"
    assert encoder.key == loaded["clip"].key


def test_empty_lists_and_tensors_are_refused(loaded):
    with pytest.raises(ImageError, match="there are no images to embed"):
        loaded["clip"].embed_images([])
    with pytest.raises(SpecError, match="there are no words to embed"):
        loaded["clip"].embed_texts([])
    with pytest.raises(ImageError, match="a Tensor cannot be embedded; give PIL images"):
        loaded["clip"].embed_images([torch.zeros(3, 8, 8)])


def test_vectors_that_are_not_finite_raise(loaded):
    broken = replace(loaded["clip"], id="x", image_encoder=lambda images: torch.full((1, 4), torch.inf))
    with pytest.raises(ModelError, match="encoder 'x' gives vectors that are not finite; load it with dtype 'float32'"):
        broken.embed_images(images(1))


def test_a_model_without_a_text_encoder_is_refused(tiny_llava):
    text = "is a LlavaOnevisionModel without get_text_features: it cannot score .* use a SigLIP or CLIP model such as"
    with pytest.raises(ModelError, match=text):
        load_dual_encoder(str(tiny_llava))


def test_an_incomplete_checkpoint_is_refused(folders, tmp_path):
    folder = shutil.copytree(folders["clip"], tmp_path / "clip")
    weights = load_file(folder / "model.safetensors")
    del weights["text_projection.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"does not load completely: 1 missing keys \(first: 'text_projection.weight'\)"
    ):
        load_dual_encoder(str(folder))


def test_left_over_keys_of_old_checkpoints_are_accepted(folders, loaded, tmp_path):
    folder = shutil.copytree(folders["clip"], tmp_path / "clip")
    weights = load_file(folder / "model.safetensors")
    weights["text_model.embeddings.position_ids"] = torch.arange(12)[None]  # as openai/clip-vit-base-patch32 has it
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_dual_encoder(str(folder)).key == loaded["clip"].key


def test_load_errors_are_one_line(tmp_path):
    with pytest.raises(ModelError, match="there is no folder '/no/such/folder' to load a model from"):
        load_dual_encoder("/no/such/folder")
    with pytest.raises(ModelError, match=f"model '{tmp_path}' could not be loaded"):
        load_dual_encoder(str(tmp_path))
    with pytest.raises(ModelError, match="device 'nowhere' cannot be used here"):
        load_dual_encoder("x", device="nowhere")
    with pytest.raises(ModelError, match="dtype 'float31' is unknown"):
        load_dual_encoder("x", dtype="float31")


def test_arguments_of_the_other_library_are_refused():
    with pytest.raises(SpecError, match="pretrained 'webli' is for open_clip; set library: open_clip, or leave it out"):
        load_dual_encoder("x", pretrained="webli")
    with pytest.raises(SpecError, match="revision is for transformers; open_clip takes pretrained"):
        load_dual_encoder("x", library="open_clip", revision="main")
    text = r"library 'openclip' is unknown; use 'transformers' or 'open_clip'\. Did you mean 'open_clip'\?"
    with pytest.raises(SpecError, match=text):
        load_dual_encoder("x", library="openclip")


# open_clip itself needs its own environment: see the last test.


@pytest.mark.skipif(optional.is_installed("open_clip"), reason="open_clip is installed")
def test_a_missing_open_clip_raises_a_one_line_error():
    text = (
        r"scorer 'ViT-B-32' needs .*'open_clip', which is not .*`pip install 'elude-steer\[openclip\]'`, or set library"
    )
    with pytest.raises(MissingPackageError, match=text):
        load_dual_encoder("ViT-B-32", library="open_clip", pretrained="openai")


@pytest.mark.parametrize(
    ("id", "pretrained", "text"),
    [
        ("ViT-B-23", None, r"open_clip knows no model 'ViT-B-23'; .* Did you mean 'ViT-B-32'\?"),
        (
            "ViT-B-32",
            None,
            r"random weights unless pretrained names some; give one of 'openai', 'e31', or a file\.",
        ),
        ("ViT-B-32", "opneai", r"'ViT-B-32' has no weights 'opneai'; give one of .*\. Did you mean 'openai'\?"),
        ("ViT-S-32", None, r"unless pretrained names some; give a file\."),
    ],
)
def test_unknown_weights_of_open_clip_are_refused(monkeypatch, id, pretrained, text):
    tags = {"ViT-B-32": ["openai", "e31"], "ViT-S-32": []}
    stub = SimpleNamespace(
        list_models=lambda: list(tags),
        list_pretrained_tags_by_model=tags.__getitem__,
        get_pretrained_cfg=lambda model, tag: {"url": "x"} if tag in tags[model] else {},
    )
    monkeypatch.setattr(optional, "require", lambda *_: stub)
    with pytest.raises(SpecError, match=text):
        load_dual_encoder(id, library="open_clip", pretrained=pretrained)


# The cache, tested with an encoder that counts its calls and returns mean colours.


class MeanColour:
    def __init__(self):
        self.images = []

    def __call__(self, images):
        self.images += images
        return torch.tensor(np.array([np.asarray(image).mean((0, 1)) for image in images]))


def counting_encoder(key="k"):
    calls = MeanColour()
    return DualEncoder("counting", key, calls, calls), calls


def with_hashes(images):
    return [(image, f"{i:016d}".encode()) for i, image in enumerate(images)]


def test_each_image_is_embedded_once(tmp_path):
    encoder, calls = counting_encoder()
    hashed = with_hashes(images(4))
    expected = encoder.embed_images([image for image, _ in hashed])
    calls.images.clear()
    cache = EmbeddingCache(encoder, tmp_path)
    twice = [hashed[0], hashed[1], hashed[0]]
    assert torch.equal(cache.embed(twice), expected[[0, 1, 0]])
    assert len(calls.images) == 2
    assert torch.equal(cache.embed(hashed), expected)
    assert len(calls.images) == 4
    assert torch.equal(EmbeddingCache(encoder, tmp_path).embed(hashed[::-1]), expected.flip(0))
    assert len(calls.images) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["images-k.sqlite"]


def test_a_model_is_called_once_per_image(loaded, tmp_path):
    calls = []
    encoder = loaded["siglip"]
    counting = replace(encoder, image_encoder=lambda images: calls.append(len(images)) or encoder.image_encoder(images))
    first = EmbeddingCache(counting, tmp_path).embed(with_hashes(images(3)))
    assert torch.equal(EmbeddingCache(counting, tmp_path).embed(with_hashes(images(3))), first)
    assert calls == [1, 1, 1]  # one by one, so that a batch changes no bit
    assert torch.equal(first, torch.cat([encoder.embed_images([one]) for one in images(3)]))


def test_another_encoder_has_another_cache(tmp_path):
    first, _ = counting_encoder("one")
    second, calls = counting_encoder("two")
    EmbeddingCache(first, tmp_path).embed(with_hashes(images()))
    EmbeddingCache(second, tmp_path).embed(with_hashes(images()))
    assert len(calls.images) == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_the_default_folder_is_in_the_home_folder_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path))
    EmbeddingCache(counting_encoder()[0]).embed(with_hashes(images(1)))
    assert (tmp_path / "cache" / "images-k.sqlite").is_file()


def test_an_empty_list_is_refused_by_the_cache(tmp_path):
    with pytest.raises(ImageError, match="there are no images to embed"):
        EmbeddingCache(counting_encoder()[0], tmp_path).embed([])


def test_threads_share_a_cache(tmp_path):
    encoder, _ = counting_encoder()
    hashed = with_hashes(images(24))
    expected = encoder.embed_images([image for image, _ in hashed])
    shared = EmbeddingCache(encoder, tmp_path)

    def work(number):
        cache = shared if number % 2 else EmbeddingCache(encoder, tmp_path)
        order = np.random.default_rng(number).permutation(24)
        return all(torch.equal(cache.embed([hashed[i]])[0], expected[i]) for i in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    with sqlite3.connect(shared.path) as database:
        assert database.execute("SELECT count(*) FROM vectors").fetchone() == (24,)
    database.close()


def test_processes_share_a_cache(tmp_path):
    code = """
import sys
from pathlib import Path
from tests.models.test_dual_encoder import counting_encoder, images, with_hashes, EmbeddingCache
cache = EmbeddingCache(counting_encoder()[0], Path(sys.argv[1]))
for start in range(0, 60, 2):
    cache.embed(with_hashes(images(60))[start : start + 4])
"""
    command = [sys.executable, "-W", "error::UserWarning", "-c", code, str(tmp_path)]
    root = Path(__file__).parents[2]
    running = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        assert process.communicate(timeout=120)[1] == ""
        assert process.returncode == 0
    encoder, calls = counting_encoder()
    EmbeddingCache(encoder, tmp_path).embed(with_hashes(images(60)))
    assert not calls.images


def check_works_without_cache(cache, calls, text):
    """The cache warns once, and its vectors are right each time."""
    expected = cache.encoder.embed_images(images())
    calls.images.clear()
    with pytest.warns(EludeSteerWarning, match=text) as caught:
        assert torch.equal(cache.embed(with_hashes(images())), expected)
        assert torch.equal(cache.embed(with_hashes(images())), expected)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be read as one" * 20, b"SQLite format 3\0junk" * 50]
)
def test_a_damaged_cache_file_is_not_used(tmp_path, content):
    encoder, calls = counting_encoder()
    (tmp_path / "images-k.sqlite").write_bytes(content)
    text = (
        r"the cache '.*images-k.sqlite' cannot be read \(.*\); images are embedded without it\. If it is damaged, del"
    )
    check_works_without_cache(EmbeddingCache(encoder, tmp_path), calls, text)
    assert len(calls.images) == 6
    assert (tmp_path / "images-k.sqlite").read_bytes() == content


def test_a_folder_that_cannot_be_created(tmp_path):
    encoder, calls = counting_encoder()
    (tmp_path / "file").write_text("")
    check_works_without_cache(
        EmbeddingCache(encoder, tmp_path / "file" / "cache"), calls, r"cannot be read \(.*Not a directory"
    )


def test_a_cache_that_cannot_be_written_is_still_read(tmp_path, monkeypatch):
    encoder, calls = counting_encoder()
    EmbeddingCache(encoder, tmp_path).embed(with_hashes(images())[:2])
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: connect(f"file:{path}?mode=ro", timeout, uri=True))
    check_works_without_cache(
        EmbeddingCache(encoder, tmp_path), calls, r"cannot be written \(attempt to write a readonly database\)"
    )
    assert len(calls.images) == 2  # the third image, each time


def test_a_locked_cache_is_not_used(tmp_path, monkeypatch):
    encoder, calls = counting_encoder()
    EmbeddingCache(encoder, tmp_path).embed(with_hashes(images())[:2])
    connect = sqlite3.connect
    holder = connect(tmp_path / "images-k.sqlite")
    holder.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: connect(path, 0.05))
    check_works_without_cache(EmbeddingCache(encoder, tmp_path), calls, r"cannot be read \(database is locked\)")
    holder.close()


@pytest.mark.parametrize(
    "change", [lambda v: v[:-4], lambda v: v[:-1] + b"\xff", lambda v: b"", lambda v: b"\0" * len(v)]
)
def test_a_damaged_row_is_computed_again(tmp_path, change):
    encoder, calls = counting_encoder()
    cache = EmbeddingCache(encoder, tmp_path)
    expected = cache.embed(with_hashes(images()))
    with sqlite3.connect(cache.path) as database:
        row = database.execute("SELECT hash, vector FROM vectors LIMIT 1").fetchone()
        database.execute("UPDATE vectors SET vector = ? WHERE hash = ?", (change(row[1]), row[0]))
    database.close()
    calls.images.clear()
    assert torch.equal(cache.embed(with_hashes(images())), expected)
    assert torch.equal(cache.embed(with_hashes(images())), expected)
    assert len(calls.images) == 1


@pytest.mark.slow
def test_open_clip_in_its_own_environment():
    run_in_own_environment("openclip_check.py", "openclip")
