//! Checks the framing of events: magic, sizes, checksums and positions.

use crate::checksum::{crc32, crc32_of_two};
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::format_description::Format;
use crate::event::{EventKind, Header, FLAG_ARTIFICIAL, FLAG_IN_USE};
use crate::limits::{CHECKSUM_BYTES, EVENT_BYTES_MAX, EVENT_HEADER_BYTES};

const MAGIC_PLAIN: [u8; 4] = *b"\xfebin";
const MAGIC_ENCRYPTED: [u8; 4] = *b"\xfdbin";

/// The position of an event: its first byte, and the first byte after it.
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

/// Reads the header at the start of the bytes. Returns None if the header is incomplete, and fails if the event's size
/// is implausible.
#[inline(always)]
pub(crate) fn front_header(rest: &[u8]) -> Result<Option<Header>> {
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

/// Returns the size of the event at the start of the bytes, once its header is complete.
pub(crate) fn declared_size(rest: &[u8]) -> Result<Option<usize>> {
    Ok(front_header(rest)?.map(|header| header.size as usize))
}

/// Returns the size of the event at the start of the bytes, once the whole event has arrived.
pub(crate) fn event_size(rest: &[u8]) -> Result<Option<usize>> {
    Ok(declared_size(rest)?.filter(|size| rest.len() >= *size))
}

/// Whether the last four bytes are the CRC32 of the bytes before them.
pub(crate) fn checksum_holds(event: &[u8]) -> bool {
    match event.split_last_chunk::<CHECKSUM_BYTES>() {
        Some((bytes, checksum)) => crc32(bytes) == u32::from_le_bytes(*checksum),
        None => false,
    }
}

/// Verifies a format description. The server changes the in-use flag without updating the checksum.
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

/// Returns the body without header and checksum, after verifying the checksum.
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
        // Only a live stream has an event before the format description: the rotation that names the file.
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

/// Whether the server generated the event for the stream: such events are not in any file and do not move the position.
pub(crate) fn is_artificial(header: &Header, kind: Option<EventKind>) -> bool {
    match kind {
        Some(EventKind::Heartbeat | EventKind::HeartbeatV2) => true,
        Some(EventKind::FormatDescription) => header.end_position == 0,
        Some(EventKind::Rotate) => header.timestamp == 0 || header.flags & FLAG_ARTIFICIAL != 0,
        _ => header.flags & FLAG_ARTIFICIAL != 0,
    }
}

/// Returns the position of the event. A file has no gaps. A live server omits some events, its 32-bit positions wrap
/// around, and MariaDB 11.8 writes no positions inside transactions. So all that is certain about live positions is
/// that they move forward.
#[inline]
pub(crate) fn span_at(offset: u64, header: &Header, live: bool) -> Result<Span> {
    let size = u64::from(header.size);
    let contiguous = Span { start: offset, end: offset + size };
    if header.end_position == 0 || header.end_position == contiguous.end as u32 {
        return Ok(contiguous);
    }
    if !live {
        let message = format!("the event says it ends at {}, not at {}", header.end_position, contiguous.end);
        return Err(Error::new(ErrorKind::SequenceGap, message)
            .hint("bytes are missing before this event, or were put in; copy the file from the server again"));
    }
    let ahead = header.end_position.wrapping_sub(contiguous.end as u32);
    let end = contiguous.end + u64::from(ahead);
    Ok(Span { start: end - size, end })
}
