"""What the server counts, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elude_steer.utils import optional


class Metrics:
    """The counts of one server. They have a registry of their own, so that two servers in a process do not mix."""

    def __init__(self) -> None:
        prometheus = optional.require("prometheus_client", "elude-steer serve")
        self._prometheus, self.registry = prometheus, prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)

        def make(kind: str, name: str, text: str, *labels: str, **options: Any) -> Any:
            return getattr(prometheus, kind)(f"elude_steer_{name}", text, labels, registry=self.registry, **options)

        self.requests = make("Counter", "requests", "Requests by path and status.", "path", "status")
        self.edited = make("Counter", "edited_requests", "Answered chat requests that carried an edit.")
        self.gone = make("Counter", "clients_gone", "Chat requests whose client went away before the answer.")
        self.prompt_tokens = make("Counter", "prompt_tokens", "Tokens of prompts, with those of images.")
        self.answer_tokens = make("Counter", "answer_tokens", "Generated tokens.")
        self.tower_images = make("Counter", "tower_images", "Images that went through the vision tower.")
        self.known_images = make("Counter", "known_images", "Images whose tower outputs were kept from before.")
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120)
        self.seconds = make("Histogram", "chat_seconds", "Seconds from a chat request to its answer.", buckets=buckets)
        rows = (1, 2, 4, 8, 16, 32, 64)
        self.batch_rows = make("Histogram", "batch_rows", "Requests that were answered together.", buckets=rows)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Report what `read` returns whenever the metrics are read."""
        self._prometheus.Gauge(f"elude_steer_{name}", text, registry=self.registry).set_function(read)

    def render(self) -> tuple[bytes, str]:
        """The text, and its media type."""
        return self._prometheus.generate_latest(self.registry), self._prometheus.CONTENT_TYPE_LATEST
