# SPDX-License-Identifier: Apache-2.0
"""A member of a subscription: the base of the subscribers for threads and for event loops."""

from collections.abc import Mapping
from typing import Unpack

from penstock.client.consume import Consumer
from penstock.client.following import Following, FollowingStatus
from penstock.client.options import Options, read_options
from penstock.client.readings import read_member
from penstock.model import ServerAddress
from penstock.source.daemon_address import DaemonAddress
from penstock.telemetry.readings import Readings


class Member(Consumer):
    """Consumes the shards of one member, and reports the member's status."""

    def __init__(
        self, source: str | DaemonAddress | ServerAddress, *, name: str, **options: Unpack[Options]
    ) -> None:
        self.options = read_options(source, name=name, **options)
        self._following = Following(self.options)
        super().__init__(self._following, self.options.policy, self.options.ack)

    def status(self) -> FollowingStatus:
        """Return the current status of this member, without waiting."""
        return self._following.status()

    def read_metrics(self, readings: Readings) -> None:
        """Add the metrics of this member to a scrape; see `penstock.telemetry.publish`. Thread-safe."""
        read_member(readings, self.options.name, self.status(), self.skipped)

    @property
    def positions(self) -> Mapping[int, str]:
        """The position of each of this member's shards; everything before it is consumed."""
        return {number: str(shard.done.position) for number, shard in self._following.shards().items()}
