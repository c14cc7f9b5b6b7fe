"""The model's threads: one makes requests ready, one answers all that wait together, each under its own edit.

Requests that come while the model writes wait for the next batch. An answer leaves as soon as it is complete, also if
others of its batch go on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.demo.access import hide_folders
from elude_steer.errors import EludeSteerError
from elude_steer.models.images import open_image
from elude_steer.models.prefix_cache import run_prefix
from elude_steer.server.access import Limits, RefusedError
from elude_steer.server.answers import Answer, Writing
from elude_steer.server.batches import Batches, Conversation, takes_several
from elude_steer.server.edits import Edits
from elude_steer.server.image_cache import ImageCache, image_key
from elude_steer.server.metrics import Metrics
from elude_steer.server.requests import ChatRequest
from elude_steer.specs import Recipe
from elude_steer.steering.caption_batches import MAX_BATCH_IMAGES, MAX_BATCH_TILES
from elude_steer.steering.steerer import Steerer

_GATHER = 0.005  # seconds for which a free model waits for the requests of others that come at the same moment
Event = str | Answer | RefusedError  # more text, the end, or an error


@dataclass(eq=False)
class Job:
    """A request on its way to its answer.

    Attributes:
        request: what is asked.
        files: the bytes of its images; the list is emptied once they are read.
        owner: whose request it is.
        send: takes the events of the answer; called from other threads.
        conversation: what the model gets, once it is ready.
        gone: whether the client went away.
        nbytes: the memory that it counts as.
        report: what is to say of its edit.
        sent: the text that was sent.
        done: whether its last event was sent.
    """

    request: ChatRequest
    files: list[bytes]
    owner: str
    send: Callable[[Event], object]
    conversation: Conversation | None = None
    gone: bool = False
    nbytes: int = 0
    report: dict[str, Any] | None = None
    sent: str = ""
    done: bool = False
    begun: float = field(default_factory=time.monotonic)


class Engine:
    """Answers requests on one model.

    Args:
        steerer: the model and its atlas; nothing else may use its processor meanwhile.
        recipes: those that requests can name.
        limits: what a request may ask.
        metrics: counts.
        batch: requests that are answered together at most.
        cache_bytes: of what is kept of images.
    """

    def __init__(
        self,
        steerer: Steerer[Atlas],
        recipes: dict[str, Recipe],
        limits: Limits,
        metrics: Metrics,
        *,
        batch: int = MAX_BATCH_IMAGES,
        cache_bytes: int = 2**30,
    ) -> None:
        self.steerer, self.limits, self.metrics, self.batch = steerer, limits, metrics, batch
        self.edits = Edits(steerer, recipes)
        self.images = ImageCache(cache_bytes)
        self._batches = Batches(steerer, self.edits, self.images, self._count_images)
        ends = getattr(steerer.vlm.model.generation_config, "eos_token_id", None)
        self._ends = frozenset(ends if isinstance(ends, list | tuple) else [] if ends is None else [ends])
        context = getattr(steerer.vlm.model.config.get_text_config(), "max_position_embeddings", None)
        self._context = context if isinstance(context, int) else 2**31
        self._lock = threading.Lock()
        self._open: set[Job] = set()
        self._ready: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._closing = False
        # One thread: tokenizers written in Rust refuse to be used by two at once.
        self._preparer = ThreadPoolExecutor(1, "prepare")
        self._model_thread = threading.Thread(target=self._answer_all, name="model", daemon=True)
        metrics.watch("waiting_requests", "Requests that are not answered yet.", lambda: len(self._open))
        metrics.watch("image_cache_bytes", "Memory of what is kept of images.", lambda: self.images.nbytes)

    def start(self) -> None:
        """Warm the model up, which also finds out what can be kept of an image, and begin to answer."""
        from PIL import Image

        run_prefix(self.steerer.vlm, [Image.new("RGB", (96, 96), (120, 130, 140))])
        self._model_thread.start()

    def close(self) -> None:
        """Answer no more: what waits is refused, and what is being written ends at its next token."""
        self._closing = True
        self._preparer.shutdown(wait=True, cancel_futures=True)
        self._ready.put(None)
        if self._model_thread.is_alive():
            self._model_thread.join()
        for job in list(self._open):
            self._finish(job, RefusedError("the server is stopping; send the request again.", 503))

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self._model_thread.is_alive() and not self._closing

    def submit(
        self,
        request: ChatRequest,
        files: list[bytes],
        send: Callable[[Event], object],
        *,
        owner: str = "",
        share: float = 1.0,
    ) -> Job:
        """Take a request; raises if too many wait.

        Args:
            request: what is asked, without images.
            files: the bytes of its images; the list is emptied once they are read.
            send: takes the events of the answer; called from other threads.
            owner: whose request it is.
            share: the part of what may wait that one owner may take.
        """
        job = Job(request, files, owner, send, nbytes=sum(map(len, files)))
        with self._lock:
            if not self.is_alive:
                raise RefusedError("the server is stopping; send the request again.", 503)
            own = [one for one in self._open if one.owner == owner]
            self._check_room(job, self._open, 1.0)
            self._check_room(job, own, share)
            self._open.add(job)
        self._preparer.submit(self._prepare, job)
        return job

    def leave(self, job: Job) -> None:
        """Say that the client of a job is gone: its answer ends at the next token."""
        if not job.done:
            job.gone = True
            self.metrics.gone.inc()

    def _check_room(self, job: Job, others: Collection[Job], share: float) -> None:
        """Raise if a job has no place beside others in this share of what may wait."""
        nbytes = job.nbytes + sum(one.nbytes for one in others)
        if len(others) >= max(1, share * self.limits.waiting) or nbytes > share * self.limits.waiting_bytes:
            raise _too_busy()

    def _finish(self, job: Job, event: Answer | RefusedError) -> None:
        """Send the last event of a job, once."""
        with self._lock:
            if job.done:
                return
            job.done = True
            self._open.discard(job)
        if isinstance(event, Answer):
            self.metrics.prompt_tokens.inc(event.prompt_tokens)
            self.metrics.answer_tokens.inc(event.answer_tokens)
            self.metrics.seconds.observe(time.monotonic() - job.begun)
            if event.steer is not None:
                self.metrics.edited.inc()
        job.send(event)

    def _count_images(self, new: int, known: int) -> None:
        self.metrics.tower_images.inc(new)
        self.metrics.known_images.inc(known)

    # Making ready

    def _prepare(self, job: Job) -> None:
        try:
            if job.gone:
                raise RefusedError("the client is gone.", 499)
            job.conversation = self._make_conversation(job)
            with self._lock:
                job.nbytes = job.conversation.nbytes
                if sum(one.nbytes for one in self._open) > self.limits.waiting_bytes:
                    raise _too_busy()
        except Exception as error:  # noqa: BLE001 - whatever a request does, the next one is answered
            self._finish(job, as_refusal(error))
        else:
            job.files.clear()  # others hold the same list
            self._ready.put(job)

    def _make_conversation(self, job: Job) -> Conversation:
        """Read the images and make the inputs; everything that is wrong with one request alone shows here."""
        request, vlm = job.request, self.steerer.vlm
        edit = self.edits.plan(request.edit)
        images = [open_image(data, max_pixels=self.limits.pixels) for data in job.files]
        sizes = tuple((image.width, image.height) for image in images)
        if edit is not None:
            for size in sizes:
                edit.check_fits(size)
        inputs = self._read_messages(request, images)
        if len(images) > 1 and not takes_several(vlm, inputs, len(images)):
            raise RefusedError("this model takes one image a request here; send one.", param="messages")
        keys = tuple(image_key(image, alone=len(images) == 1) for image in images)
        conversation = Conversation(inputs, keys, sizes, tuple(map(vlm.grid, sizes)), edit)
        allowed = min(self.limits.prompt_tokens, self._context - 1)
        if conversation.prompt_tokens > allowed:
            raise RefusedError(
                f"the prompt with its images has {conversation.prompt_tokens:,} tokens, and {allowed:,} are allowed; "
                "send a shorter text, or fewer or smaller images.",
                code="context_length_exceeded",
                param="messages",
            )
        return conversation

    def _read_messages(self, request: ChatRequest, images: Sequence[Any]) -> Any:
        """The model's inputs; templates and processors of models refuse messages with errors of any kind."""
        try:
            # What waits, waits in the machine's memory; a batch goes to the model's device when its turn comes.
            return self.steerer.vlm.chat_inputs(request.messages, images, torch.device("cpu"))
        except (EludeSteerError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = hide_folders(" ".join(f"{type(error).__name__}: {error}".split())[:200])
            raise RefusedError(
                f"this model's chat template or processor refuses the messages ({what}); roles may have to take turns.",
                param="messages",
            ) from error

    # Answering

    def _answer_all(self) -> None:
        try:
            while not self._closing:
                jobs = self._take()
                if jobs:
                    self._answer(jobs)
        finally:
            if not self._closing:  # nothing answers any more; `is_alive` says so
                for job in list(self._open):
                    self._finish(job, RefusedError("the server has failed; please report it.", 503))

    def _take(self) -> list[Job]:
        """The jobs of the next batch: as many of those that wait as fit."""
        if not self._waiting:
            self._receive(self._ready.get())
            time.sleep(_GATHER)
        while not self._ready.empty():
            self._receive(self._ready.get())
        jobs, tiles = list[Job](), 0
        while self._waiting and len(jobs) < self.batch:
            job = self._waiting[0]
            own = job.conversation.tiles if job.conversation else 0
            if jobs and tiles + own > MAX_BATCH_TILES:
                break
            self._waiting.popleft()
            if job.gone:
                self._finish(job, RefusedError("the client is gone.", 499))
                continue
            jobs.append(job)
            tiles += own
        return jobs

    def _receive(self, job: Job | None) -> None:
        if job is not None:
            self._waiting.append(job)

    def _answer(self, jobs: Sequence[Job]) -> None:
        """Answer a batch; if it fails, each job alone, so that one request cannot spoil the others."""
        try:
            self._generate(jobs)
        except Exception as error:  # noqa: BLE001 - the model's thread goes on whatever happens
            if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
                torch.cuda.empty_cache()
            remaining = [job for job in jobs if not job.done]
            for job in remaining:
                if len(jobs) == 1:
                    self._finish(job, as_refusal(error))
                else:
                    self._answer([job])
        for job in jobs:
            if not job.done:
                self._finish(job, RefusedError("the answer was broken off.", 499 if job.gone else 503))

    def _generate(self, jobs: Sequence[Job]) -> None:
        self.metrics.batch_rows.observe(len(jobs))
        conversations = [job.conversation for job in jobs if job.conversation is not None]
        room = [self._context - one.prompt_tokens for one in conversations]
        lengths = [min(job.request.max_tokens, own) for job, own in zip(jobs, room, strict=True)]
        writings = [self._begin_writing(job, length) for job, length in zip(jobs, lengths, strict=True)]

        def on_report(number: int, report: dict[str, Any] | None) -> None:
            jobs[number].report = report

        def on_step(tokens: torch.Tensor) -> torch.Tensor:
            for job, writing, conversation, row in zip(jobs, writings, conversations, tokens.tolist(), strict=True):
                if job.gone or self._closing or job.done:
                    continue
                if text := writing.read(row):
                    job.sent += text
                    job.send(text)
                if writing.finish_reason:
                    self._finish(job, _last_event(writing, conversation.prompt_tokens, job.report))
            return torch.tensor([job.done or job.gone or self._closing for job in jobs], device=tokens.device)

        self._batches.run(conversations, max(lengths), on_report, on_step)

    def _begin_writing(self, job: Job, length: int) -> Writing:
        vlm, request = self.steerer.vlm, job.request
        takes_back = bool(getattr(vlm.processor.tokenizer, "clean_up_tokenization_spaces", False))
        decode = lambda tokens: vlm.decode([tokens])[0]  # noqa: E731
        return Writing(decode, length, self._ends, request.stop, request.stream, job.sent, takes_back)


def _last_event(writing: Writing, prompt_tokens: int, report: dict[str, Any] | None) -> Answer | RefusedError:
    if writing.differs:
        return RefusedError("the answer is not what was sent of it; ask again, without stream.", 500)
    return Answer(writing.text, writing.finish_reason, prompt_tokens, writing.count, report)


def as_refusal(error: Exception) -> RefusedError:
    """An error as a response: what is wrong with the request in its words, all else without details."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, EludeSteerError):
        return RefusedError(hide_folders(str(error)))
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return RefusedError("there is not enough memory for this request; send fewer or smaller images.", 503)
    return RefusedError(f"the server failed ({type(error).__name__}); please report it.", 500)


def _too_busy() -> RefusedError:
    return RefusedError("too many requests are waiting; try again in a moment.", 429, code="server_busy", retry_after=2)
