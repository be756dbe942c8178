//! Bytes to events: magic, sizes, checksums, positions.

use std::sync::Arc;

use super::{Decoder, Flow};
use crate::checksum::{crc32, crc32_of_two};
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::format_description::Format;
use crate::event::rotate::Rotate;
use crate::event::{EventKind, Header, FLAG_ARTIFICIAL, FLAG_IGNORABLE, FLAG_IN_USE};
use crate::limits::{CHECKSUM_BYTES, EVENT_BYTES_MAX, EVENT_HEADER_BYTES, MAGIC_BYTES};

const MAGIC_PLAIN: [u8; 4] = *b"\xfebin";
const MAGIC_ENCRYPTED: [u8; 4] = *b"\xfdbin";
const FLAG_RELAY: u16 = 0x0040;

/// Where an event stands: its first byte and the first byte behind it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub start: u64,
    pub end: u64,
}

pub(crate) fn check_magic(magic: [u8; 4]) -> Result<()> {
    match magic {
        MAGIC_PLAIN => Ok(()),
        MAGIC_ENCRYPTED => Err(Error::new(ErrorKind::LogEncrypted, "the file is encrypted at rest")
            .hint("read it from the server (mysql://...), which decrypts it, or SET GLOBAL binlog_encryption = OFF")),
        _ => Err(Error::new(ErrorKind::MagicInvalid, "the file does not start as a binlog does")
            .hint("a binlog starts with the bytes fe 62 69 6e; give .gz and .zst files their suffix")),
    }
}

/// The header of the event at the front, once it is there and its size plausible.
#[inline(always)]
fn front_header(rest: &[u8]) -> Result<Option<Header>> {
    let Some(mut head) = rest.get(..EVENT_HEADER_BYTES).map(Cursor::new) else { return Ok(None) };
    let header = Header::read(&mut head)?;
    let size = header.size as usize;
    if size < EVENT_HEADER_BYTES {
        return Err(malformed(format!("an event of {size} bytes, less than its header")));
    }
    if size > EVENT_BYTES_MAX {
        return Err(Error::new(ErrorKind::LimitExceeded, format!("an event of {size} bytes")));
    }
    Ok(Some(header))
}

/// The size of the event at the front, once its header is there and plausible.
pub(crate) fn declared_size(rest: &[u8]) -> Result<Option<usize>> {
    Ok(front_header(rest)?.map(|header| header.size as usize))
}

/// The size of the event at the front, once all of it is there.
pub(crate) fn event_size(rest: &[u8]) -> Result<Option<usize>> {
    Ok(declared_size(rest)?.filter(|size| rest.len() >= *size))
}

/// Whether the last four bytes are the CRC32 of the others.
pub(crate) fn checksum_holds(event: &[u8]) -> bool {
    match event.split_last_chunk::<CHECKSUM_BYTES>() {
        Some((bytes, checksum)) => crc32(bytes) == u32::from_le_bytes(*checksum),
        None => false,
    }
}

/// The same for a format description, whose in-use flag changes without the checksum.
pub(crate) fn checksum_holds_without_flag(event: &[u8], header: &Header) -> bool {
    let Some((bytes, checksum)) = event.split_last_chunk::<CHECKSUM_BYTES>() else { return false };
    let Some((head, tail)) = bytes.split_at_checked(EVENT_HEADER_BYTES) else { return false };
    let mut head = head.to_vec();
    head.truncate(EVENT_HEADER_BYTES - 2);
    head.extend_from_slice(&(header.flags & !FLAG_IN_USE).to_le_bytes());
    crc32_of_two(&head, tail) == u32::from_le_bytes(*checksum)
}

pub(crate) fn mismatch() -> Error {
    Error::new(ErrorKind::ChecksumMismatch, "an event's CRC32 does not match its bytes")
        .hint("copy the file from the server again; penstock inspect shows what comes before")
}

pub(crate) fn unknown(code: u8) -> Error {
    Error::new(ErrorKind::EventUnknown, format!("event type {code} is not known"))
        .hint("penstock inspect --events shows where it stands; a newer Penstock may know it")
}

/// The body without header and checksum, after the checksum was verified.
pub(crate) fn checked_body<'a>(
    format: Option<&Format>,
    live: bool,
    verify: bool,
    kind: Option<EventKind>,
    event: &'a [u8],
) -> Result<&'a [u8]> {
    let whole = event.get(EVENT_HEADER_BYTES..).unwrap_or_default();
    let checksum = match format {
        _ if kind == Some(EventKind::FormatDescription) => return Ok(whole),
        Some(format) => format.checksum,
        // Only a live stream sends an event before the format description: the rotation that names the file.
        None if live => checksum_holds(event),
        None => return Err(malformed("the first event is no format description")),
    };
    if !checksum {
        return Ok(whole);
    }
    if verify && !checksum_holds(event) {
        return Err(mismatch());
    }
    let bytes = whole.len().checked_sub(CHECKSUM_BYTES);
    bytes.and_then(|bytes| whole.get(..bytes)).ok_or_else(|| malformed(format!("an event of {} bytes", event.len())))
}

/// Events that a server makes up for the stream stand in no file and move no position.
pub(crate) fn is_artificial(header: &Header, kind: Option<EventKind>) -> bool {
    match kind {
        Some(EventKind::Heartbeat | EventKind::HeartbeatV2) => true,
        Some(EventKind::FormatDescription) => header.end_position == 0,
        Some(EventKind::Rotate) => header.timestamp == 0 || header.flags & FLAG_ARTIFICIAL != 0,
        _ => header.flags & FLAG_ARTIFICIAL != 0,
    }
}

/// Where the event stands. A file is read without holes; a live server leaves events out, wraps its 32-bit
/// positions, and MariaDB 11.8 writes none inside transactions, so there positions only move forward.
#[inline]
pub(crate) fn span_at(offset: u64, header: &Header, live: bool) -> Result<Span> {
    let size = u64::from(header.size);
    let plain = Span { start: offset, end: offset + size };
    if header.end_position == 0 || header.end_position == plain.end as u32 {
        return Ok(plain);
    }
    if !live {
        let message = format!("the event says it ends at {}, not at {}", header.end_position, plain.end);
        return Err(Error::new(ErrorKind::SequenceGap, message)
            .hint("bytes are missing before this event, or were put in; copy the file from the server again"));
    }
    let ahead = header.end_position.wrapping_sub(plain.end as u32);
    let end = plain.end + u64::from(ahead);
    Ok(Span { start: end - size, end })
}

impl Decoder {
    pub(super) fn read_magic(&mut self, rest: &[u8]) -> Result<Option<usize>> {
        let Some(magic) = rest.first_chunk::<MAGIC_BYTES>() else { return Ok(None) };
        check_magic(*magic)?;
        self.magic_due = false;
        self.offset = MAGIC_BYTES as u64;
        self.boundary = (self.file.clone(), self.offset);
        Ok(Some(MAGIC_BYTES))
    }

    /// Reads magic and format description from a file's first bytes, without moving.
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
        if EventKind::from_code(header.code) != Some(EventKind::FormatDescription) {
            return Err(malformed("the first event is no format description").at(&self.file, MAGIC_BYTES as u64));
        }
        self.format_end = (MAGIC_BYTES + size) as u64;
        self.format_description(&header, event).map_err(|error| error.at(&self.file, MAGIC_BYTES as u64))
    }

    pub(super) fn format_description(&mut self, header: &Header, event: &[u8]) -> Result<()> {
        let format = Format::read(event.get(EVENT_HEADER_BYTES..).unwrap_or_default())?;
        if self.options.verify_checksum && !checksum_holds_without_flag(event, header) && !checksum_holds(event) {
            return Err(mismatch());
        }
        // A relay log says so in its own format description; that of the source, which follows, does not.
        self.relay |= header.flags & FLAG_RELAY != 0;
        self.format = Some(format);
        Ok(())
    }

    /// Takes the event at the front; None where it is not whole or not to be taken.
    pub(super) fn next_event(&mut self, rest: &[u8]) -> Result<Option<usize>> {
        let whole = front_header(rest)?.and_then(|header| Some((header, rest.get(..header.size as usize)?)));
        let Some((header, event)) = whole else { return self.open_passing_payload(rest) };
        let size = event.len();
        let kind = EventKind::from_code(header.code);
        let (live, verify) = (self.options.live, self.options.verify_checksum);
        let body = checked_body(self.format.as_ref(), live, verify, kind, event)?;
        if live && is_artificial(&header, kind) {
            self.artificial(&header, kind, body, event)?;
            return Ok(Some(size));
        }
        if self.is_of_another_file(&header, kind) {
            self.relay = true;
            self.taken(size, self.span(&header)?);
            return Ok(Some(size));
        }
        let span = self.span(&header)?;
        let flow = match kind {
            Some(EventKind::FormatDescription) if !self.is_replaying() => {
                self.format_description(&header, event)?;
                self.format_end = span.end;
                self.new_file(&header, span)?
            }
            Some(kind) => self.dispatch(&header, kind, body, span)?,
            None if header.flags & FLAG_IGNORABLE != 0 || self.options.passing => Flow::Next,
            None => return Err(unknown(header.code)),
        };
        match flow {
            Flow::Next => {
                self.prove_joint(span)?;
                self.taken(size, span);
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

    /// Whether the event right behind a file's format description says that what follows was copied from elsewhere:
    /// segments of a log begin so, and their events keep the positions of the file from which they come.
    fn is_of_another_file(&self, header: &Header, kind: Option<EventKind>) -> bool {
        let artificial_rotate = kind == Some(EventKind::Rotate) && header.flags & FLAG_ARTIFICIAL != 0;
        artificial_rotate && !self.relay && !self.options.live && self.offset == self.format_end
    }

    /// Notes that reading can go on from there. Nearly always the file is the same, which need not be counted again.
    #[inline]
    pub(super) fn mark_boundary(&mut self, offset: u64) {
        if !Arc::ptr_eq(&self.boundary.0, &self.file) {
            self.boundary.0 = self.file.clone();
        }
        self.boundary.1 = offset;
    }

    /// Fails where the next range of the file begins in the middle of this event.
    #[inline]
    pub(super) fn prove_joint(&self, span: Span) -> Result<()> {
        let Some(joint) = self.options.joint.filter(|joint| span.start < *joint && *joint < span.end) else {
            return Ok(());
        };
        // The events of a prepared transaction lie elsewhere, often in another file.
        if self.is_replaying() {
            return Ok(());
        }
        let message = format!("the next range begins at {joint}, inside the event from {} to {}", span.start, span.end);
        Err(Error::new(ErrorKind::RangesDisagree, message)
            .hint("the file was changed or its index is wrong; read again, and if it stays so: penstock log verify"))
    }

    /// Moves behind an event.
    pub(super) fn taken(&mut self, size: usize, span: Span) {
        self.offset = span.end;
        if self.open.is_none() && !self.orphan {
            // Between transactions every event's end is a place to go on from.
            self.mark_boundary(span.end);
        }
        if !self.is_replaying() {
            self.counters.bytes += size as u64;
            self.counters.events += 1;
        }
    }

    fn artificial(&mut self, header: &Header, kind: Option<EventKind>, body: &[u8], event: &[u8]) -> Result<()> {
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
            Some(EventKind::FormatDescription) => self.format_description(header, event),
            _ => Ok(()),
        }
    }

    /// Where the event stands; a relay log holds the positions of other files, which are not looked at.
    pub(super) fn span(&self, header: &Header) -> Result<Span> {
        if self.relay {
            return Ok(Span { start: self.offset, end: self.offset + u64::from(header.size) });
        }
        span_at(self.offset, header, self.options.live)
    }

    /// A format description in the stream: a new file begins, perhaps after the server died.
    fn new_file(&mut self, header: &Header, span: Span) -> Result<Flow> {
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

    /// The file goes on under another name, in a live stream.
    pub(super) fn follow_file(&mut self, rotate: &Rotate) -> Result<()> {
        self.next_file = Some(rotate.file.clone());
        Ok(())
    }

    /// The name of the file being read.
    pub fn file(&self) -> &Arc<str> {
        &self.file
    }
}

/// The number at the end of a file's name, 0 where there is none.
pub fn file_number(file: &str) -> Result<u32> {
    let digits = file.bytes().rev().take_while(u8::is_ascii_digit).count();
    let text = file.get(file.len() - digits..).unwrap_or_default();
    if text.is_empty() {
        return Ok(0);
    }
    text.parse()
        .ok()
        .filter(|number| *number < 1 << 23)
        .ok_or_else(|| Error::new(ErrorKind::LimitExceeded, format!("the number of file `{file}` is over 8388607")))
}
