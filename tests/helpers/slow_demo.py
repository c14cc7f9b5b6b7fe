"""The demo with a slow model: `python -m tests.helpers.slow_demo demo --port 7860`."""

import time

from elude_steer.cli.entry_point import main
from elude_steer.demo import running
from elude_steer.models.vlm import report_tokens

PAUSE = 0.3  # seconds per token


def report_tokens_slowly(on_token):
    def wait_and_report(count):
        time.sleep(PAUSE)
        on_token(count)

    return report_tokens(wait_and_report)


if __name__ == "__main__":
    running.report_tokens = report_tokens_slowly
    main()
