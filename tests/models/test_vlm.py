import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from PIL import Image

from elude_steer.errors import EludeSteerWarning, LayerError, SpecError
from elude_steer.models.vlm import PROMPT, Vlm, report_tokens
from tests.helpers.tiny import WORDS
from tests.models.conftest import with_config

FC2 = "vision_tower.encoder.layers.1.mlp.fc2"


@pytest.fixture(scope="module")
def varied_vlm(tiny_llava):
    """The same model with larger attention weights in its language half: its captions depend on the image."""
    vlm = Vlm.load(str(tiny_llava))
    scaled = ("q_proj.weight", "v_proj.weight", "o_proj.weight", "down_proj.weight")
    with torch.no_grad():
        for name, parameter in vlm.model.named_parameters():
            if "language_model.layers" in name and name.endswith(scaled):
                parameter.mul_(20)
    return vlm


def tiles_by_hand(size):
    """One tile for the complete image, plus those of the best canvas of 28 or 56 by 28 or 56 pixels."""
    return {(28, 28): 2, (56, 28): 3, (28, 56): 3, (40, 30): 5}[size]


# Loading


def test_the_layer_is_found_by_the_end_of_its_name(tiny_vlm, tiny_llava):
    assert tiny_vlm.layer_name.endswith(FC2)
    assert tiny_vlm.model.get_submodule(tiny_vlm.layer_name) is tiny_vlm.layer
    assert (tiny_vlm.layer.in_features, tiny_vlm.layer.out_features) == (40, 16)
    first = Vlm.load(str(tiny_llava), layer="layers.0.mlp.fc2")
    assert first.layer_name == tiny_vlm.layer_name.replace("layers.1", "layers.0")


def test_the_default_layer_is_the_last_fc2(tiny_vlm, tiny_llava):
    assert Vlm.load(str(tiny_llava)).layer_name == tiny_vlm.layer_name


def test_the_layer_is_searched_in_the_vision_tower_only(tiny_vlm):
    text = r'its vision tower has layers 0 to 1\. The paper\'s "layer 2" is index 1\.$'
    with pytest.raises(LayerError, match=text):
        Vlm.from_model(tiny_vlm.model, tiny_vlm.processor, layer="layers.2.mlp.fc2")
    with pytest.raises(LayerError, match=r"layer 'layers\.1\.mlp\.down_proj' is not in LlavaOnevision"):
        Vlm.from_model(tiny_vlm.model, tiny_vlm.processor, layer="layers.1.mlp.down_proj")


def test_the_default_layer_is_not_in_the_pooling_head(tiny_vlm):
    model = with_config(tiny_vlm, vision_use_head=True)
    assert Vlm.from_model(model, tiny_vlm.processor).layer_name.endswith(FC2)


def test_bfloat16_casts_the_pixels_only(tiny_llava, images):
    vlm = Vlm.load(str(tiny_llava), dtype="bfloat16")
    inputs = vlm.inputs(images[:2])
    assert inputs["pixel_values"].dtype == vlm.layer.weight.dtype == torch.bfloat16
    assert inputs["input_ids"].dtype == torch.long
    assert [q.dtype for q in vlm.encode(images[:2])] == [torch.bfloat16] * 2


def test_a_missing_chat_template_warns(tiny_llava, tmp_path, images):
    shutil.copytree(tiny_llava, tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.jinja").unlink()
    message = (
        "LlavaOnevisionForConditionalGeneration has no chat template, so its prompt is only the image and the question"
    )
    with pytest.warns(EludeSteerWarning, match=message):
        vlm = Vlm.load(str(tmp_path / "copy"))
    words = vlm.processor.tokenizer.decode(vlm.inputs(images[:1], "Describe this")["input_ids"][0])
    assert words.replace("<image>", "").split() == ["<unk>", "this"]  # its tokenizer knows only the second
    assert vlm.caption(images[:1], max_new_tokens=2)


def test_the_fingerprint_ignores_the_language_half(tiny_vlm, tiny_llava):
    again = Vlm.load(str(tiny_llava), layer="layers.1.mlp.fc2")
    assert again.fingerprint() == tiny_vlm.fingerprint()
    with torch.no_grad():
        again.model.get_submodule("model.language_model").norm.weight.add_(1)
    assert again.fingerprint() == tiny_vlm.fingerprint()
    with torch.no_grad():
        again.layer.bias.add_(1)
    assert again.fingerprint() != tiny_vlm.fingerprint()


# The inputs of fc2


def layer_inputs(vlm, images):
    """The inputs of fc2 in a run of the complete model, recorded by a plain hook."""
    inputs = []
    handle = vlm.layer.register_forward_hook(lambda _module, args, _output: inputs.append(args[0]))
    with torch.inference_mode():
        vlm.model(**vlm.inputs(images))
    handle.remove()
    [q] = inputs
    return q


def test_encode_returns_the_tiles_of_each_image(tiny_vlm, images):
    encoded = tiny_vlm.encode(images)
    assert [q.shape for q in encoded] == [(tiles_by_hand(image.size), 16, 40) for image in images]
    assert len({q.shape for q in encoded}) > 1


def test_encode_equals_a_run_of_the_complete_model(tiny_vlm, images):
    q = layer_inputs(tiny_vlm, images)
    assert len(q) == sum(tiles_by_hand(image.size) for image in images)
    assert torch.equal(torch.cat(tiny_vlm.encode(images)), q)


def test_a_batch_is_split_by_image(tiny_vlm, images):
    together = tiny_vlm.encode(images)
    for q, image in zip(together, images, strict=True):
        assert torch.allclose(q, tiny_vlm.encode([image])[0], atol=1e-5)
    other_order = tiny_vlm.encode(images[::-1])[::-1]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(together, other_order, strict=True))


def test_tile_counts(tiny_vlm, images):
    inputs = tiny_vlm.inputs(images)
    assert tiny_vlm.tile_counts(inputs) == [tiles_by_hand(image.size) for image in images]


def test_encode_leaves_the_model_unchanged(tiny_vlm, images):
    inputs = tiny_vlm.inputs(images[:2])
    with torch.inference_mode():
        before = tiny_vlm.model(**inputs, output_hidden_states=True)
        tiny_vlm.encode(images)
        after = tiny_vlm.model(**inputs, output_hidden_states=True)
    assert torch.equal(after.logits, before.logits)
    assert len(after.hidden_states) == len(before.hidden_states)
    assert all(torch.equal(a, b) for a, b in zip(after.hidden_states, before.hidden_states, strict=True))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_images_of_other_modes_are_converted_to_rgb(tiny_vlm, images, mode):
    image = images[0].convert(mode)
    assert torch.equal(tiny_vlm.encode([image])[0], tiny_vlm.encode([image.convert("RGB")])[0])


# Captions


def test_captions_of_a_batch_equal_single_captions(varied_vlm, images):
    together = varied_vlm.caption(images, max_new_tokens=8)
    assert together == [varied_vlm.caption([image], max_new_tokens=8)[0] for image in images]
    assert len(set(together)) > 2  # otherwise the test would show little
    assert {word for caption in together for word in caption.split()} <= set(WORDS)


def test_captions_do_not_depend_on_batch_and_order(varied_vlm, images):
    together = varied_vlm.caption(images, max_new_tokens=8)
    assert varied_vlm.caption(images[::-1][:5], max_new_tokens=8) == together[::-1][:5]


def test_captions_are_greedy(varied_vlm, images):
    """Compare with a loop that feeds back the token of the largest logit."""
    for image in images[:4]:
        inputs, words = varied_vlm.inputs([image]), []
        with torch.inference_mode():
            out = varied_vlm.model(**inputs, use_cache=True)
            for _ in range(4):
                words.append(out.logits[:, -1].argmax(-1, keepdim=True))
                if int(words[-1]) == varied_vlm.processor.tokenizer.eos_token_id:
                    break
                out = varied_vlm.model(input_ids=words[-1], past_key_values=out.past_key_values)
        expected = varied_vlm.processor.tokenizer.decode(torch.cat(words, 1)[0], skip_special_tokens=True)
        assert varied_vlm.caption([image], max_new_tokens=4) == [expected.strip()]


def test_a_checkpoint_with_sampling_settings_is_decoded_greedily(tiny_llava, tmp_path, tiny_vlm, images):
    shutil.copytree(tiny_llava, tmp_path / "copy")
    path = tmp_path / "copy" / "generation_config.json"
    sampling = {"do_sample": True, "temperature": 5.0, "top_p": 0.9, "top_k": 20, "num_beams": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | sampling))
    vlm = Vlm.load(str(tmp_path / "copy"))
    assert vlm.model.generation_config.do_sample
    assert vlm.caption(images[:3], max_new_tokens=6) == tiny_vlm.caption(images[:3], max_new_tokens=6)


def test_a_checkpoint_with_penalties_is_decoded_greedily(varied_vlm, images, monkeypatch):
    captions = varied_vlm.caption(images[:3], max_new_tokens=8)
    for name, value in {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "min_new_tokens": 7}.items():
        monkeypatch.setattr(varied_vlm.model.generation_config, name, value)
    assert varied_vlm.model.generate(
        **varied_vlm.inputs(images[:3]), max_new_tokens=8
    ).shape  # they are valid and used there
    assert varied_vlm.caption(images[:3], max_new_tokens=8) == captions


def test_the_caption_does_not_contain_the_prompt(tiny_vlm, images):
    text = tiny_vlm.processor.tokenizer.decode(tiny_vlm.inputs(images[:1])["input_ids"][0])
    assert PROMPT == "Describe this image in one sentence."
    assert "image in one sentence" not in tiny_vlm.caption(images[:1], max_new_tokens=4)[0]
    assert "this image in one sentence" in text
    assert "ball" in tiny_vlm.processor.tokenizer.decode(tiny_vlm.inputs(images[:1], "the ball")["input_ids"][0])


def test_rows_are_padded_on_the_left(tiny_vlm, images):
    inputs = tiny_vlm.inputs(images[:4])
    mask = inputs["attention_mask"]
    assert (mask[:, -1] == 1).all()
    assert (mask == 0).any()
    assert (mask.diff(dim=1) >= 0).all()


# Reporting tokens


def caption_with_counts(vlm, images, **options):
    """Return the reported token counts and the captions."""
    counts = []
    with report_tokens(counts.append):
        captions = vlm.caption(images, **options)
    return counts, captions


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("longest", [1, 2, 7])
def test_each_token_is_reported_once_and_in_order(varied_vlm, images, count, longest):
    bare = varied_vlm.caption(images[:count], max_new_tokens=longest)
    counts, captions = caption_with_counts(varied_vlm, images[:count], max_new_tokens=longest)
    assert captions == bare
    assert counts == list(range(1, len(counts) + 1))
    assert max(len(caption.split()) for caption in captions) <= len(counts) <= longest


def test_an_answer_that_ends_early_is_reported_to_its_end(steerer, scene):
    counts, (caption,) = caption_with_counts(steerer.vlm, [scene.image], max_new_tokens=64)
    words = steerer.vlm.processor.tokenizer(caption, add_special_tokens=False)["input_ids"]
    assert counts == list(range(1, len(words) + 2))  # with the end token


def test_a_batch_is_reported_until_its_longest_answer_ends(steerer, scene):
    plan = steerer.plan(minus=[scene.objects[0]])
    counts = []
    with report_tokens(counts.append):
        result = steerer.explain(scene.image, plan)
    longest = max(len(caption_with_counts(steerer.vlm, [scene.image])[0]), len(result.caption.split()) + 1)
    assert counts == list(range(1, longest + 1))  # both captions together, not one after the other


def test_nothing_is_reported_outside_the_context(varied_vlm, images):
    counts, _ = caption_with_counts(varied_vlm, images[:1], max_new_tokens=3)
    before = list(counts)
    varied_vlm.caption(images[:1], max_new_tokens=3)
    assert counts == before
    with report_tokens(counts.append):
        pass
    assert counts == before


def test_the_innermost_context_reports_and_then_the_outer_again(varied_vlm, images):
    outer, inner = [], []
    with report_tokens(outer.append):
        varied_vlm.caption(images[:1], max_new_tokens=2)
        with report_tokens(inner.append):
            varied_vlm.caption(images[:1], max_new_tokens=3)
        with pytest.raises(RuntimeError, match="enough"), report_tokens(inner.append):
            raise RuntimeError("enough")
        varied_vlm.caption(images[:1], max_new_tokens=2)
    assert inner == [1, 2, 3]
    assert outer == [1, 2, 1, 2]
    varied_vlm.caption(images[:1], max_new_tokens=2)
    assert (len(inner), len(outer)) == (3, 4)


def test_only_the_thread_of_the_context_reports(varied_vlm, images):
    """Four threads share a model inside a context of the main thread; one of them opens no context."""
    reported = [[] for _ in range(4)]
    ready = threading.Barrier(4)

    def caption(number):
        ready.wait()
        with report_tokens(reported[number].append) if number else nullcontext():
            return varied_vlm.caption(images[:1], max_new_tokens=1 + number)[0]

    alone = [varied_vlm.caption(images[:1], max_new_tokens=1 + number)[0] for number in range(4)]
    mine = []
    with report_tokens(mine.append), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(caption, range(4))) == alone
    assert reported == [[], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert mine == []


def test_a_callback_that_raises_stops_the_answer_and_leaves_no_hooks(varied_vlm, images, no_hooks_left):
    no_hooks_left(varied_vlm.model)
    bare = varied_vlm.caption(images[:2], max_new_tokens=6)
    counts = []

    def stop(tokens):
        counts.append(tokens)
        if tokens == 3:
            raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"), report_tokens(stop):
        varied_vlm.caption(images[:2], max_new_tokens=6)
    assert counts == [1, 2, 3]
    assert varied_vlm.caption(images[:2], max_new_tokens=6) == bare
    assert counts == [1, 2, 3]


def test_a_callback_that_raises_stops_a_steered_answer(steerer, scene):
    plan = steerer.plan(minus=[scene.objects[0]])
    before = steerer.explain(scene.image, plan)
    with pytest.raises(ZeroDivisionError), report_tokens(lambda tokens: 1 / (2 - tokens)):
        steerer.explain(scene.image, plan)
    with pytest.raises(ZeroDivisionError), report_tokens(lambda tokens: 1 / (2 - tokens)), steerer.applied(plan):
        steerer.vlm.caption([scene.image])
    after = steerer.explain(scene.image, plan)
    assert (after.baseline, after.caption) == (before.baseline, before.caption)
    assert steerer.vlm.caption([scene.image])[0] == before.baseline


def test_a_question_with_an_image_token_is_refused(tiny_vlm):
    with pytest.raises(SpecError, match=r"^the question contains '<image>', which stands"):
        tiny_vlm.inputs([Image.new("RGB", (40, 40))], "What is in <image>?")


def test_a_prompt_that_is_too_long_is_refused_with_the_limit(steerer, scene, monkeypatch):
    vlm = steerer.vlm
    image = int((vlm.inputs([scene.image])["input_ids"] == vlm.model.config.image_token_id).sum())
    monkeypatch.setitem(vars(vlm.model), "generate", lambda **_: pytest.fail("it generates"))  # undone without a trace
    message = (
        rf"the prompt has [\d,]+ tokens, and {1024 - image - 64} fit: the model takes 1,024, of which the image needs"
    )
    with pytest.raises(SpecError, match=message):
        vlm.caption([scene.image], "what is this " * 2000)
    with pytest.raises(SpecError, match=r"0 fit: .* and the answer 5,000 \(max_new_tokens\)"):
        vlm.caption([scene.image], max_new_tokens=5000)


def test_loading_shows_no_bar_and_keeps_the_setting(tiny_llava, capfd):
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    was_shown, downloads_hidden = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    logging.enable_progress_bar()
    try:
        Vlm.load(str(tiny_llava))
        assert logging.is_progress_bar_enabled()
        assert not are_progress_bars_disabled()
    finally:
        if not was_shown or downloads_hidden:
            logging.disable_progress_bar()
    assert capfd.readouterr().err == ""
