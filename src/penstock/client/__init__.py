# SPDX-License-Identifier: Apache-2.0
"""Subscribers: programs that follow a daemon's or a server's log in shards, with a checkpoint.

    from penstock.client import Subscriber

    Subscriber("penstock://h1:7070,h2:7070/shop", name="orders-cache", tables=["shop.orders"]).run(handle)

Names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.aio import AsyncSubscriber
    from penstock.client.batch import ChangeBatch, Row
    from penstock.client.fake import AsyncFakeSubscriber, FakeChanges, FakeSubscriber
    from penstock.client.sync import Subscriber

__all__ = [
    "AsyncFakeSubscriber",
    "AsyncSubscriber",
    "ChangeBatch",
    "FakeChanges",
    "FakeSubscriber",
    "Row",
    "Subscriber",
]

_HOMES = {
    "AsyncFakeSubscriber": "fake",
    "AsyncSubscriber": "aio",
    "ChangeBatch": "batch",
    "FakeChanges": "fake",
    "FakeSubscriber": "fake",
    "Row": "batch",
    "Subscriber": "sync",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
