# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven by the DevTools protocol over pipes."""

import base64
import fcntl
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--window-size=1280,900",
    "--remote-debugging-pipe",
)
_PAUSE_SECONDS = 0.05
# A loaded machine may take this long for a page.
_WAIT_SECONDS_MAX = 120.0


class Chromium:
    """One browser tab. `errors` contains the errors in its console, and `requested` the addresses of
    everything that it fetched.
    """

    def __init__(self, program: Path, folder: Path) -> None:
        reading, self._writing = os.pipe()
        self._reading, writing = os.pipe()
        # The protocol uses the file descriptors 3 and 4, which this process may already use.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (reading, writing)]

        def connect() -> None:
            for number, end in zip((3, 4), ends, strict=True):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (reading, writing, *ends):
            os.close(end)
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._number = 0
        self._buffer = b""
        self._session = ""
        self._pages = 0
        self._is_loaded = False

    def __enter__(self) -> Self:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(_WAIT_SECONDS_MAX)
        os.close(self._writing)
        os.close(self._reading)

    def open(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        with self._waiting_for_page():
            self._call("Page.navigate", url=url)

    def begin_to_open(self, url: str) -> None:
        """Open a page that never finishes loading, without waiting for it."""
        self._call("Page.navigate", url=url)

    @contextmanager
    def _waiting_for_page(self) -> Iterator[None]:
        """Wait after the block until the page that it opens is loaded."""
        pages = self._pages
        yield
        deadline = time.monotonic() + _WAIT_SECONDS_MAX
        while self._pages == pages or not self._is_loaded:
            assert time.monotonic() < deadline, "the page is not loaded"
            self._receive(_PAUSE_SECONDS)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_until(self, script: str) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + _WAIT_SECONDS_MAX
        while not self.run(script):
            assert time.monotonic() < deadline, f"not so: {script}\n{self.text}"
            self._receive(_PAUSE_SECONDS)

    def click(self, selector: str) -> None:
        """Click an element that opens another page, and wait for the page."""
        with self._waiting_for_page():
            self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str) -> None:
        """Press a key, such as Tab."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=9)

    def prefer(self, scheme: str) -> None:
        """Prefer light or dark colors."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    @contextmanager
    def narrow(self, width: int) -> Iterator[None]:
        """Change the window's width inside the block."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        yield
        self._call("Emulation.clearDeviceMetricsOverride")

    @property
    def text(self) -> str:
        """The text of the page as a reader sees it."""
        return str(self.run("document.body.innerText"))

    def save_picture(self, path: Path, height_max: int | None = None) -> None:
        """Write a picture of the window, or of the whole page up to a height in pixels."""
        parameters: dict[str, Any] = {"format": "png"}
        if height_max is not None:
            width, height = self.run(
                "[window.innerWidth, document.querySelector('main').getBoundingClientRect().bottom]"
            )
            clip = {"x": 0, "y": 0, "width": width, "height": min(height, height_max), "scale": 1}
            parameters |= {"clip": clip, "captureBeyondViewport": True}
        picture = self._call("Page.captureScreenshot", **parameters)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(picture))

    # --- The protocol -----------------------------------------------------------------------

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _WAIT_SECONDS_MAX
        while True:
            assert time.monotonic() < deadline, f"no answer to {method}"
            for answer in self._receive(_PAUSE_SECONDS):
                if answer.get("id") == number:
                    assert "error" not in answer, f"{method}: {answer}"
                    return dict(answer["result"])

    def _receive(self, seconds: float) -> list[dict[str, Any]]:
        """Return the answers that arrive within a time limit, and record the events."""
        readable, _, _ = select.select([self._reading], [], [], seconds)
        if not readable:
            return []
        piece = os.read(self._reading, 1 << 20)
        assert piece, f"the browser ended with {self._process.poll()}"
        *texts, self._buffer = (self._buffer + piece).split(b"\0")
        messages = [json.loads(text) for text in texts]
        for message in messages:
            self._note(message.get("method", ""), message.get("params", {}))
        return [message for message in messages if "id" in message]

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Page.frameNavigated" and "parentId" not in parameters["frame"]:
            # The previous page's load event may still arrive after a click, but not after this event.
            self._pages += 1
            self._is_loaded = False
        elif event == "Page.loadEventFired":
            self._is_loaded = True
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(json.dumps(parameters["entry"]))
        elif event == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
