"""The demo with a model that takes its time over every token: `python -m tests.slow_demo demo --port 7860`."""

import time

from elude_steer.cli.group import main
from elude_steer.demo import presenter
from elude_steer.models.vlm import report_tokens

PAUSE = 0.3  # seconds a token


def slowly(step):
    def late(tokens):
        time.sleep(PAUSE)
        step(tokens)

    return report_tokens(late)


if __name__ == "__main__":
    presenter.report_tokens = slowly
    main()
