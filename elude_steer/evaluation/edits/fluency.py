"""How natural a text is to the unsteered model: the log-likelihood of an answer about an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elude_steer.errors import ModelError, SpecError
from elude_steer.models.prefix_cache import Prefix, resume_from, run_prefix
from elude_steer.models.vlm import PROMPT, Vlm, limit_logits
from elude_steer.steering.caption_batches import MAX_BATCH_TILES


@torch.inference_mode()
def likelihoods(
    vlm: Vlm,
    images: Sequence[Any],
    texts: Sequence[Sequence[str]],
    prompt: str = PROMPT,
    *,
    prefix: Prefix | None = None,
) -> list[list[float]]:
    """Mean log-probability of the tokens of each text, as the model's answer about an image.

    The end of the answer counts as a token. So a text that breaks off is less likely, and an empty text is likely if
    the model would say nothing.

    Args:
        vlm: the model.
        images: PIL images.
        texts: a list of texts for each image.
        prompt: the question.
        prefix: the result of `run_prefix` for these images and this prompt, if it is known already.

    Example:
        >>> likelihoods(vlm, [image], [["a dog on a street", "street dog dog"]])
    """
    if len(texts) != len(images):
        raise SpecError(f"{len(texts)} lists of texts for {len(images)} images; give one list per image.")
    if not len(images):
        return []
    prefix = run_prefix(vlm, images, prompt) if prefix is None else prefix
    pairs = list(dict.fromkeys((image, text) for image, image_texts in enumerate(texts) for text in image_texts))
    batch_size = max(1, MAX_BATCH_TILES // max(prefix.tiles))
    means: dict[tuple[int, str], float] = {}
    for start in range(0, len(pairs), batch_size):
        batch = pairs[start : start + batch_size]
        indices = [image for image, _ in batch]
        with vlm.use_threads(), resume_from(vlm, prefix, indices):
            values = _mean_log_probabilities(vlm, prefix.select(indices), [text for _, text in batch])
        means |= dict(zip(batch, values, strict=True))
    return [[means[image, text] for text in image_texts] for image, image_texts in enumerate(texts)]


def _mean_log_probabilities(vlm: Vlm, inputs: Mapping[str, Any], texts: Sequence[str]) -> list[float]:
    """Mean log-probability of the text that is forced as the answer to each row of the inputs."""
    ends, tokenizer = _end_tokens(vlm), vlm.processor.tokenizer
    # Special tokens in a text are read as text: another <image> would require another image.
    tokens = [tokenizer(t, add_special_tokens=False, split_special_tokens=True)["input_ids"] + ends[:1] for t in texts]
    question = inputs["input_ids"]
    longest = max(map(len, tokens))
    answers = question.new_tensor([row + ends[:1] * (longest - len(row)) for row in tokens])  # (rows, longest)
    mask = torch.arange(longest, device=question.device) < question.new_tensor([len(row) for row in tokens])[:, None]
    added = {"input_ids": answers, "attention_mask": mask.to(inputs["attention_mask"].dtype)}
    extended = {
        name: torch.cat([value, added.get(name, torch.zeros_like(answers)).to(value)], 1)
        if isinstance(value, torch.Tensor) and value.shape == question.shape  # also token types, where 0 is text
        else value
        for name, value in inputs.items()
    }
    logits = vlm.model(**extended, **limit_logits(vlm.model, longest + 1)).logits
    log_probabilities = logits[:, -longest - 1 : -1].float().log_softmax(-1)  # (rows, longest, vocabulary)
    answers, mask = answers.to(logits.device), mask.to(logits.device)
    chosen = log_probabilities.gather(-1, answers[..., None])[..., 0]  # (rows, longest)
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    chosen = torch.where(last, log_probabilities[..., ends].logsumexp(-1), chosen)  # any end token ends the answer
    return (torch.where(mask, chosen, 0.0).sum(1) / mask.sum(1)).tolist()


def _end_tokens(vlm: Vlm) -> list[int]:
    """The ids of the tokens that end an answer."""
    ids = getattr(vlm.model.generation_config, "eos_token_id", None)
    ids = vlm.processor.tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ModelError(f"{vlm.id or 'the model'} has no token that ends an answer; set its eos_token_id.")
    return list(ids) if isinstance(ids, Sequence) else [int(ids)]
