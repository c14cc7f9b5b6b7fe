"""The page for programs: what they can call, what it answers, and that the page's limits hold for them."""

import base64
import io
import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from PIL import Image

import elude_steer as es
from elude_steer.demo import access, api
from elude_steer.demo.app import UNEXPECTED
from elude_steer.demo.pages import make_pages
from elude_steer.demo.presenter import Presenter
from elude_steer.demo.rate_limit import RateLimit
from elude_steer.demo.recipes import shipped_examples
from elude_steer.demo.session import ImageState
from elude_steer.errors import ImageError, MissingPackageError, SpecError
from elude_steer.utils import optional
from tests.demo.helpers import DOG, TEDDY, data_uri, make_request, png_with_false_size
from tests.helpers.programs import call
from tests.helpers.visitor import serve_demo

gradio = pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'elude-steer[demo]'")


def uri(path):
    return data_uri(Image.open(path))


@pytest.fixture(scope="module")
def address():
    pytest.importorskip("mcp", reason="the MCP server needs mcp: pip install 'elude-steer[mcp]'")
    with serve_demo("--atlas", "toyland", "--mcp") as (address, _):
        yield address


def test_the_tools_are_the_functions_for_programs_and_nothing_else(address):
    (tools,) = call("mcp", address)
    assert set(tools) == {"steer", "concepts"}
    steer, concepts = (tools[name]["inputSchema"] for name in ("steer", "concepts"))
    assert list(steer["properties"]) == ["image", "minus", "plus", "box", "prompt", "settings"]
    assert steer["required"] == ["image"]
    assert steer["properties"]["minus"]["items"] == {"type": "string"}
    assert list(concepts["properties"]) == ["like", "limit"] and "required" not in concepts
    for tool in tools.values():
        assert "Returns: " in tool["description"]
        assert all(len(one["description"]) > 10 for one in tool["inputSchema"]["properties"].values())


def test_a_tool_answers_what_the_library_answers(address):
    box = [0, 56, 40, 96]
    _, removed, placed, other, found = call(
        "mcp",
        address,
        ("steer", {"image": uri(TEDDY), "minus": ["teddy"]}),
        ("steer", {"image": "teddy", "plus": ["dog"], "box": box}),
        ("steer", {"image": uri(DOG), "minus": ["dog"], "plus": ["biker"], "settings": {"strength": 2, "fit": 0.5}}),
        ("concepts", {"like": "sofa", "limit": 3}),
    )
    expected = [
        es.steer(TEDDY, minus=["teddy"]),
        es.steer(TEDDY, plus=["dog"], where=tuple(box)),
        es.steer(DOG, minus=["dog"], plus=["biker"], strength=2, fit=0.5),
    ]
    for (failed, texts), result in zip((removed, placed, other), expected, strict=True):
        assert not failed, texts
        assert texts[:2] == [result.baseline, result.caption]
        assert texts[2].startswith(str(result.plan))
    assert found == [False, ["['chair', 'bed', 'table']"]]


def test_a_tool_refuses_in_one_line(address):
    calls = {
        "no files of its machine": {"image": "/etc/passwd", "minus": ["dog"]},
        "opens no addresses": {"image": "http://127.0.0.1:1/a.png", "minus": ["dog"]},
        "is no base64; send a data URI": {"image": "dgo", "minus": ["dog"]},
        "cannot be read as an image": {"image": base64.b64encode(b"no image").decode(), "minus": ["dog"]},
        "name a concept to remove or to add": {"image": "dog"},
        "a concept may have at most 100": {"image": "dog", "minus": ["x" * 300]},
        "at most 8 concepts can be removed": {"image": "dog", "minus": [f"word {n}" for n in range(9)]},
        "at most 1,000 characters": {"image": "dog", "minus": ["dog"], "prompt": "x" * 1001},
        "there is no setting 'gama'. Did you mean": {
            "image": "dog",
            "minus": ["dog"],
            "settings": {"gama": 1},
        },
        "box is [1, 2]; send four numbers": {"image": "dog", "plus": ["dog"], "box": [1, 2]},
    }
    _, *answers = call("mcp", address, *(("steer", arguments) for arguments in calls.values()))
    for (failed, (text,)), expected in zip(answers, calls, strict=True):
        assert failed
        assert expected in text
        assert "\n" not in text and not text.endswith("'") and "Traceback" not in text


def test_clients_of_gradio_call_the_same_functions_and_upload_files(address):
    functions, uploaded, found, refused = call(
        "http",
        address,
        ("steer", {"image": {"file": str(TEDDY)}, "minus": ["teddy"]}),
        ("concepts", {"limit": 2}),
        ("steer", {"image": {"file": str(TEDDY)}, "minus": ["teddy"], "plus": "x" * 101}),
    )
    assert set(functions) == {"/steer", "/concepts"}
    result = es.steer(TEDDY, minus=["teddy"])
    assert uploaded[1][:2] == [result.baseline, result.caption]
    assert found == [False, list(es.Atlas.load("toyland").labels.counts)[:2]]
    assert refused[0] and "a concept may have at most 100" in refused[1]


def test_the_rate_limit_holds_for_tools():
    pytest.importorskip("mcp")
    script = (
        "import sys; from elude_steer.demo.presenter import Presenter; "
        "from elude_steer.demo.rate_limit import RateLimit; from elude_steer.demo.recipes import shipped_examples; "
        "from elude_steer import Steerer; from elude_steer.demo.app import make_app; "
        "app = make_app(Presenter(Steerer.load(), shipped_examples('toyland')), rate_limit=RateLimit(2, 10)); "
        "app.launch(server_name='127.0.0.1', server_port=int(sys.argv[-1]), prevent_thread_lock=True, quiet=True, "
        "mcp_server=True); print('http', file=sys.stderr, flush=True); app.block_thread()"
    )
    with serve_demo(command=[sys.executable, "-c", script]) as (address, _):
        _, *answers = call("mcp", address, *[("steer", {"image": "dog", "minus": ["dog"]})] * 2, ("concepts", {}))
        _, again = call("mcp", address, ("steer", {"image": "dog", "minus": ["dog"]}))  # of a new session
    assert [failed for failed, _ in answers] == [False, False, True]
    assert answers[-1][1] == again[1] == ["this page allows 2 requests a minute per visitor; wait a moment."]


# Without a server


class FakeGradio:
    """The parts of Gradio that `add_functions` uses; keeps the functions."""

    Request = object
    Error = gradio.Error

    def __init__(self):
        self.functions = {}

    def api(self, function, *, api_name, queue):
        assert not queue and function.__name__ == api_name  # the names of the tool and of the function
        self.functions[api_name] = function


def functions_of(*presenters, rate_limit=None, uploaded=()):
    fake = FakeGradio()
    api.add_functions(fake, SimpleNamespace(upload_file_set=set(uploaded)), make_pages(presenters), rate_limit)
    return fake.functions


def request_from(host):
    return SimpleNamespace(client=SimpleNamespace(host=host))


def test_callers_are_counted_by_their_address(presenter):
    concepts = functions_of(presenter, rate_limit=RateLimit(1, 3))["concepts"]
    assert concepts(request_from("203.0.113.5"))
    assert concepts(request_from("203.0.113.6"))
    with pytest.raises(gradio.Error, match="1 requests a minute"):
        concepts(request_from("203.0.113.5"))
    assert concepts(request_from("203.0.113.7"))
    with pytest.raises(gradio.Error, match="too many people"):
        concepts(request_from("203.0.113.8"))


def test_too_many_calls_at_a_time_are_refused(presenter, monkeypatch):
    blocked, entered = threading.Event(), threading.Semaphore(0)

    def wait(job):
        entered.release()
        assert blocked.wait(20)
        return job()

    monkeypatch.setattr(presenter, "run_in_worker", wait)
    functions = functions_of(presenter, presenter)
    concepts = functions["concepts"]
    threads = [threading.Thread(target=concepts, args=(request_from("::1"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert entered.acquire(timeout=20)
    for name in ("concepts", "concepts_toyland_2"):  # of all pages together
        with pytest.raises(gradio.Error, match="too many requests are waiting"):
            functions[name](request_from("::1"))
    blocked.set()
    for thread in threads:
        thread.join()
    assert concepts(request_from("::1"))


def test_a_caller_has_one_limit_for_the_functions_of_all_pages(presenter):
    functions = functions_of(presenter, presenter, rate_limit=RateLimit(1, 3))
    assert list(functions) == ["steer", "concepts", "steer_toyland_2", "concepts_toyland_2"]
    assert functions["concepts_toyland_2"](request_from("203.0.113.5"))
    with pytest.raises(gradio.Error, match="1 requests a minute"):
        functions["concepts"](request_from("203.0.113.5"))


def test_the_descriptions_of_several_pages_name_the_atlas_and_their_own_functions(presenter):
    (alone, _), both = functions_of(presenter).values(), functions_of(presenter, presenter)
    assert alone.__doc__.startswith("Caption an image")
    assert both["steer"].__doc__.startswith("Atlas 'toyland'. Caption an image")
    assert both["steer_toyland_2"].__doc__.startswith("Atlas 'toyland 2'. Caption an image")
    assert "see the tool concepts for" in both["steer"].__doc__
    assert "see the tool concepts_toyland_2 for" in both["steer_toyland_2"].__doc__
    assert "minus and plus of steer_toyland_2." in both["concepts_toyland_2"].__doc__


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"image": 5}, "there is no image"),
        ({"image": {"path": None}}, "there is no image"),
        ({"image": "dog", "minus": 5}, r'minus is 5; send a list of words: \["dog"\]'),
        ({"image": "dog", "plus": [["dog"]]}, "plus is"),
        ({"image": "dog", "minus": ["dog"], "prompt": 7}, "prompt is 7; send a text"),
        ({"image": "dog", "plus": ["dog"], "box": "ab"}, "box is ab; send four numbers"),
        ({"image": "dog", "plus": ["dog"], "box": [0, 0, None, 9]}, "send four numbers"),
    ],
)
def test_wrong_types_are_refused_in_words(presenter, arguments, expected):
    with pytest.raises(gradio.Error, match=expected):
        functions_of(presenter)["steer"](request_from("::1"), **arguments)


def test_only_uploaded_files_are_opened(presenter, tmp_path):
    path = tmp_path / "mine one.png"
    Image.open(DOG).save(path)
    app = SimpleNamespace(upload_file_set={str(path)})
    address = f"http://127.0.0.1:7860/gradio_api/file={str(path).replace(' ', '%20')}"
    for image in (str(path), address, {"path": str(path)}):
        assert api.open_argument(app, presenter, image).name == path.name
    app.upload_file_set.clear()
    for image in (str(path), address, {"path": str(path)}):
        with pytest.raises(ImageError, match="opens no addresses and no files"):
            api.open_argument(app, presenter, image)


def test_large_images_are_refused(steerer):
    strict = Presenter(steerer, shipped_examples("toyland"), public=True)
    app = SimpleNamespace(upload_file_set=set())
    with pytest.raises(ImageError, match="more than 5 MB"):
        api.open_argument(app, strict, "data:image/png;base64," + "A" * (7 * 2**20))
    with pytest.raises(ImageError, match="pixels are more than 20,000,000"):
        api.open_argument(app, strict, png_with_false_size(5000))
    data = io.BytesIO()
    Image.new("RGB", (9, 9)).save(data, "PNG")
    assert api.open_argument(app, strict, base64.b64encode(data.getvalue()).decode()).open().size == (9, 9)


def test_concepts_are_listed_by_meaning_or_frequency(presenter):
    assert presenter.list_concepts("Sofa", 1) == ["chair"]
    assert presenter.list_concepts() == presenter.concepts[:50]
    with pytest.raises(SpecError, match="limit is 0; it must be a whole number of at least 1"):
        presenter.list_concepts("dog", 0)


def test_a_box_is_a_region(presenter, steerer):
    request = make_request(TEDDY, (), ("dog",))
    result = presenter.steer(type(request)(**{**vars(request), "box": (0.0, 56.0, 40.0, 96.0)}))
    assert result.caption == steerer.steer(TEDDY, plus=["dog"], where=(0, 56, 40, 96)).caption


def test_an_mcp_server_has_no_password_and_needs_its_package(monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_AUTH", "me:secret")
    command = [sys.executable, "-m", "elude_steer", "demo", "--mcp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "elude-steer: Gradio's MCP server asks for no password; leave out --mcp, or the password.\n"

    def find(name):
        raise ImportError(name)

    monkeypatch.setattr(optional.importlib, "import_module", find)
    monkeypatch.setattr(optional, "is_installed", lambda name: False)
    with pytest.raises(MissingPackageError, match=r"`pip install 'elude-steer\[mcp\]'`, or leave out --mcp"):
        access.check_mcp(True, None)


# A GPU that is lent for each request


def test_a_lent_gpu_runs_the_model_and_passes_on_errors(steerer):
    """`spaces.GPU` runs functions in a forked process: what goes in and out is pickled, and errors lose their text."""
    import pickle

    calls = []

    def lend(function):
        def run(*arguments):
            calls.append(function)
            return pickle.loads(pickle.dumps(function(*pickle.loads(pickle.dumps(arguments)))))

        return run

    lent, here = Presenter(steerer, gpu=lend), Presenter(steerer)
    request = make_request(DOG, ("dog",), ("biker",))
    one, two = lent.steer(request), here.steer(request)
    assert (one.baseline, one.caption, one.plan) == (two.baseline, two.caption, two.plan)
    assert lent.answer(ImageState(), request)[1].caption == two.caption
    assert lent.find_settings(make_request(DOG, ("dog",))).best == here.find_settings(make_request(DOG, ("dog",))).best
    assert lent.try_doses(request) == here.try_doses(request)
    assert lent.caption(request.image) == here.caption(request.image) == two.baseline
    assert len(calls) == 5
    for answer in (lent.steer, lent.try_doses):
        with pytest.raises(SpecError, match="knows nothing like 'democracy'"):
            answer(make_request(DOG, ("democracy",)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"minus": ["dog"] * 20_000}, "at most 8 concepts can be removed"),
        ({"minus": ["dog"], "plus": ["x" * 101]}, "a concept may have at most 100"),
        ({"minus": ["a\0b"]}, "a character that no text can hold"),
        ({"minus": ["dog"], "settings": {"word " * 20_000: 1}}, "may have at most 100"),
        ({"minus": ["dog"], "settings": {f"s{i}": 1 for i in range(20_000)}}, "at most 30 settings"),
        ({"minus": ["dog"], "settings": {"mode": "word " * 20_000}}, "may have at most 100 characters"),
        ({"minus": ["dog"], "settings": [1]}, "send names with values"),
        ({"minus": ["dog"], "prompt": "word " * 20_000}, "the question may have at most 1,000 characters"),
    ],
)
def test_the_limits_of_the_page_are_those_of_its_server(presenter, monkeypatch, arguments, expected):
    """A browser sends eight words; programs may send anything, and are refused before the image is decoded."""
    monkeypatch.setattr(api, "open_argument", lambda *_: pytest.fail("the image was decoded"))
    steer, start = functions_of(presenter)["steer"], time.process_time()
    with pytest.raises(gradio.Error, match=expected) as caught:
        steer(request_from("::1"), "teddy", **arguments)
    assert time.process_time() - start < 1 and len(str(caught.value)) < 300


def test_unexpected_errors_stay_in_the_log_and_uploads_are_paced():
    """Runs in a process, because Gradio leaves event loops open."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.handlers"], capture_output=True, text=True, check=True, timeout=600
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["errors"].values()) == {UNEXPECTED} and len(found["errors"]) == 4
    assert "Traceback" in done.stderr
    assert ["not YAML" in text for text in found["recipes"]] == [True, True, True, False]
    assert "3 requests a minute" in found["recipes"][3] and "3 requests a minute" in found["upload"]
    assert "none.png" in found["other visitor"] and "/none.png" not in found["other visitor"]
