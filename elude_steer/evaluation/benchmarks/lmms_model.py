"""A steered model for lmms-eval, so that any of its tasks with one image per question runs under an edit.

Only lmms-eval imports this module: `--model elude_steer --model_args atlas=toyland,minus=dog`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmms_eval.api.model import lmms
from PIL import Image

from elude_steer.atlas.manifest import EMBEDDED_ATLAS
from elude_steer.errors import SpecError
from elude_steer.models.prefix_cache import image_batches, run_prefix
from elude_steer.steering.caption_batches import MAX_BATCH_IMAGES
from elude_steer.steering.settings import merge_settings
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.progress import track

_IMAGE = "<image>"  # in some tasks' questions; the model's own template has it already
_LONGEST = 1024  # tokens of an answer where the task does not say


class SteeredModel(lmms):
    """A model that answers under an edit.

    Args:
        atlas: a folder, a name, or a Hub id.
        minus: concepts to remove, joined by + (`dog+cat`), because lmms-eval separates arguments by commas.
        plus: concepts to add, joined by +.
        model: another copy of the model.
        device: where the model computes.
        dtype: the model's number type.
        threads: threads on a CPU.
        batch_size: largest number of images that are answered together.
        max_batch_size: of lmms-eval; not used.
        trust_remote_code: whether code that comes with the model or the matcher may run: True, `true` or `yes`;
            anything else is a no.
        **settings: those of the edit; unknown ones are refused.
    """

    is_simple = True

    def __init__(
        self,
        atlas: str = EMBEDDED_ATLAS,
        minus: str = "",
        plus: str = "",
        model: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        threads: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        trust_remote_code: bool | str = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        merge_settings(settings)  # refuses a wrong one before the model is loaded
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else MAX_BATCH_IMAGES
        trust_remote_code = str(trust_remote_code).strip().lower() in ("true", "yes")
        self.steerer = Steerer.load(
            atlas, model=model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, threads=threads
        )
        words = {role: [word for word in str(text).split("+") if word] for role, text in (("-", minus), ("+", plus))}
        named = bool(words["-"] or words["+"])
        self.plan = self.steerer.prepare_plan(words["-"], words["+"], settings=settings)[0] if named else None

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The greedy answer to each request, cut where the task says; tasks that ask for other decoding are refused."""
        for request in requests:
            check_greedy(request.args[1], str(request.args[4]))
        answers: list[str] = []
        tracked = track(requests, "answering", "questions")
        for batch, images in image_batches(self.steerer.vlm, tracked, self._read_image, self.batch_size):
            prompts = [str(request.args[0]).replace(_IMAGE, "").strip() for request in batch]
            options = [request.args[1] for request in batch]
            longest = max(int(one.get("max_new_tokens", _LONGEST)) for one in options)
            prefix = run_prefix(self.steerer.vlm, images, prompts)
            texts = self.steerer.captions(images, [[self.plan]] * len(batch), max_new_tokens=longest, prefix=prefix)
            answers += [cut_answer(text, one.get("until")) for (text,), one in zip(texts, options, strict=True)]
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Not supported: tasks that compare likelihoods are refused."""
        raise NotImplementedError("elude_steer answers questions; choose a task that generates text.")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Not supported: an edit is of one image, and there is no conversation."""
        raise NotImplementedError("elude_steer answers one question about one image; choose another task.")

    def _read_image(self, request: Any) -> Image.Image:
        _, _, doc_to_visual, number, task, split = request.args
        images = doc_to_visual(self.task_dict[task][split][number])
        if len(images) != 1 or not isinstance(images[0], Image.Image):
            raise SpecError(f"question {number} of task '{task}' has {len(images)} images; only one can be steered.")
        return images[0].convert("RGB")


def check_greedy(options: Mapping[str, Any], task: str) -> None:
    """Raise if a task asks for sampling or beams, also by a temperature alone, as models of lmms-eval read it."""
    sampled = options.get("do_sample")
    asked = {
        "do_sample": str(sampled).lower() not in ("none", "false", "0"),
        "temperature": sampled is None and float(options.get("temperature") or 0) > 0,
        "num_beams": int(options.get("num_beams") or 1) > 1,
    }
    for name in asked:
        if asked[name]:
            raise SpecError(
                f"task '{task}' asks for {name}={options[name]}, and edited answers are greedy; add "
                "--gen_kwargs do_sample=False,temperature=0,num_beams=1."
            )


def cut_answer(text: str, until: str | Sequence[str] | None) -> str:
    """The answer up to the first of the texts that end it."""
    ends = [until] if isinstance(until, str) else list(until or ())
    for end in ends:
        text = text.split(end)[0] if end else text
    return text.strip()
