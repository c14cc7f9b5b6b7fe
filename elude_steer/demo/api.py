"""The page for programs: steering and the list of concepts, over HTTP and as tools of an MCP server.

Gradio describes both functions to clients by their annotations and docstrings. With several atlases, those of the first
are `steer` and `concepts`, and those of any other `steer_NAME` and `concepts_NAME`.
"""

import base64
import binascii
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import unquote

from elude_steer.demo.access import hide_folders, rate_limit_key
from elude_steer.demo.pages import Page
from elude_steer.demo.presenter import Presenter
from elude_steer.demo.rate_limit import RateLimit
from elude_steer.demo.session import EditRequest, ImageFile
from elude_steer.errors import EludeSteerError, ImageError, SpecError

T = TypeVar("T")
_MAX_WAITING = 8  # calls at a time; each waits in a thread, of which Gradio has 40
_FILE_ROUTE = "/gradio_api/file="


def add_functions(gr: Any, app: Any, pages: Sequence[Page], rate_limit: RateLimit | None) -> None:
    """Add the functions of all pages to a Gradio app, inside its context. The limits hold for all pages together.

    They are not queued: Gradio's MCP server calls queued functions through a connection of its own, which hides the
    caller's address from the rate limit.
    """

    class Refusal(gr.Error):
        """An error whose text is its message; Gradio's would be in quotation marks in the answer of a tool."""

        def __str__(self) -> str:
            return str(self.message)

    free = threading.BoundedSemaphore(_MAX_WAITING)

    def answer(request: Any, presenter: Presenter, job: Callable[[], T]) -> T:
        try:
            if rate_limit:
                rate_limit.check(rate_limit_key(request))
            if not free.acquire(blocking=False):
                raise SpecError("too many requests are waiting; try again in a minute.")
            try:
                return presenter.run_in_worker(job)
            finally:
                free.release()
        except EludeSteerError as error:
            raise Refusal(hide_folders(str(error)), print_exception=False) from error

    for page in pages:
        for function in _make_functions(gr, app, page.presenter, answer):
            if len(pages) > 1:
                function.__doc__ = _describe(function.__doc__ or "", page)
            function.__name__ += page.suffix  # Gradio names tools by it, and functions for its clients by api_name
            gr.api(function, api_name=function.__name__, queue=False)


def _make_functions(gr: Any, app: Any, presenter: Presenter, answer: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The functions of one page; `answer(request, presenter, job)` runs a job within the limits."""

    def steer(  # noqa: D417 - Gradio passes the request
        request: gr.Request,
        image: str,
        minus: list[str] = [],  # noqa: B006 - never changed, and null would be a worse default in the schema
        plus: list[str] = [],  # noqa: B006
        box: list[float] = [],  # noqa: B006
        prompt: str = "",
        settings: dict[str, Any] = {},  # noqa: B006
    ) -> tuple[str, str, str]:
        """Caption an image as if some concepts were not in it, or as if others were. The steered caption is false.

        Args:
            image: a data URI (data:image/png;base64,...), an example's name, or an address from upload_file_to_gradio.
            minus: concepts to remove, such as ["dog"]. Any word works; see the tool concepts for what is known.
            plus: concepts to add. They go where the removed concepts are, or into the box.
            box: region for the change in pixels, as [left, top, right, bottom]. Empty means where the concepts are.
            prompt: question about the image. Empty asks for a description in one sentence.
            settings: settings of the edit that differ from the defaults, such as {"nu": 20, "mode": "scale"}.

        Returns:
            the caption without the edit, the caption with the edit, what was changed with notes
        """

        def compute() -> tuple[str, str, str]:
            words = _read_words("minus", minus), _read_words("plus", plus)
            edit = EditRequest(
                None, None, *words, _read_text("prompt", prompt), _read_settings(settings), _read_box(box)
            )
            _image_text(image)
            edit.validate()  # before the image is decoded
            edit = replace(edit, image=open_argument(app, presenter, image))
            result = presenter.steer(edit)
            return str(result.baseline), result.caption, "\n".join([str(result.plan), *result.notes])

        return answer(request, presenter, compute)

    def concepts(request: gr.Request, like: str = "", limit: int = 50) -> list[str]:  # noqa: D417
        """List concepts that the atlas of this model knows, for the arguments minus and plus of steer.

        Args:
            like: a word; the concepts closest to it in meaning come first. Empty lists the most frequent first.
            limit: how many to list at most.

        Returns:
            the concepts
        """
        return answer(request, presenter, lambda: presenter.list_concepts(_read_text("like", like), limit))

    return [steer, concepts]


def _describe(docstring: str, page: Page) -> str:
    """The docstring of a function of one of several pages: it names the atlas and the page's other function."""
    for other in ("the tool concepts", "minus and plus of steer"):
        docstring = docstring.replace(other, other + page.suffix)
    return f"Atlas '{page.name}'. {docstring}"


def open_argument(app: Any, presenter: Presenter, image: Any) -> ImageFile:
    """Read the image of a call; nothing is fetched from an address, and no file is opened that was not uploaded here.

    Args:
        app: the Gradio app, which knows the uploaded files.
        presenter: knows the examples and the largest size.
        image: a data URI, base64, the name of an example, or what the app answered to an upload.
    """
    text = _image_text(image)
    examples = {example.name: example.path for example in presenter.examples}
    if text in examples:
        return ImageFile.from_path(examples[text])
    path = unquote(text.partition(_FILE_ROUTE)[2]) or text
    if path in app.upload_file_set:
        return ImageFile.from_path(path, max_pixels=presenter.max_pixels)
    if text.startswith(("http://", "https://", "/")):
        raise ImageError(
            "this page opens no addresses and no files of its machine; send the image as a data URI "
            "(data:image/png;base64,…), or upload it first."
        )
    return _decode(text, presenter)


def _image_text(image: Any) -> str:
    text = image.get("path") if isinstance(image, dict) else image
    if not isinstance(text, str) or not text.strip():
        raise ImageError("there is no image; send a data URI (data:image/png;base64,…) or the name of an example.")
    return text


def _read_words(name: str, value: Any) -> tuple[str, ...]:
    """The words of a list, or of one word alone; HTTP clients may send anything."""
    words = [value] if isinstance(value, str) else value or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise SpecError(f'{name} is {str(value)[:40]}; send a list of words: ["dog"].')
    return tuple(words)


def _read_box(value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, list) else [value] if value else []
    if numbers and (len(numbers) != 4 or not all(type(number) in (int, float) for number in numbers)):
        raise SpecError(f"box is {str(value)[:40]}; send four numbers: [left, top, right, bottom] in pixels.")
    return tuple(numbers)


def _read_settings(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise SpecError(f'settings is {str(value)[:40]}; send names with values: {{"nu": 20}}.')
    return dict(value or {})


def _read_text(name: str, value: Any) -> str:
    if not isinstance(value, str | None):
        raise SpecError(f"{name} is {str(value)[:40]}; send a text.")
    return (value or "").strip()


def _decode(text: str, presenter: Presenter) -> ImageFile:
    if len(text) * 3 // 4 > presenter.max_bytes:
        raise ImageError(f"the image has more than {presenter.max_bytes // 2**20} MB; send a smaller one.")
    head, comma, data = text.partition(",")
    try:
        file = ImageFile("image", base64.b64decode(data if comma else head, validate=True))
    except (binascii.Error, ValueError) as error:
        names = ", ".join(example.name for example in presenter.examples)
        hint = f" or the name of an example ({names})" if names else ""
        raise ImageError(f"the image is no base64; send a data URI (data:image/png;base64,…){hint}.") from error
    file.open(presenter.max_pixels)
    return file
