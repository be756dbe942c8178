//! Begins and ends transactions, and decides which of them are in range.

use super::decoder::{Decoder, Emitter, Flow};
use super::open::Open;
use super::options::Resume;
use crate::emit::transactions::Tally;
use crate::emit::TransactionView;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::gtid::TransactionHead;
use crate::event::query::savepoint_name;
use crate::event::tidb_commit::TidbCommit;
use crate::event::Header;
use crate::frame::events::Span;
use crate::gtid::GtidSet;
use crate::limits::SAVEPOINTS_MAX;

impl Decoder {
    /// Records how many changes precede a savepoint. Savepoints beyond the limit are not recorded, and a ROLLBACK TO
    /// one of them is treated as if it undid all changes.
    pub(super) fn note_savepoint(&mut self, text: &[u8]) {
        let Some(open) = &mut self.open else { return };
        let name = savepoint_name(text).to_ascii_lowercase();
        let savepoint_count = open.savepoints.len();
        match open.savepoints.iter_mut().find(|(savepoint, _)| *savepoint == name) {
            Some((_, before)) => *before = open.selected,
            None if savepoint_count < SAVEPOINTS_MAX => open.savepoints.push((name, open.selected)),
            None => {}
        }
    }

    /// Opens a transaction at its GTID event, or at BEGIN in a log without GTID events.
    pub(super) fn begin(&mut self, header: &Header, head: TransactionHead, span: Span) -> Result<Flow> {
        if let Some(open) = &self.open {
            let message = format!("a transaction begins inside the one of {}", open.view.start);
            return Err(malformed(message));
        }
        self.prove_resume(span)?;
        if self.is_past_stop(span.start) {
            return Ok(Flow::Done);
        }
        let commit_us = match head.commit_us.and_then(|us| i64::try_from(us).ok()) {
            Some(us) => us,
            None => i64::from(header.timestamp) * 1_000_000,
        };
        let skipped = match self.range_verdict(&head, commit_us, span)? {
            Some(skipped) => skipped,
            None => return Ok(Flow::Done),
        };
        self.orphan = false;
        self.xid = None;
        let resume_rows = if skipped { 0 } else { self.take_resume_rows(span) };
        if matches!(self.emitter, Emitter::Transactions(_)) {
            self.tally = Tally { server_id: header.server_id, ..Tally::default() };
        }
        self.open = Some(Open {
            view: TransactionView {
                file: self.file.clone(),
                start: span.start,
                commit_version: self.commit_version(span.start),
                commit_us,
                gtid: head.gtid,
                thread_id: head.thread_id.and_then(|id| i64::try_from(id).ok()),
                clock: head.clock,
            },
            begun: false,
            skipped,
            resume_rows,
            events: 0,
            rows: 0,
            selected: 0,
            handed_out: resume_rows,
            end: head.length.and_then(|length| span.start.checked_add(length)),
            savepoints: Vec::new(),
            held_events: None,
            commit_ts: None,
        });
        if let (Emitter::Messages(batch), Some(open)) = (&mut self.emitter, &self.open) {
            batch.open(&open.view, self.event);
        }
        if let Some(id) = head.xa_id.filter(|_| self.decodes_rows()) {
            self.hold_events(id);
        }
        Ok(Flow::Next)
    }

    /// Returns how many changes to drop from the transaction at `span`, if that transaction was partly emitted before.
    fn take_resume_rows(&mut self, span: Span) -> u32 {
        let position = (self.file_number, span.start);
        self.resume
            .take()
            .filter(|resume| resume.start.is_none_or(|start| start == position))
            .map_or(0, |resume| resume.rows)
    }

    /// Fails if a transaction or file begins after the partly emitted transaction. In that case, the server crashed
    /// inside the partly emitted transaction and removed it from the log, so its rows were never committed.
    pub(super) fn prove_resume(&self, span: Span) -> Result<()> {
        let Some(Resume { start: Some(start), rows }) = self.resume else { return Ok(()) };
        if (self.file_number, span.start) <= start || matches!(self.emitter, Emitter::Events(_)) {
            return Ok(());
        }
        let message = format!("{rows} changes were handed out of a transaction that is no longer in the log");
        Err(Error::new(ErrorKind::TransactionRolledBack, message)
            .at(&self.file, span.start)
            .hint("the server lost it in a crash; compare the tables it changed with the source"))
    }

    /// The partly emitted transaction after `position`, whether this decoder or an earlier one emitted it.
    pub fn handed_out(&self) -> Option<Resume> {
        match &self.open {
            Some(open) if !open.skipped => {
                // Events count as emitted once they are read, because they are returned at the latest when the input
                // ends.
                let events = matches!(self.emitter, Emitter::Events(_));
                let rows = if events { open.events.max(open.resume_rows) } else { open.handed_out };
                (rows > 0).then_some(Resume { start: Some((self.range_file_number(), open.view.start)), rows })
            }
            _ => self.resume,
        }
    }

    /// Decides whether to skip a transaction; None if the range ends before it.
    fn range_verdict(&self, head: &TransactionHead, commit_us: i64, span: Span) -> Result<Option<bool>> {
        let options = &self.options;
        let mut skipped = options.passing || options.start.is_some_and(|start| (self.file_number, span.start) < start);
        skipped |= options.gtid_repeated.as_ref().is_some_and(|set| set.contains(&head.gtid));
        skipped |= options.time_from_us.is_some_and(|from| commit_us < from);
        let is_in_set = |set: &GtidSet| {
            set.contains_in_log(&head.gtid, &self.seen).map_err(|error| error.at(&self.file, span.start))
        };
        if let Some(after) = options.gtid_after.as_ref().filter(|_| !skipped) {
            skipped = is_in_set(after)?;
        }
        if let Some(until) = options.gtid_until.as_ref().filter(|_| !skipped) {
            if !is_in_set(until)? {
                if self.seen.contains_set(until) {
                    return Ok(None);
                }
                skipped = true;
            }
        }
        if options.time_until_us.is_some_and(|until| commit_us >= until) {
            // MySQL's commit times follow the order of the log, so all later transactions are too late as well. If the
            // log contains only statement times, a later transaction may have an earlier time.
            if head.commit_us.is_some() {
                return Ok(None);
            }
            skipped = true;
        }
        Ok(Some(skipped))
    }

    /// Takes the commit version of a TiDB transaction from the event that follows its GTID event.
    pub(super) fn note_tidb_commit(&mut self, body: &[u8]) -> Result<()> {
        let commit = TidbCommit::read(body)?;
        let commit_ts = i64::try_from(commit.commit_ts).map_err(|_| malformed("a commit timestamp over 63 bits"))?;
        match &mut self.open {
            Some(open) if open.commit_ts.is_none() && open.rows == 0 => {
                open.commit_ts = Some(commit_ts);
                open.view.commit_version = commit_ts;
                Ok(())
            }
            _ => Err(malformed("a TiDB commit that does not begin its transaction")),
        }
    }

    fn commit_version(&self, start: u64) -> i64 {
        commit_version(self.options.epoch, self.file_number, start)
    }

    /// Closes the transaction, whose rows are complete.
    pub(super) fn end(&mut self, span: Span) -> Result<()> {
        let Some(open) = self.open.take() else {
            self.orphan = false;
            self.mark_boundary(span.end);
            return Ok(());
        };
        self.mark_boundary(span.end);
        self.seen.add(&open.view.gtid);
        if !open.skipped {
            self.counters.transactions += 1;
            self.counters.changes += u64::from(open.rows);
            self.commit_us = open.view.commit_us;
            match &mut self.emitter {
                Emitter::Typed(batches) => {
                    for index in self.dirty.drain(..) {
                        if let Some(batch) = batches.get_mut(index) {
                            batch.commit();
                        }
                    }
                }
                Emitter::Envelope(batch) => batch.commit(),
                Emitter::Transactions(batch) => {
                    batch.add(&open.view, span.end, &self.tally);
                    self.buffered_rows += 1;
                }
                Emitter::Messages(batch) => batch.end(&open.view, self.event, self.xid.take(), open.rows)?,
                Emitter::Events(_) => {}
            }
        }
        self.tables.trim();
        if self.buffered_rows >= self.options.batch_rows_max || self.buffered_bytes >= self.options.batch_bytes_max {
            self.flush(true)?;
        }
        Ok(())
    }

    /// Processes ROLLBACK TO a savepoint. Fails if changes after the savepoint were selected, since they may be
    /// undone.
    pub(super) fn roll_back_to(&mut self, text: &[u8]) -> Result<()> {
        let Some(open) = self.open.as_ref().filter(|open| !open.skipped) else { return Ok(()) };
        let name = savepoint_name(text).to_ascii_lowercase();
        let changes_before =
            open.savepoints.iter().find(|(savepoint, _)| *savepoint == name).map_or(0, |(_, before)| *before);
        let undone = open.selected.saturating_sub(changes_before);
        if undone == 0 {
            return Ok(());
        }
        let message = format!("{undone} changes before a ROLLBACK TO SAVEPOINT were logged and then undone");
        Err(Error::new(ErrorKind::TransactionRolledBack, message)
            .hint("it mixed transactional and other tables; compare the tables it changed with the source"))
    }

    /// Processes a rollback. Fails if changes of the transaction were selected.
    pub(super) fn roll_back(&mut self, span: Span) -> Result<()> {
        if let Some(open) = &self.open {
            if open.selected > 0 && !open.skipped {
                let message = format!("{} changes were logged for a transaction that was rolled back", open.selected);
                return Err(Error::new(ErrorKind::TransactionRolledBack, message)
                    .at(&self.file, open.view.start)
                    .hint("it mixed transactional and other tables; compare the tables it changed with the source"));
            }
        }
        self.end(span)
    }

    /// Drops the open transaction. The server crashed inside it and continues with a new file, so the transaction never
    /// committed.
    pub(super) fn abandon_open(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        if open.handed_out > 0 && !matches!(self.emitter, Emitter::Events(_)) {
            let message = "the server stopped inside a transaction of which rows were handed out";
            return Err(Error::new(ErrorKind::TransactionRolledBack, message).at(&self.file, open.view.start));
        }
        self.flush(false)
    }
}

/// Epochs below this number are encoded in the eight bits above the 23 bits of the file number. For higher epochs, the
/// epoch minus this number is added to the file number.
const EPOCHS_ENCODED_MAX: u32 = 256;

/// Returns the commit version of a transaction: 31 bits for the base of its epoch plus the file number, and 32 bits
/// for its offset in units of 16 bytes.
fn commit_version(epoch: u32, file_number: u32, start: u64) -> i64 {
    let base = if epoch < EPOCHS_ENCODED_MAX { u64::from(epoch) << 23 } else { u64::from(epoch - EPOCHS_ENCODED_MAX) };
    ((base + u64::from(file_number)) << 32 | start >> 4) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commit_versions_increase_from_encoded_epochs_to_based_epochs() {
        assert_eq!(commit_version(3, 7, 160), 3 << 55 | 7 << 32 | 10);
        let last = (255_u32 << 23) + 17;
        assert_eq!(commit_version(255, 17, 0), i64::from(last) << 32);
        assert_eq!(commit_version(256 + last + 1, 1, 0), i64::from(last + 2) << 32);
    }
}
