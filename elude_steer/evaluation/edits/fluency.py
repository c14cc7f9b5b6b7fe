"""How natural a text is to the unsteered model, and how far an edit moves what the model would say next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from elude_steer.errors import ModelError, SpecError
from elude_steer.models.prefix_cache import Prefix, resume_from, run_prefix
from elude_steer.models.vlm import PROMPT, Vlm, limit_logits
from elude_steer.steering.apply_plans import resume_under_plans
from elude_steer.steering.caption_batches import MAX_BATCH_TILES
from elude_steer.steering.plan import Plan
from elude_steer.steering.steerer import Steerer


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


@torch.inference_mode()
def divergences(
    steerer: Steerer,
    images: Sequence[Any],
    plans: Sequence[Plan],
    texts: Sequence[str],
    prompt: str = PROMPT,
    *,
    prefix: Prefix | None = None,
) -> list[float]:
    """How far each plan moves the model's next-token distributions, in nats a token.

    That is the mean Kullback-Leibler divergence of the steered from the unsteered distribution, at every token of the
    text and behind its end. On images that an edit should not touch it measures the edit's side effects.

    Args:
        steerer: the model and the atlas.
        images: PIL images.
        plans: one for each image.
        texts: one for each image, such as its unsteered caption.
        prompt: the question.
        prefix: the result of `run_prefix` for these images and this prompt, if it is known already.
    """
    if not len(images):
        return []
    vlm, found = steerer.vlm, []
    prefix = run_prefix(vlm, images, prompt) if prefix is None else prefix
    batch_size = max(1, MAX_BATCH_TILES // max(prefix.tiles))
    for start in range(0, len(images), batch_size):
        rows = range(start, min(start + batch_size, len(images)))
        part = [texts[row] for row in rows]
        with vlm.use_threads(), resume_under_plans(vlm, prefix, [(row, None) for row in rows]) as inputs:
            before, _, mask = _answer_log_probabilities(vlm, inputs, part)
        edits = [(row, steerer.gather_weights(plans[row])) for row in rows]
        with vlm.use_threads(), resume_under_plans(vlm, prefix, edits) as inputs:
            after = _answer_log_probabilities(vlm, inputs, part)[0]
        moved = (before.exp() * (before - after)).sum(-1).clamp_min(0)
        found += (torch.where(mask, moved, 0.0).sum(1) / mask.sum(1)).tolist()
    return found


def repetition(text: str) -> float:
    """The share of a text's pairs of neighbouring words that the text has had before; 0 for a text without a pair.

    Example:
        >>> repetition("a dog and a dog and a cat")
        0.42857142857142855
    """
    pairs = list(pairwise(re.findall(r"[\w'-]+", text.lower())))
    return 1 - len(set(pairs)) / len(pairs) if pairs else 0.0


def _mean_log_probabilities(vlm: Vlm, inputs: Mapping[str, Any], texts: Sequence[str]) -> list[float]:
    """Mean log-probability of the text that is forced as the answer to each row of the inputs."""
    log_probabilities, answers, mask = _answer_log_probabilities(vlm, inputs, texts)
    chosen = log_probabilities.gather(-1, answers[..., None])[..., 0]  # (rows, longest)
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    # Any end token ends the answer.
    chosen = torch.where(last, log_probabilities[..., _end_tokens(vlm)].logsumexp(-1), chosen)
    return (torch.where(mask, chosen, 0.0).sum(1) / mask.sum(1)).tolist()


def _answer_log_probabilities(
    vlm: Vlm, inputs: Mapping[str, Any], texts: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of all tokens at each place of the answers that are forced, `(rows, longest, vocabulary)`.

    Returns:
        These, the answers' tokens `(rows, longest)`, and which of them count.
    """
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
    return logits[:, -longest - 1 : -1].float().log_softmax(-1), answers.to(logits.device), mask.to(logits.device)


def _end_tokens(vlm: Vlm) -> list[int]:
    """The ids of the tokens that end an answer."""
    ids = getattr(vlm.model.generation_config, "eos_token_id", None)
    ids = vlm.processor.tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ModelError(f"{vlm.id or 'the model'} has no token that ends an answer; set its eos_token_id.")
    return list(ids) if isinstance(ids, Sequence) else [int(ids)]
