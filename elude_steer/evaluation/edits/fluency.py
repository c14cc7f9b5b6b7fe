"""How natural a text is to a model that nobody steers: the log-likelihood of an answer about a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elude_steer.errors import ModelError, SpecError
from elude_steer.models.prefix_cache import Prefix, resume_from, run_prefix
from elude_steer.models.vlm import PROMPT, Vlm, limit_logits
from elude_steer.steering.steerer import MAX_BATCH_TILES


@torch.inference_mode()
def likelihoods(
    vlm: Vlm,
    images: Sequence[Any],
    texts: Sequence[Sequence[str]],
    prompt: str = PROMPT,
    *,
    prefix: Prefix | None = None,
) -> list[list[float]]:
    """How likely the model finds each text as its answer about a picture: the mean log-probability of a token.

    The end of the answer counts as a token, so that a text that breaks off is less likely, and an empty one is likely
    where the model would say nothing.

    Args:
        vlm: the model, as it is.
        images: PIL pictures.
        texts: for each picture its texts.
        prompt: the question.
        prefix: what `prefix_cache.run_prefix` gave for these pictures and this prompt, where it is known already.

    Example:
        >>> likelihoods(vlm, [image], [["a dog on a street", "street dog dog"]])
    """
    if len(texts) != len(images):
        raise SpecError(f"{len(texts)} lists of texts for {len(images)} pictures; give each picture one.")
    if not len(images):
        return []
    seen = run_prefix(vlm, images, prompt) if prefix is None else prefix
    rows = list(dict.fromkeys((picture, text) for picture, own in enumerate(texts) for text in own))
    most = max(1, MAX_BATCH_TILES // max(seen.tiles))
    found: dict[tuple[int, str], float] = {}
    for start in range(0, len(rows), most):
        part = rows[start : start + most]
        pictures = [picture for picture, _ in part]
        with resume_from(vlm, seen, pictures):
            means = _forced(vlm, seen.select(pictures), [text for _, text in part])
        found |= dict(zip(part, means, strict=True))
    return [[found[picture, text] for text in own] for picture, own in enumerate(texts)]


def _forced(vlm: Vlm, inputs: Mapping[str, Any], texts: Sequence[str]) -> list[float]:
    """Mean log-probabilities of answers that are put into the model's mouth, one for each row of the inputs."""
    ends, tokenizer = _ends(vlm), vlm.processor.tokenizer
    # What looks like a special token in a text is text: another <image> would want another picture.
    own = [tokenizer(t, add_special_tokens=False, split_special_tokens=True)["input_ids"] + ends[:1] for t in texts]
    asked = inputs["input_ids"]
    longest = max(map(len, own))
    answers = asked.new_tensor([row + ends[:1] * (longest - len(row)) for row in own])  # (rows, longest)
    real = torch.arange(longest, device=asked.device) < asked.new_tensor([len(row) for row in own])[:, None]
    more = {"input_ids": answers, "attention_mask": real.to(inputs["attention_mask"].dtype)}
    longer = {
        name: torch.cat([value, more.get(name, torch.zeros_like(answers)).to(value)], 1)
        if isinstance(value, torch.Tensor) and value.shape == asked.shape  # token types and the like: 0 is text
        else value
        for name, value in inputs.items()
    }
    logits = vlm.model(**longer, **limit_logits(vlm.model, longest + 1)).logits
    log = logits[:, -longest - 1 : -1].float().log_softmax(-1)  # (rows, longest, words)
    answers, real = answers.to(log.device), real.to(log.device)
    chosen = log.gather(-1, answers[..., None])[..., 0]
    last = real & (real.cumsum(1) == real.sum(1, keepdim=True))
    chosen = torch.where(last, log[..., ends].logsumexp(-1), chosen)  # any of its ends ends the answer
    return (torch.where(real, chosen, 0.0).sum(1) / real.sum(1)).tolist()


def _ends(vlm: Vlm) -> list[int]:
    given = getattr(vlm.model.generation_config, "eos_token_id", None)
    given = vlm.processor.tokenizer.eos_token_id if given is None else given
    if given is None:
        raise ModelError(f"{vlm.id or 'the model'} names no token that ends an answer; set its eos_token_id.")
    return list(given) if isinstance(given, Sequence) else [int(given)]
