"""Run where timm is installed, in an environment of its own: from the paper's models of timm to an atlas.

First tiny ones with the recipes' layers, from a folder that timm itself writes (`local-dir:`), then the recipes' own
names at their real size with random weights, which the Hub's cache is made to hold (some minutes; not with --tiny).
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from checks import raised, register_missing_operators
from PIL import Image
from tiny import save_images

RECIPES = {
    # recipe: arguments that make its model tiny and leave the layer its name, tokens, inputs of the layer
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


def livelier(model):
    """Weights that make tokens differ; fresh ones of ConvNeXtV2 would leave its response normalisation out."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "grn" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif "mlp" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model.eval()


def save_tiny(folder, architecture, arguments):
    """A folder as timm writes it for the Hub; its id."""
    import timm

    model = livelier(timm.create_model(architecture, pretrained=False, num_classes=7, **arguments))
    timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return f"local-dir:{folder}"


def check_tower(tower, layer, tokens, pictures):
    """Its layer, what the layer is given, and the pictures, against the whole model with hooks of our own."""
    import timm

    assert tower.layer_name == layer and not tower.model.training
    config = timm.data.resolve_model_data_config(tower.model)
    prepared = torch.stack([by_hand(picture, config) for picture in pictures])
    torch.testing.assert_close(tower.prepare(pictures), prepared, rtol=0, atol=1e-5)
    kept = []
    block = tower.model.get_submodule(layer.removesuffix(".mlp.fc2"))
    handles = [
        tower.layer.register_forward_pre_hook(lambda _module, args: kept.append(args[0])),
        block.register_forward_hook(lambda _module, _args, output: kept.append(output)),
    ]
    with torch.inference_mode():
        tower.model(tower.prepare(pictures))
    for handle in handles:
        handle.remove()
    d_in, d_out = tower.layer.in_features, tower.layer.out_features
    encoded = tower.encode(pictures)
    assert [q.shape for q in encoded] == [(1, tokens, d_in)] * len(pictures), encoded[0].shape
    assert torch.equal(torch.cat(encoded), kept[0].reshape(len(pictures), tokens, d_in))
    given = kept[1].movedim(1, -1) if kept[1].dim() == 4 else kept[1]  # ConvNeXt's maps have their channels first
    streams = torch.cat([stream for _, stream in tower.streams(pictures)])
    assert torch.equal(streams, given.reshape(len(pictures), tokens, d_out))


def by_hand(picture, config):
    """A picture as timm's data configuration says: resized by its shorter side, cropped in the middle, normalised."""
    side = config["input_size"][-1]
    assert config["crop_mode"] == "center" and config["interpolation"] == "bicubic", config
    shorter = int(side / config["crop_pct"])
    width, height = picture.size
    size = (shorter, int(shorter * height / width)) if width <= height else (int(shorter * width / height), shorter)
    small = picture.resize(size, Image.Resampling.BICUBIC)
    left, top = (round((length - side) / 2) for length in size)
    values = torch.from_numpy(np.asarray(small.crop((left, top, left + side, top + side)), np.float32) / 255)
    return ((values - torch.tensor(config["mean"])) / torch.tensor(config["std"])).permute(2, 0, 1)


def check_build(recipe, settings, folder, pictures, count):
    """An atlas by the recipe; with its sub-units in the place of the layer the model says the same."""
    import elude_steer as es
    from elude_steer.atlas.build.pipeline import load_tower
    from elude_steer.method.layers import split_layer
    from elude_steer.models.hooks import swap_module
    from elude_steer.recipe_files import load_spec
    from elude_steer.utils.yaml_schema import override

    settings = [*settings, *SMALLER]
    out, work = folder / "atlas", folder / "work"
    atlas = es.build(recipe, images=pictures, out=out, work=work, settings=settings, quiet=True)
    tower = load_tower(override(load_spec(recipe), settings).model)
    atlas.check(tower.layer)
    assert atlas.about["layer"] == tower.layer_name
    assert (atlas.about["images"], atlas.about["instances"]) == (count, 6 * count)
    assert len(atlas) > atlas.d_out, "no unit was split"
    split = split_layer(tower.layer, atlas.members(), atlas.units)
    with torch.inference_mode():
        inputs = tower.prepare(opened(pictures))
        before = tower.model(inputs)
        with swap_module(tower.model, tower.layer_name, split):
            after = tower.model(inputs)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    [q] = tower.encode([Image.open(pictures / atlas.image_ids[int(atlas.references.images[0, 0])]).convert("RGB")])
    value = split.sub_units(q[0, int(atlas.references.tokens[0, 0])].half().float())[0]
    torch.testing.assert_close(value, atlas.references.values[0, 0], rtol=1e-2, atol=1e-2)
    print(
        f"{recipe}, {atlas.d_in} -> {atlas.d_out}: {len(atlas)} sub-units; "
        f"the model's answers differ by {float((after - before).abs().max()):.1e} "
        f"of {float(before.abs().max()):.1e} at most"
    )


def opened(folder, count=4):
    return [Image.open(path).convert("RGB") for path in sorted(folder.rglob("*.png"))[:count]]


def check_tiny(folder, pictures):
    from elude_steer.models.vision import load_timm
    from elude_steer.recipe_files import load_spec

    ids = {}
    for recipe, (arguments, tokens, _) in RECIPES.items():
        spec = load_spec(recipe)
        ids[recipe] = save_tiny(folder / recipe, spec.model.id, arguments)
        tower = load_timm(ids[recipe], layer=spec.model.layer)
        assert tower.skip_tokens == ()  # a CLS token counts
        check_tower(tower, spec.model.layer, tokens, opened(pictures))
        half = load_timm(ids[recipe], layer=spec.model.layer, dtype="bfloat16").encode(opened(pictures))
        assert half[0].dtype == torch.bfloat16
        again = load_timm(ids[recipe], layer=spec.model.layer)
        assert again.fingerprint() == tower.fingerprint()
        check_build(recipe, [f"model.id={ids[recipe]}"], folder / f"{recipe}-build", pictures, 40)
    return ids


def check_registers(folder, pictures):
    """After CLS, or first where there is none: they are positions of the model's own input that change with them."""
    from elude_steer.models.vision import load_timm

    tiny = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    for name, tokens, skipped in (
        ("vit_small_patch14_reg4_dinov2", 1 + 4 + 37 * 37, (1, 2, 3, 4)),
        ("vit_medium_patch16_reg4_gap_256", 4 + 16 * 16, (0, 1, 2, 3)),
    ):
        tower = load_timm(save_tiny(folder / name, name, tiny), layer="blocks.1.mlp.fc2")
        assert tower.skip_tokens == skipped, tower.skip_tokens
        check_tower(tower, "blocks.1.mlp.fc2", tokens, opened(pictures, 1))
        seen = []
        handle = tower.model.blocks[0].register_forward_pre_hook(lambda _module, args, seen=seen: seen.append(args[0]))
        with torch.inference_mode():
            for _ in range(2):
                tower.model(tower.prepare(opened(pictures, 1)))
                tower.model.reg_token.add_(1)
        handle.remove()
        changed = (seen[0] != seen[1]).any(-1)[0].nonzero().flatten().tolist()
        assert tuple(changed) == skipped
        assert not set(tower.token_indices(tokens).tolist()) & set(skipped)


def check_errors(ids, folder):
    from safetensors.torch import load_file, save_file

    from elude_steer.errors import LayerError, ModelError
    from elude_steer.models.vision import load_timm

    vit = Path(ids["augreg-vit-b16-layer12"].removeprefix("local-dir:"))
    text = raised(LayerError, lambda: load_timm(f"local-dir:{vit}", layer="blocks.12.mlp.fc2"))
    assert 'The paper\'s "layer 12" is index 11.' in text, text
    for wrong in ("vit_bsae_patch16_224", f"local-dir:{folder / 'nowhere'}", str(vit)):
        text = raised(ModelError, lambda wrong=wrong: load_timm(wrong, layer="blocks.11.mlp.fc2"))
        assert text.startswith(f"model '{wrong}' could not be loaded: "), text
        print(text.replace(str(folder), "…"))
    tensors = load_file(vit / "model.safetensors")
    key = "blocks.11.mlp.fc2.weight"
    for change in ({key: tensors[key][:, :-1].contiguous()}, {"stray": torch.zeros(1)}, None):
        changed = {**tensors, **change} if change else {k: v for k, v in tensors.items() if k != key}
        save_file(changed, vit / "model.safetensors")
        raised(ModelError, lambda: load_timm(f"local-dir:{vit}", layer="blocks.11.mlp.fc2"))


def check_real_size(folder, pictures):
    """The recipes as they are, apart from the number of pictures and what depends on it."""
    import timm

    from elude_steer.atlas.build.pipeline import load_tower
    from elude_steer.errors import ModelError
    from elude_steer.recipe_files import load_spec

    for recipe, (_, tokens, d_in) in RECIPES.items():
        model = load_spec(recipe).model
        text = raised(ModelError, lambda model=model: load_tower(model))
        assert text.startswith(f"model '{model.id}' could not be loaded: "), text
        random = livelier(timm.create_model(model.id, pretrained=False))
        cached = Path(os.environ["HF_HOME"]) / "hub" / f"models--timm--{model.id}"
        (cached / "snapshots" / "0").mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("0")
        timm.models.save_for_hf(random, cached / "snapshots" / "0", safe_serialization=True)
        tower = load_tower(model)
        assert tower.layer.in_features == d_in
        assert torch.equal(tower.layer.weight, random.get_submodule(model.layer).weight)
        check_tower(tower, model.layer, tokens, opened(pictures, 2))
        check_build(recipe, ["images.limit=16"], folder / f"{recipe}-real", pictures, 16)
        config = json.loads((cached / "snapshots" / "0" / "config.json").read_text())["pretrained_cfg"]
        print(f"{model.id}: {config['input_size']}, crop {config['crop_pct']}, mean {config['mean']}")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(HF_HOME=str(folder / "hf"), HF_HUB_OFFLINE="1", ELUDE_STEER_HOME=str(folder / "home"))
        register_missing_operators()
        import timm

        warnings.simplefilter("ignore")  # that there are few pictures
        torch.manual_seed(0)
        pictures = save_images(folder / "pictures", 40)
        ids = check_tiny(folder, pictures)
        check_registers(folder, pictures)
        check_errors(ids, folder)
        if "--tiny" not in sys.argv:
            check_real_size(folder, pictures)
        print(f"timm {timm.__version__}: OK")


if __name__ == "__main__":
    main()
