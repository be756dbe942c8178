# SPDX-License-Identifier: Apache-2.0
"""Stores JSON values of any size below one path of a coordination store, which limits the size of a
record.
"""

import json
import uuid
import zlib
from typing import Any

from penstock.coordinate.store import CoordinationStore, Record, decoded_name, path_of, reading_record
from penstock.errors import VersionConflict
from penstock.limits import COORDINATION_RECORD_BYTES_MAX
from penstock.pipeline.resnapshot import HINT_STATE

# Leave room for the bytes that a store adds to a record.
_PAGE_BYTES = COORDINATION_RECORD_BYTES_MAX - 4096


class PagedRecords:
    """The records below a path in the coordination store. A large value spans several records."""

    def __init__(self, store: CoordinationStore, path: str) -> None:
        self.store = store
        self._path = path
        # Names whose orphaned pages were deleted.
        self._swept: set[str] = set()

    def record(self, name: str) -> Record | None:
        """Return a record as it is stored."""
        return self.store.get(self._at(name))

    def put_large(self, name: str, value: Any, version: int | None = None) -> int:
        """Write a JSON value of any size atomically: first its pages, then the record that names them.

        Returns the record's version. Raises VersionConflict if `version` is passed and differs.
        """
        data = zlib.compress(json.dumps(value).encode(), 1)
        path = self._at(name)
        before = self.store.get(path)
        pages = [data[at : at + _PAGE_BYTES] for at in range(0, len(data), _PAGE_BYTES)]
        tag = ""
        if len(pages) == 1:
            written = self.store.put(path, b"\0" + pages[0], version)
        else:
            tag = uuid.uuid4().hex[:12]
            for number, page in enumerate(pages):
                self.store.put(path + path_of(tag, str(number)), page)
            written = self.store.put(path, json.dumps({"tag": tag, "pages": len(pages)}).encode(), version)
        if before is not None and not before.value.startswith(b"\0"):
            self._drop_pages(path, before.value)
        if version is not None and name not in self._swept:
            # Delete pages of a writer that died before it recorded their names. A fenced writer can no longer
            # record any.
            self._swept.add(name)
            for left in self.store.list(path):
                if decoded_name(left) != tag:
                    self._delete_below(f"{path}/{left}")
        return written

    def get_large(self, name: str) -> Any:
        """Return what `put_large` wrote, None if nothing was written."""
        path = self._at(name)
        record = self.store.get(path)
        if record is None:
            return None
        with reading_record(f"{path} in the state of a pipeline", HINT_STATE):
            if record.value.startswith(b"\0"):
                return json.loads(zlib.decompress(record.value[1:]))
            head = json.loads(record.value)
            data = b""
            for number in range(head["pages"]):
                page = self.store.get(path + path_of(head["tag"], str(number)))
                if page is None:
                    raise VersionConflict(f"{path} was rewritten while it was read")
                data += page.value
            return json.loads(zlib.decompress(data))

    def drop_large(self, name: str) -> None:
        """Delete what `put_large` wrote."""
        path = self._at(name)
        record = self.store.get(path)
        if record is not None:
            self.store.delete(path)
            # Also delete the pages of a writer that died before it recorded their names.
            for tag in self.store.list(path):
                self._delete_below(f"{path}/{tag}")

    def _drop_pages(self, path: str, head: bytes) -> None:
        head_fields = json.loads(head)
        for number in range(head_fields["pages"]):
            self.store.delete(path + path_of(head_fields["tag"], str(number)))

    def _delete_below(self, path: str) -> None:
        for name in self.store.list(path):
            self._delete_below(f"{path}/{name}")
        self.store.delete(path)

    def _copy_below(self, path: str, to: str) -> None:
        for name in self.store.list(path):
            self._copy_below(f"{path}/{name}", f"{to}/{name}")
        record = self.store.get(path)
        if record is not None:
            self.store.put(to, record.value)

    def _at(self, *names: str) -> str:
        return self._path + path_of(*names)
