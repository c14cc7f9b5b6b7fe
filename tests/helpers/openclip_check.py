"""Check that our dual encoder gives the embeddings of open_clip; runs in an environment with open_clip."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from checks import error_line, register_missing_operators
from PIL import Image

NAME = "ViT-S-32-alt"  # the smallest model whose tokenizer comes with the package


def main():
    register_missing_operators()
    import open_clip

    from elude_steer.errors import ModelError, SpecError
    from elude_steer.models.dual_encoder import load_dual_encoder

    torch.manual_seed(0)
    model, _, transform = open_clip.create_model_and_transforms(NAME)
    model.eval()
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (h, w, 3), dtype=np.uint8)) for h, w in ((40, 60), (60, 40))]
    images += [images[0].convert("L"), images[1].convert("RGBA")]
    words = ["dog", "a photo of a Cat", "犬", "word " * 100] + [f"thing {i}" for i in range(300)]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        weights = Path(folder) / "weights.pt"
        torch.save(model.state_dict(), weights)
        # A pickle, although of our own, is code.
        options = {"library": "open_clip", "pretrained": str(weights)}
        assert "the pickle" in error_line(ModelError, lambda: load_dual_encoder(NAME, **options))
        options["trust_remote_code"] = True
        scorer = load_dual_encoder(NAME, **options)

        by_hand = model.encode_image(torch.stack([transform(image) for image in images]), normalize=True)
        torch.testing.assert_close(scorer.embed_images(images), by_hand)
        tokens = open_clip.get_tokenizer(NAME)(words)
        torch.testing.assert_close(
            scorer.embed_texts(words), model.encode_text(tokens, normalize=True), atol=1e-5, rtol=0
        )

        half = load_dual_encoder(NAME, **options, dtype="bfloat16")
        assert half.embed_images(images).dtype == torch.float32
        torch.testing.assert_close(half.embed_images(images), by_hand, atol=0.05, rtol=0)
        assert half.embed_texts(words[:3]).dtype == torch.float32

        assert load_dual_encoder(NAME, **options).key == scorer.key != half.key
        other = {name: tensor + 0.5 for name, tensor in model.state_dict().items()}
        torch.save(other, weights)
        assert load_dual_encoder(NAME, **options).key != scorer.key

        torch.save({"logit_scale": other["logit_scale"]}, weights)
        error_line(ModelError, lambda: load_dual_encoder(NAME, **options))

    text = error_line(SpecError, lambda: load_dual_encoder("ViT-SO400M-16-SigLIP2-384", library="open_clip"))
    assert "unless pretrained names some; give one of 'webli', or a file." in text, text
    text = error_line(SpecError, lambda: load_dual_encoder("ViT-B-23", library="open_clip", pretrained="openai"))
    assert "Did you mean 'ViT-B-32'?" in text, text
    text = error_line(SpecError, lambda: load_dual_encoder("ViT-B-32", library="open_clip", pretrained="opneai"))
    assert "has no weights 'opneai'; give one of 'openai'" in text and "Did you mean 'openai'?" in text, text
    print(f"open_clip {open_clip.__version__}: OK")


if __name__ == "__main__":
    main()
