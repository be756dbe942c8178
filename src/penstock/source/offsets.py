# SPDX-License-Identifier: Apache-2.0
"""The offset of a stream: a position, the GTIDs before it, and the server whose log it belongs to.

Spark stores the offset in its checkpoint as a JSON object with the members "epoch", "file", "offset",
"gtid_set" and "server_key". It also has "by_set" if the GTID set is exact and the position only says where to
start searching, and "fingerprint", which version 0.1 did not write.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from penstock.errors import OptionInvalid
from penstock.gtid_sets import NO_GTIDS, LoggedSet
from penstock.model import Position
from penstock.source.bounds import Bound

EARLIEST = "earliest"
LATEST = "latest"


@dataclass(frozen=True)
class Offset:
    """A position up to which everything has been read.

    `gtid_set` contains the GTIDs of all transactions before `position`, so that the stream can continue on
    another server; it is "" if they are unknown. With `by_set`, only the set counts: some of its transactions
    may follow the position. `server_key` is `ServerIdentity.key`, "" for files. `fingerprint` identifies the
    position's file, "" if unknown. If `fingerprint` is known, the GTID set was read from the log as well.
    """

    position: Position
    gtid_set: LoggedSet = NO_GTIDS
    server_key: str = ""
    by_set: bool = False
    fingerprint: str = ""

    def to_json(self) -> dict[str, int | str | bool]:
        """Return the offset as Spark stores it: a flat object of int, str and bool."""
        value: dict[str, int | str | bool] = {
            "epoch": self.position.epoch,
            "file": self.position.file,
            "offset": self.position.offset,
            "gtid_set": self.gtid_set,
            "server_key": self.server_key,
        }
        if self.by_set:
            value["by_set"] = True
        if self.fingerprint:
            value["fingerprint"] = self.fingerprint
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote, or an offset written by a person, who may omit all but file and offset.

        Raises OptionInvalid.
        """
        match dict(value):
            case {"file": str(file), "offset": int(offset), **rest}:
                epoch, gtid_set = rest.pop("epoch", 0), rest.pop("gtid_set", "")
                server_key, by_set = rest.pop("server_key", ""), rest.pop("by_set", False)
                fingerprint = rest.pop("fingerprint", "")
                if (
                    not rest
                    and isinstance(epoch, int)
                    and isinstance(gtid_set, str)
                    and isinstance(server_key, str)
                    and isinstance(by_set, bool)
                    and isinstance(fingerprint, str)
                ):
                    return cls(
                        Position(epoch, file, offset), LoggedSet(gtid_set), server_key, by_set, fingerprint
                    )
        raise OptionInvalid(
            f"{json.dumps(dict(value))} is not an offset",
            hint='Write {"file": "mysql-bin.000003", "offset": 1542}; epoch, gtid_set, server_key if known',
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read JSON text. Raises OptionInvalid."""
        try:
            value = json.loads(text)
        except ValueError as problem:
            raise OptionInvalid(f"{text!r} is not JSON: {problem}") from problem
        if not isinstance(value, dict):
            raise OptionInvalid(f"{text!r} is not a JSON object")
        return cls.from_json(value)

    def __str__(self) -> str:
        return f"{self.position}{f' after {self.gtid_set}' if self.gtid_set else ''}"


# The parsed values of startingOffsets and endingOffsets.
StartText = Bound | Offset | str | None
