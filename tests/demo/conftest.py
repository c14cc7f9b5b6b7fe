import pytest

from elude_steer.demo.presenter import Presenter
from elude_steer.demo.recipes import shipped_examples


@pytest.fixture(scope="session")
def presenter(steerer):
    return Presenter(steerer, shipped_examples("toyland"))


@pytest.fixture(autouse=True)
def no_request_left_running(request):
    yield
    if "presenter" in request.fixturenames:
        assert request.getfixturevalue("presenter")._running == {}
