# SPDX-License-Identifier: Apache-2.0
"""The requests to read tables of a pipeline again, as they are stored in the pipeline's state."""

import time
from dataclasses import replace

from penstock.coordinate.store import CoordinationStore, decoded_name
from penstock.pipeline.paged_records import PagedRecords
from penstock.pipeline.resnapshot import Resnapshot

_ENDED_REQUESTS_KEPT = 100


class ResnapshotRequests(PagedRecords):
    """The open resnapshot requests, and the most recently finished ones."""

    def __init__(self, store: CoordinationStore, path: str) -> None:
        super().__init__(store, path)
        # Finished requests by number. They no longer change.
        self._ended: dict[str, Resnapshot] = {}

    def requests(self) -> list[Resnapshot]:
        """Return the open requests and the last hundred finished ones, by number."""
        numbers = [decoded_name(name) for name in self.store.list(self._at("requests"))]
        self._ended = {number: request for number, request in self._ended.items() if number in numbers}
        requests = []
        for number in numbers:
            request = self._ended.get(number) or self.request(number)
            if request is None:
                continue
            if request.ended_us:
                self._ended[number] = request
            requests.append(request)
        return requests

    def request(self, number: str) -> Resnapshot | None:
        """Return a request by its number, None if there is none."""
        record = self.store.get(self._at("requests", number))
        return None if record is None else Resnapshot.decode(record.value)

    def find_waiting(self, wanted: Resnapshot) -> Resnapshot | None:
        """Return a request that has not begun and reads the same rows, such as that of a repeated command."""
        return next((request for request in self.requests() if request.covers(wanted)), None)

    def note_request(self, request: Resnapshot, state: str, what: str = "") -> None:
        """Record the state of a request: running, done or failed, and why.

        The oldest finished requests are deleted.
        """
        ended = time.time_ns() // 1000 if state in ("done", "failed") else 0
        updated = replace(request, state=state, what=what, ended_us=ended)
        self.store.put(self._at("requests", request.number), updated.encode())
        if ended:
            known = [ended_request for ended_request in self.requests() if ended_request.ended_us]
            for old in sorted(known, key=lambda ended_request: ended_request.ended_us)[
                :-_ENDED_REQUESTS_KEPT
            ]:
                self.store.delete(self._at("requests", old.number))
