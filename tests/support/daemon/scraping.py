# SPDX-License-Identifier: Apache-2.0
"""Metrics as a scrape returns them, and as a collector receives them."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.suite.patience import WAIT_SECONDS_MAX

_INSTANCE = "penstock_instance"


def samples(
    text: str, parse: Callable[[str], Iterable[Any]] = text_string_to_metric_families
) -> dict[tuple[str, ...], float]:
    """Return the samples by name and label values. The instance is the first label; the others are sorted."""
    return {
        (sample.name, *(sample.labels[label] for label in _ordered(sample.labels))): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def _ordered(labels: Iterable[str]) -> list[str]:
    return sorted(labels, key=lambda label: (label != _INSTANCE, label))


@contextmanager
def otlp_collector() -> Iterator[tuple[str, list[bytes]]]:
    """Run a collector inside the block; yield its URL for metrics, and the bodies that it has received."""
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{collector.server_port}/v1/metrics", bodies
        collector.shutdown()
        thread.join(WAIT_SECONDS_MAX)
