# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the console that the guides show, from a shop that is captured while it is written to.

    python -m demo.pictures

Needs Chromium and fonts (`apt-get install chromium fonts-noto-cjk fonts-noto-color-emoji`). Writes PNG files
into docs/images. Takes about five minutes, for the charts, which have a sample every ten seconds.
"""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from demo import shop
from demo.pipeline import COMMAND
from penstock.client import Subscriber
from tools.chromium import Chromium
from tools.servers import REPLICATION_PASSWORD, REPLICATION_USER, Server
from tools.servers.child import end, spawn
from tools.servers.packages import program_on_host
from tools.servers.ports import free_port

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PASSWORD_VARIABLE = "DEMO_PASSWORD"
# A column is added in the middle of this time, and then the charts have a line.
TRADING_SECONDS = 300.0
_PICTURE_HEIGHT_MAX = 1100
_WAIT_SECONDS_MAX = 60.0
_END_SECONDS_MAX = 20.0


def main() -> None:
    """Start the shop with everything that reads it, and draw the pages."""
    folder = ROOT / "build" / "pictures"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ[PASSWORD_VARIABLE] = REPLICATION_PASSWORD
    with ExitStack() as parts:
        server = parts.enter_context(Server("mysql"))
        shop.create(server.sql)
        daemon, console = free_port(), free_port()
        files = [_pipeline(folder, daemon, name, sink) for name, sink in _sinks(folder).items()]
        _start(
            parts, ["serve", str(_settings(folder, server, daemon, console, files))], folder / "daemon.log"
        )
        _wait(lambda: _answers(f"http://127.0.0.1:{daemon}/readyz"))
        words = [sys.executable, "-m", "demo.shop", str(server.port), str(TRADING_SECONDS)]
        writer = spawn(words, folder / "writer.log")
        parts.callback(end, writer, _END_SECONDS_MAX)
        for file in files:
            _start(parts, ["run", str(file), "--local", "--json"], file.with_suffix(".log"))
        threading.Thread(target=_subscribe, args=(folder, daemon), daemon=True).start()
        _wait(
            lambda: (folder / "writer.log").exists() and server.sql(f"SELECT 1 FROM {shop.DATABASE}.payments")
        )
        # The writer counts its seconds from this signal.
        writer.send_signal(signal.SIGUSR1)
        browser = parts.enter_context(Chromium(program_on_host("chromium", "chromium"), folder / "browser"))
        time.sleep(TRADING_SECONDS - 10)
        _draw(browser, f"http://127.0.0.1:{console}", f"http://127.0.0.1:{daemon}")


def _draw(browser: Chromium, console: str, daemon: str) -> None:
    """Write a picture of each page."""
    instance = {"daemon": daemon, "instance": "shop"}
    orders = f"{shop.DATABASE}.orders"

    def picture(name: str, path: str, **parameters: str) -> None:
        browser.open(f"{console}/{path}?{urlencode(parameters)}")
        browser.save_picture(IMAGES / f"{name}.png", _PICTURE_HEIGHT_MAX)
        print(f"docs/images/{name}.png")

    browser.prefer("light")
    picture("overview", "")
    picture("instance", "instance", **instance)
    picture("log", "log", **instance)
    picture("definitions", "definitions", **instance, table=orders)
    picture("history", "history", table=orders, key="3")
    picture("subscriptions", "subscriptions")
    picture("overview-zh", "", lang="zh")
    browser.open(f"{console}/pipelines?lang=en")
    browser.click("td a:not(.button)")
    browser.save_picture(IMAGES / "pipeline.png", _PICTURE_HEIGHT_MAX)


def _settings(folder: Path, server: Server, daemon: int, console: int, pipelines: list[Path]) -> Path:
    """Write the daemon's settings file, and return its path."""
    settings = {
        "listen": {"http": f"127.0.0.1:{daemon}"},
        "log": {"folder": str(folder / "log")},
        "coordination": f"sqlite:///{folder}/coordination.db",
        "console": {"listen": f"127.0.0.1:{console}", "pipelines": [str(file) for file in pipelines]},
        "instances": {
            "shop": {
                "source": f"mysql://{REPLICATION_USER}@127.0.0.1:{server.port}",
                "password_env": PASSWORD_VARIABLE,
                "start": "earliest",
            }
        },
    }
    return _written(folder / "penstock.yaml", settings)


def _sinks(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sink of each pipeline, by the pipeline's name."""
    return {
        "lake": {"delta": {"mode": "mirror", "path": str(folder / "lake")}},
        "feed": {"files": {"path": str(folder / "feed")}},
    }


def _pipeline(folder: Path, daemon: int, name: str, sink: dict[str, Any]) -> Path:
    """Write a pipeline file, and return its path. The log begins with the tables, so no load is needed."""
    source = {
        "url": f"penstock://127.0.0.1:{daemon}/shop",
        "tables": [f"{shop.DATABASE}.*"],
        "start": "earliest",
    }
    return _written(folder / f"{name}.yaml", {"name": name, "source": source, "load": "none", "sink": sink})


def _written(file: Path, settings: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


def _start(parts: ExitStack, words: list[str], output: Path) -> None:
    """Start a command of Penstock that ends with the parts."""
    parts.callback(end, spawn([str(COMMAND), *words], output), _END_SECONDS_MAX)


def _subscribe(folder: Path, daemon: int) -> None:
    """Receive and confirm what is written, as a subscription of four shards."""
    url, store = f"penstock://127.0.0.1:{daemon}/shop", f"sqlite:///{folder}/coordination.db"
    with Subscriber(
        url, name="order-cache", tables=["shop.*"], shards=4, coordination=store, begin="earliest"
    ) as rows:
        for _ in rows:
            pass


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _wait(condition: Callable[[], object]) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + _WAIT_SECONDS_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the shop does not run: see build/pictures/*.log")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
