"""Check the paper's timm models up to an atlas; runs in an environment with timm.

First tiny models with the recipes' layers, from a folder that timm writes (`local-dir:`); then the recipes' models at
their real size with random weights, placed in the Hub's cache (takes minutes; skipped with --tiny).
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from checks import error_line, register_missing_operators
from PIL import Image
from tiny import save_images

RECIPES = {
    # recipe: (arguments that make its model tiny and keep the layer's name, tokens, inputs of the layer)
    "augreg-vit-b16-layer12": ({"embed_dim": 16, "depth": 12, "num_heads": 2}, 197, 3072),
    "convnextv2-base-stage4": ({"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 3)}, 49, 4096),
}
SMALLER = [
    "tokens.per_image=6",
    "clusters.top_k=200",
    "clusters.min_cluster_size=5",
    "clusters.backend=exact",
    "split.winner_rule=gap",
    "labels.scorer=null",
]


def randomise(model):
    """Give a model weights that make tokens differ; with fresh ones, ConvNeXtV2 skips its response normalisation."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "grn" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif "mlp" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model.eval()


def save_tiny(folder, architecture, arguments):
    """Write a folder as timm does for the Hub, and return its id."""
    import timm

    model = randomise(timm.create_model(architecture, pretrained=False, num_classes=7, **arguments))
    timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return f"local-dir:{folder}"


def check_tower(tower, layer, tokens, images):
    """Compare a tower's layer, the layer's inputs and the prepared images with the whole model under our own hooks."""
    import timm

    assert tower.layer_name == layer and not tower.model.training
    config = timm.data.resolve_model_data_config(tower.model)
    prepared = torch.stack([prepare_by_hand(image, config) for image in images])
    torch.testing.assert_close(tower.prepare(images), prepared, rtol=0, atol=1e-5)
    captured = []
    block = tower.model.get_submodule(layer.removesuffix(".mlp.fc2"))
    handles = [
        tower.layer.register_forward_pre_hook(lambda _module, args: captured.append(args[0])),
        block.register_forward_hook(lambda _module, _args, output: captured.append(output)),
    ]
    with torch.inference_mode():
        tower.model(tower.prepare(images))
    for handle in handles:
        handle.remove()
    d_in, d_out = tower.layer.in_features, tower.layer.out_features
    encoded = tower.encode(images)
    assert [q.shape for q in encoded] == [(1, tokens, d_in)] * len(images), encoded[0].shape
    assert torch.equal(torch.cat(encoded), captured[0].reshape(len(images), tokens, d_in))
    expected = (
        captured[1].movedim(1, -1) if captured[1].dim() == 4 else captured[1]
    )  # ConvNeXt's maps have channels first
    streams = torch.cat([stream for _, stream in tower.streams(images)])
    assert torch.equal(streams, expected.reshape(len(images), tokens, d_out))


def prepare_by_hand(image, config):
    """Resize an image by its shorter side, crop its centre and normalise it, as timm's data configuration says."""
    side = config["input_size"][-1]
    assert config["crop_mode"] == "center" and config["interpolation"] == "bicubic", config
    shorter = int(side / config["crop_pct"])
    width, height = image.size
    size = (shorter, int(shorter * height / width)) if width <= height else (int(shorter * width / height), shorter)
    small = image.resize(size, Image.Resampling.BICUBIC)
    left, top = (round((length - side) / 2) for length in size)
    values = torch.from_numpy(np.asarray(small.crop((left, top, left + side, top + side)), np.float32) / 255)
    return ((values - torch.tensor(config["mean"])) / torch.tensor(config["std"])).permute(2, 0, 1)


def check_build(recipe, settings, folder, images, count):
    """Build an atlas by the recipe; with its sub-units instead of the layer, the model gives the same output."""
    import elude_steer as es
    from elude_steer.atlas.build.pipeline import load_tower
    from elude_steer.method.layers import split_layer
    from elude_steer.models.hooks import swap_module
    from elude_steer.recipe_files import load_spec
    from elude_steer.utils.yaml_schema import override

    settings = [*settings, *SMALLER]
    out, work = folder / "atlas", folder / "work"
    atlas = es.build(recipe, images=images, out=out, work=work, settings=settings, quiet=True)
    tower = load_tower(override(load_spec(recipe), settings).model)
    atlas.check(tower.layer)
    assert atlas.about["layer"] == tower.layer_name
    assert (atlas.about["images"], atlas.about["instances"]) == (count, 6 * count)
    assert len(atlas) > atlas.d_out, "no unit was split"
    split = split_layer(tower.layer, atlas.members(), atlas.units)
    with torch.inference_mode():
        inputs = tower.prepare(open_images(images))
        before = tower.model(inputs)
        with swap_module(tower.model, tower.layer_name, split):
            after = tower.model(inputs)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    [q] = tower.encode([Image.open(images / atlas.image_ids[int(atlas.references.images[0, 0])]).convert("RGB")])
    value = split.sub_units(q[0, int(atlas.references.tokens[0, 0])].half().float())[0]
    torch.testing.assert_close(value, atlas.references.values[0, 0], rtol=1e-2, atol=1e-2)
    print(
        f"{recipe}, {atlas.d_in} -> {atlas.d_out}: {len(atlas)} sub-units; "
        f"the model's answers differ by {float((after - before).abs().max()):.1e} "
        f"of {float(before.abs().max()):.1e} at most"
    )


def open_images(folder, count=4):
    return [Image.open(path).convert("RGB") for path in sorted(folder.rglob("*.png"))[:count]]


def check_tiny(folder, images):
    from elude_steer.models.vision import load_timm
    from elude_steer.recipe_files import load_spec

    ids = {}
    for recipe, (arguments, tokens, _) in RECIPES.items():
        spec = load_spec(recipe)
        ids[recipe] = save_tiny(folder / recipe, spec.model.id, arguments)
        tower = load_timm(ids[recipe], layer=spec.model.layer)
        assert tower.skip_tokens == ()  # a CLS token counts
        check_tower(tower, spec.model.layer, tokens, open_images(images))
        half = load_timm(ids[recipe], layer=spec.model.layer, dtype="bfloat16").encode(open_images(images))
        assert half[0].dtype == torch.bfloat16
        again = load_timm(ids[recipe], layer=spec.model.layer)
        assert again.fingerprint() == tower.fingerprint()
        check_build(recipe, [f"model.id={ids[recipe]}"], folder / f"{recipe}-build", images, 40)
    return ids


def check_table(ids, folder, images):
    """The head that a model of timm brings gives the accuracy of a table, and the classes of images without any."""
    from dataclasses import replace

    from elude_steer.evaluation.tables.run import run_table
    from elude_steer.evaluation.tables.setup import TINY, TableSetup
    from elude_steer.recipe_files import load_spec
    from elude_steer.utils.yaml_schema import override

    for number, image in enumerate(open_images(images, 24)):
        path = folder / "classes" / str(number % 4) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    for recipe, id in ids.items():
        spec = override(load_spec(recipe), [*SMALLER, f"model.id={id}"])
        setup = TableSetup(spec, folder / "classes", folder / "classes", folder / f"{recipe}-table", TINY, threads=1)
        names = ["raw units", "ELUDe (gap)", "topk SAE", "DPCiCNN (supervised)"]
        rows = {row.method: row.measures for row in run_table(setup, names, [42])}
        baseline = rows["raw units"]["baseline accuracy"]
        for name in ("raw units", "ELUDe (gap)", "DPCiCNN (supervised)"):
            assert rows[name]["R2"] > 1 - 1e-6 and rows[name]["accuracy"] == baseline, rows[name]
        assert rows["topk SAE"]["R2"] < 0.999
        unknown = replace(setup, classes={}, held_out_limit=12)  # the head's own answers are the classes
        (row,) = run_table(unknown, ["DPCiCNN (supervised)"], [42])
        assert "accuracy" not in row.measures and row.measures["R2"] > 1 - 1e-6
        print(f"{recipe}: accuracy {baseline:.3f}, with TopK {rows['topk SAE']['accuracy']:.3f}")


def check_registers(folder, images):
    """Registers come after CLS, or first without CLS: those positions of the input change with the registers."""
    from elude_steer.models.vision import load_timm

    tiny = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    for name, tokens, skipped in (
        ("vit_small_patch14_reg4_dinov2", 1 + 4 + 37 * 37, (1, 2, 3, 4)),
        ("vit_medium_patch16_reg4_gap_256", 4 + 16 * 16, (0, 1, 2, 3)),
    ):
        tower = load_timm(save_tiny(folder / name, name, tiny), layer="blocks.1.mlp.fc2")
        assert tower.skip_tokens == skipped, tower.skip_tokens
        check_tower(tower, "blocks.1.mlp.fc2", tokens, open_images(images, 1))
        inputs = []
        handle = tower.model.blocks[0].register_forward_pre_hook(
            lambda _module, args, inputs=inputs: inputs.append(args[0])
        )
        with torch.inference_mode():
            for _ in range(2):
                tower.model(tower.prepare(open_images(images, 1)))
                tower.model.reg_token.add_(1)
        handle.remove()
        changed = (inputs[0] != inputs[1]).any(-1)[0].nonzero().flatten().tolist()
        assert tuple(changed) == skipped
        assert not set(tower.token_indices(tokens).tolist()) & set(skipped)


def check_errors(ids, folder):
    from safetensors.torch import load_file, save_file

    from elude_steer.errors import LayerError, ModelError
    from elude_steer.models.vision import load_timm

    vit = Path(ids["augreg-vit-b16-layer12"].removeprefix("local-dir:"))
    text = error_line(LayerError, lambda: load_timm(f"local-dir:{vit}", layer="blocks.12.mlp.fc2"))
    assert 'The paper\'s "layer 12" is index 11.' in text, text
    for wrong in ("vit_bsae_patch16_224", f"local-dir:{folder / 'nowhere'}", str(vit)):
        text = error_line(ModelError, lambda wrong=wrong: load_timm(wrong, layer="blocks.11.mlp.fc2"))
        assert text.startswith(f"model '{wrong}' could not be loaded: "), text
        print(text.replace(str(folder), "…"))
    tensors = load_file(vit / "model.safetensors")
    key = "blocks.11.mlp.fc2.weight"
    for change in ({key: tensors[key][:, :-1].contiguous()}, {"stray": torch.zeros(1)}, None):
        changed = {**tensors, **change} if change else {k: v for k, v in tensors.items() if k != key}
        save_file(changed, vit / "model.safetensors")
        error_line(ModelError, lambda: load_timm(f"local-dir:{vit}", layer="blocks.11.mlp.fc2"))


def check_real_size(folder, images):
    """The recipes as shipped, except for the number of images and what depends on it."""
    import timm

    from elude_steer.atlas.build.pipeline import load_tower
    from elude_steer.errors import ModelError
    from elude_steer.recipe_files import load_spec

    for recipe, (_, tokens, d_in) in RECIPES.items():
        model = load_spec(recipe).model
        text = error_line(ModelError, lambda model=model: load_tower(model))
        assert text.startswith(f"model '{model.id}' could not be loaded: "), text
        random = randomise(timm.create_model(model.id, pretrained=False))
        cached = Path(os.environ["HF_HOME"]) / "hub" / f"models--timm--{model.id}"
        (cached / "snapshots" / "0").mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("0")
        timm.models.save_for_hf(random, cached / "snapshots" / "0", safe_serialization=True)
        tower = load_tower(model)
        assert tower.layer.in_features == d_in
        assert torch.equal(tower.layer.weight, random.get_submodule(model.layer).weight)
        check_tower(tower, model.layer, tokens, open_images(images, 2))
        check_build(recipe, ["images.limit=16"], folder / f"{recipe}-real", images, 16)
        config = json.loads((cached / "snapshots" / "0" / "config.json").read_text())["pretrained_cfg"]
        print(f"{model.id}: {config['input_size']}, crop {config['crop_pct']}, mean {config['mean']}")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(HF_HOME=str(folder / "hf"), HF_HUB_OFFLINE="1", ELUDE_STEER_HOME=str(folder / "home"))
        register_missing_operators()
        import timm

        warnings.simplefilter("ignore")  # warnings about the small number of images
        torch.manual_seed(0)
        images = save_images(folder / "images", 40)
        ids = check_tiny(folder, images)
        check_table(ids, folder, images)
        check_registers(folder, images)
        check_errors(ids, folder)
        if "--tiny" not in sys.argv:
            check_real_size(folder, images)
        print(f"timm {timm.__version__}: OK")


if __name__ == "__main__":
    main()
