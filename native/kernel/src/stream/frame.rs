//! Splits bytes into events, determines their positions, and processes the events that describe the file.

use std::sync::Arc;

use super::decoder::{Decoder, Flow};
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::format_description::Format;
use crate::event::rotate::{file_number, Rotate};
use crate::event::{EventKind, Header, FLAG_ARTIFICIAL, FLAG_IGNORABLE};
use crate::frame::events::{
    check_magic, checked_body, checksum_holds, checksum_holds_without_flag, event_size, front_header, is_artificial,
    mismatch, span_at, unknown, Span,
};
use crate::limits::{EVENT_HEADER_BYTES, MAGIC_BYTES};

const FLAG_RELAY: u16 = 0x0040;

impl Decoder {
    pub(super) fn read_magic(&mut self, rest: &[u8]) -> Result<Option<usize>> {
        let Some(magic) = rest.first_chunk::<MAGIC_BYTES>() else { return Ok(None) };
        check_magic(*magic)?;
        self.magic_due = false;
        self.offset = MAGIC_BYTES as u64;
        self.boundary = (self.file.clone(), self.offset);
        Ok(Some(MAGIC_BYTES))
    }

    /// Reads magic and format description from a file's first bytes, without moving the position.
    pub(super) fn read_head(&mut self, head: &[u8]) -> Result<()> {
        let Some(magic) = head.first_chunk::<MAGIC_BYTES>() else {
            return Err(Error::new(ErrorKind::FileTruncated, "the file's first bytes are missing"));
        };
        check_magic(*magic).map_err(|error| error.at(&self.file, 0))?;
        let rest = head.get(MAGIC_BYTES..).unwrap_or_default();
        let size = event_size(rest)?
            .ok_or_else(|| Error::new(ErrorKind::FileTruncated, "the format description is not whole"))?;
        let event = rest.get(..size).unwrap_or_default();
        let header = Header::read(&mut Cursor::new(event))?;
        if header.kind() != Some(EventKind::FormatDescription) {
            return Err(malformed("the first event is no format description").at(&self.file, MAGIC_BYTES as u64));
        }
        self.format_end = (MAGIC_BYTES + size) as u64;
        self.read_format_description(&header, event).map_err(|error| error.at(&self.file, MAGIC_BYTES as u64))
    }

    pub(super) fn read_format_description(&mut self, header: &Header, event: &[u8]) -> Result<()> {
        let format = Format::read(event.get(EVENT_HEADER_BYTES..).unwrap_or_default())?;
        if self.options.verify_checksum && !checksum_holds_without_flag(event, header) && !checksum_holds(event) {
            return Err(mismatch());
        }
        // A relay log is flagged in its own format description, but not in the source's description, which comes
        // second.
        self.relay |= header.flags & FLAG_RELAY != 0;
        self.format = Some(format);
        Ok(())
    }

    /// Processes the event at the start of `rest`; None if the event is incomplete.
    pub(super) fn next_event(&mut self, rest: &[u8]) -> Result<Option<usize>> {
        let whole = front_header(rest)?.and_then(|header| Some((header, rest.get(..header.size as usize)?)));
        let Some((header, event)) = whole else { return self.open_streaming_payload(rest) };
        let size = event.len();
        let kind = header.kind();
        let (live, verify) = (self.options.live, self.options.verify_checksum);
        let body = checked_body(self.format.as_ref(), live, verify, kind, event)?;
        if live && is_artificial(&header, kind) {
            self.process_artificial(&header, kind, body, event)?;
            return Ok(Some(size));
        }
        if self.begins_copied_events(&header, kind) {
            self.relay = true;
            self.move_past(size, self.locate_event(&header)?);
            return Ok(Some(size));
        }
        let span = self.locate_event(&header)?;
        let flow = match kind {
            Some(EventKind::FormatDescription) if !self.is_replaying() => {
                self.read_format_description(&header, event)?;
                self.format_end = span.end;
                self.begin_file(&header, span)?
            }
            Some(kind) => self.dispatch(&header, kind, body, span)?,
            None if header.flags & FLAG_IGNORABLE != 0 || self.options.passing => Flow::Next,
            None => return Err(unknown(header.code)),
        };
        match flow {
            Flow::Next => {
                self.prove_joint(span)?;
                self.move_past(size, span);
                Ok(Some(size))
            }
            Flow::Ask => Ok(Some(0)),
            Flow::Done => {
                self.done = true;
                self.flush(false)?;
                Ok(Some(0))
            }
        }
    }

    /// Whether the event directly after a file's format description shows that the following events were copied from
    /// another file. The segments of a log begin like this, because their events keep the positions of the source file.
    fn begins_copied_events(&self, header: &Header, kind: Option<EventKind>) -> bool {
        let artificial_rotate = kind == Some(EventKind::Rotate) && header.flags & FLAG_ARTIFICIAL != 0;
        artificial_rotate && !self.relay && !self.options.live && self.offset == self.format_end
    }

    /// Records that reading can resume at `offset`. The file rarely changes, so avoid updating its reference count.
    #[inline]
    pub(super) fn mark_boundary(&mut self, offset: u64) {
        if !Arc::ptr_eq(&self.boundary.0, &self.file) {
            self.boundary.0 = self.file.clone();
        }
        self.boundary.1 = offset;
    }

    /// Fails if the file's next range begins inside this event.
    #[inline]
    pub(super) fn prove_joint(&self, span: Span) -> Result<()> {
        let Some(joint) = self.options.joint.filter(|joint| span.start < *joint && *joint < span.end) else {
            return Ok(());
        };
        // The events of a prepared transaction are outside the range, often in another file.
        if self.is_replaying() {
            return Ok(());
        }
        let message = format!("the next range begins at {joint}, inside the event from {} to {}", span.start, span.end);
        Err(Error::new(ErrorKind::RangesDisagree, message)
            .hint("the file was changed or its index is wrong; read again, and if it stays so: penstock log verify"))
    }

    /// Moves the position past an event.
    pub(super) fn move_past(&mut self, size: usize, span: Span) {
        self.offset = span.end;
        if self.open.is_none() && !self.orphan {
            // Between transactions, reading can resume after any event.
            self.mark_boundary(span.end);
        }
        if !self.is_replaying() {
            self.counters.bytes += size as u64;
            self.counters.events += 1;
        }
    }

    fn process_artificial(
        &mut self,
        header: &Header,
        kind: Option<EventKind>,
        body: &[u8],
        event: &[u8],
    ) -> Result<()> {
        match kind {
            Some(EventKind::Rotate) => {
                let rotate = Rotate::read(body)?;
                if *self.file != *rotate.file {
                    self.file = rotate.file.as_str().into();
                    self.file_number = file_number(&rotate.file)?;
                }
                self.offset = rotate.offset;
                if self.open.is_none() {
                    self.boundary = (self.file.clone(), self.offset);
                }
                Ok(())
            }
            Some(EventKind::FormatDescription) => self.read_format_description(header, event),
            _ => Ok(()),
        }
    }

    /// Returns the position of the event. In a relay log the logged positions refer to other files and are ignored.
    pub(super) fn locate_event(&self, header: &Header) -> Result<Span> {
        if self.relay {
            return Ok(Span { start: self.offset, end: self.offset + u64::from(header.size) });
        }
        span_at(self.offset, header, self.options.live)
    }

    /// Processes a format description in the stream: a new file begins, possibly after a crash of the server.
    fn begin_file(&mut self, header: &Header, span: Span) -> Result<Flow> {
        self.prove_resume(span)?;
        if self.is_past_stop(span.start) {
            return Ok(Flow::Done);
        }
        self.abandon_open()?;
        self.tables.clear();
        self.note_event(header, EventKind::FormatDescription, span, None);
        self.boundary = (self.file.clone(), span.end);
        Ok(Flow::Next)
    }

    pub(super) fn is_past_stop(&self, start: u64) -> bool {
        self.options.stop.is_some_and(|stop| (self.file_number, start) >= stop)
    }

    /// Records the next file of the log.
    pub(super) fn note_next_file(&mut self, rotate: &Rotate) -> Result<()> {
        self.next_file = Some(rotate.file.clone());
        Ok(())
    }

    /// The file being read.
    pub fn file(&self) -> &Arc<str> {
        &self.file
    }
}
