# SPDX-License-Identifier: Apache-2.0
"""The capture of a merge: the logs of other instances, joined into one in commit order.

    the members' logs ─▶ transactions by commit time, up to the lowest watermark ─▶ the log

The merge resumes at the positions in the members' logs that are recorded in the merged log.
"""

import time
import uuid
from collections.abc import Mapping
from functools import reduce

import structlog

from penstock.capture.generated_capture import GeneratedCapture
from penstock.capture.generated_log import EPOCH
from penstock.capture.run import Capture, CaptureParts
from penstock.capture.status import State
from penstock.errors import (
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    PositionPurged,
    SequenceGap,
    ServerChanged,
)
from penstock.gtid_sets import NO_GTIDS, union
from penstock.logstore.log import Log
from penstock.merge.joined_log import JoinedLog, MergeState, begin_joined_log
from penstock.merge.joining import Joining
from penstock.merge.member import Member, flavor_of, start_of_member
from penstock.mysql.start import StartAt
from penstock.settings.daemon import InstanceSettings, LogSettings

_IDLE_SECONDS = 0.05
_DURABLE_SECONDS = 1.0
_HOLD_SECONDS = 10.0
# The status names a member once the merge has waited for it this long.
_STALL_SECONDS = 5.0

_log = structlog.get_logger(__name__)


class MergeCapture(GeneratedCapture):
    """Captures other instances of this process into one log. Implements the interface that all captures
    share.
    """

    def __init__(
        self,
        name: str,
        settings: InstanceSettings,
        log: LogSettings,
        start: StartAt,
        parts: CaptureParts,
        captures: Mapping[str, Capture],
    ) -> None:
        """`captures` maps the name of each member to its capture."""
        super().__init__(name, settings, log, start, parts)
        self._captures = captures
        self._stalled_since: float | None = None

    @property
    def _origin(self) -> str:
        return ", ".join(self._captures)

    # --- The thread -------------------------------------------------------------------------

    def _attempt(self) -> None:
        """Open the log if necessary, find where to resume, and merge until something fails."""
        log = self._connecting_log()
        flavors = {name: flavor_of(capture) for name, capture in self._captures.items()}
        flavor, *others = set(flavors.values())
        if others:
            kinds = ", ".join(f"{name} is {flavor}" for name, flavor in flavors.items())
            raise OptionInvalid(f"merge: {kinds}", hint="Merge servers of one kind: MySQL or MariaDB")
        state = MergeState.load(log)
        if state is None or log.epoch is None:
            state = self._begun(log, flavor)
        else:
            self._continue(log, state)
        members = [Member(capture, state.positions[name]) for name, capture in self._captures.items()]
        joining = Joining(log, JoinedLog(log, self._receiver(log, flavor), flavor), members, state)
        try:
            self._merge(joining)
        finally:
            joining.close()

    def _merge(self, joining: Joining) -> None:
        """Merge the members' transactions, until stopped or something fails."""
        self._begin_running()
        durable_at, held_at = time.monotonic(), float("-inf")
        while not self._stopping.is_set():
            is_idle = not joining.step()
            self._report(joining, is_idle)
            now = time.monotonic()
            if now - durable_at >= _DURABLE_SECONDS:
                durable_at = now
                joining.make_durable()
            if now - held_at >= _HOLD_SECONDS:
                held_at = now
                joining.hold(self.name, self._log_settings.retention.hold_age)
            if is_idle:
                self._stopping.wait(_IDLE_SECONDS)
        joining.make_durable()

    def _report(self, joining: Joining, is_idle: bool) -> None:
        """Show in the status whether everything was merged, and which members the merge waits for."""
        self._progress.heard_at = time.time()
        held_back_by = joining.held_back_by() if is_idle else []
        self._progress.caught_up = is_idle and not held_back_by and joining.is_caught_up()
        now = time.monotonic()
        if not held_back_by:
            self._stalled_since = None
            if self._state is not State.RUNNING:
                self._set_state(State.RUNNING)
            return
        if self._stalled_since is None:
            self._stalled_since = now
        if now - self._stalled_since > _STALL_SECONDS:
            why = f"the merge waits: {'; '.join(member.why() for member in held_back_by)}"
            if self._state is not State.WAITING:
                _log.warning("the merge waits", instance=self.name, why=why)
            self._set_state(State.WAITING, why)

    def _begun(self, log: Log, flavor: str) -> MergeState:
        """Begin a new log, and return its start position in each member's log."""
        captures = self._captures
        state = MergeState(
            None, {name: start_of_member(capture, self._start_at) for name, capture in captures.items()}
        )
        gtid_sets = [captures[name].log().gtid_set(position) for name, position in state.positions.items()]
        # Record the positions first: after a crash in between, the log is still new.
        state.write(log)
        # No other log has the positions of this log, so a reader can continue in another log only by GTIDs.
        begin_joined_log(log, f"merge:{uuid.uuid4()}", flavor, reduce(union, gtid_sets, NO_GTIDS))
        return state

    def _continue(self, log: Log, state: MergeState) -> None:
        """Check that a log belongs to these members. For a new member, return the position where it starts
        now.
        """
        if removed := sorted(state.positions.keys() - self._captures.keys()):
            raise OptionInvalid(
                f"merge: {', '.join(removed)} is missing, and {log.folder} has transactions of it",
                hint="Name it again, or begin a new log: move the folder away",
            )
        epoch = log.epoch
        if epoch is None or not epoch.server_key.startswith("merge:"):
            raise ServerChanged(
                f"{log.folder} is the log of {epoch and epoch.server_key}, not of a merge",
                hint="Use another log folder, or another name for the instance",
            )
        for name in self._captures.keys() - state.positions.keys():
            log_of_member = self._captures[name].log()
            position = state.positions[name] = start_of_member(self._captures[name], StartAt())
            log.complete_epoch(EPOCH, log_of_member.gtid_set(position))
            self._note = f"{name} was added to the merge at {position}"
            state.write(log)
            _log.warning("a member was added to a merge", instance=self.name, member=name, at=str(position))

    def _is_final(self, problem: PenstockError) -> bool:
        """Record a failure, and return whether it is final. It is final if a log has lost transactions,
        because lost transactions never return.
        """
        is_lost = isinstance(problem, PositionPurged | PositionInvalid | SequenceGap | ServerChanged)
        return super()._is_final(problem) or (is_lost and self._stop_with(problem))
