//! The head of a segment, which turns part of a source file into an independent binlog file.
//!
//! ```text
//! magic │ the source's format description │ ROTATE: source file and offset │ PREVIOUS_GTIDS or GTID_LIST │ events...
//! ```
//!
//! The two events in the middle are flagged as artificial and have no end position.

use crate::checksum::crc32;
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::format_description::Format;
use crate::event::rotate::Rotate;
use crate::event::{mariadb_gtid, previous_gtids, EventKind, Header, FLAG_ARTIFICIAL};
use crate::frame::events::{
    check_magic, checked_body, checksum_holds, checksum_holds_without_flag, event_size, mismatch,
};
use crate::gtid::GtidSet;
use crate::limits::{CHECKSUM_BYTES, EVENT_HEADER_BYTES, MAGIC_BYTES};

const MAGIC: [u8; MAGIC_BYTES] = *b"\xfebin";
const ROTATE_CODE: u8 = 4;
const PREVIOUS_GTIDS_CODE: u8 = 35;
const MARIADB_GTID_LIST_CODE: u8 = 163;

/// The contents of a segment's head.
#[derive(Debug, Clone)]
pub struct HeadParts<'a> {
    /// The source file's format description, as the server sent it.
    pub format_description: &'a [u8],
    /// The source file's name.
    pub file: &'a str,
    /// The source offset of the segment's first event.
    pub offset: u64,
    /// GTIDs of all transactions before the first event.
    pub gtid_set: &'a GtidSet,
    /// Whether the server is MariaDB.
    pub mariadb: bool,
    /// Id of the server that wrote the log.
    pub server_id: u32,
    /// Creation time of the segment, in seconds since 1970.
    pub time_s: u32,
}

/// A parsed segment head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentHead {
    /// Length of the head, which is the offset of the first event in the segment.
    pub head_bytes: usize,
    /// The source file's name.
    pub file: String,
    /// The source offset of the segment's first event.
    pub base: u64,
    /// GTIDs of all transactions before the first event.
    pub gtid_set: GtidSet,
    /// The source file's format description.
    pub format_description: Vec<u8>,
}

/// Writes the head of a segment.
pub fn segment_head(parts: &HeadParts<'_>) -> Result<Vec<u8>> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(parts.format_description);
    let (event, format) = split_head(&out)?;
    if event.len() != parts.format_description.len() {
        return Err(malformed("the format description is longer than it says"));
    }
    if format.mariadb != parts.mariadb {
        return Err(malformed(format!("a format description of {}, which is the other flavor", format.server_version)));
    }
    let rotate = [&parts.offset.to_le_bytes()[..], parts.file.as_bytes()].concat();
    let (code, gtids) = if format.mariadb {
        (MARIADB_GTID_LIST_CODE, parts.gtid_set.encode_mariadb()?)
    } else {
        (PREVIOUS_GTIDS_CODE, parts.gtid_set.encode_mysql()?)
    };
    for (code, body) in [(ROTATE_CODE, rotate), (code, gtids)] {
        push_event(&mut out, code, &body, parts, format.checksum)?;
    }
    Ok(out)
}

fn push_event(out: &mut Vec<u8>, code: u8, body: &[u8], parts: &HeadParts<'_>, checksum: bool) -> Result<()> {
    let size = EVENT_HEADER_BYTES + body.len() + if checksum { CHECKSUM_BYTES } else { 0 };
    let size = u32::try_from(size)
        .map_err(|_| Error::new(ErrorKind::LimitExceeded, format!("an event of {size} bytes in a segment's head")))?;
    let start = out.len();
    out.extend_from_slice(&parts.time_s.to_le_bytes());
    out.push(code);
    out.extend_from_slice(&parts.server_id.to_le_bytes());
    out.extend_from_slice(&size.to_le_bytes());
    out.extend_from_slice(&0u32.to_le_bytes());
    out.extend_from_slice(&FLAG_ARTIFICIAL.to_le_bytes());
    out.extend_from_slice(body);
    if checksum {
        let checksum = crc32(out.get(start..).unwrap_or_default());
        out.extend_from_slice(&checksum.to_le_bytes());
    }
    Ok(())
}

/// Reads the head at the start of a segment. Raises `FileTruncated` if `bytes` end inside the head.
pub fn read_segment_head(bytes: &[u8]) -> Result<SegmentHead> {
    let (format_description, format) = split_head(bytes)?;
    let format_end = MAGIC_BYTES + format_description.len();
    let (rotate, rotate_end) = read_artificial(bytes, format_end, &format, EventKind::Rotate)?;
    let rotate = Rotate::read(rotate)?;
    let kind = if format.mariadb { EventKind::MariadbGtidList } else { EventKind::PreviousGtids };
    let (gtids, head_bytes) = read_artificial(bytes, rotate_end, &format, kind)?;
    let gtid_set = if format.mariadb { mariadb_gtid::read_list(gtids)? } else { previous_gtids::read(gtids)? };
    Ok(SegmentHead {
        head_bytes,
        file: rotate.file,
        base: rotate.offset,
        gtid_set,
        format_description: format_description.to_vec(),
    })
}

/// Returns the body of the artificial event at `at`, and the offset of its end.
fn read_artificial<'a>(bytes: &'a [u8], at: usize, format: &Format, expected: EventKind) -> Result<(&'a [u8], usize)> {
    let rest = bytes.get(at..).unwrap_or_default();
    let size = event_size(rest)?
        .ok_or_else(|| Error::new(ErrorKind::FileTruncated, "the bytes end inside a segment's head"))?;
    let event = rest.get(..size).unwrap_or_default();
    let header = Header::read(&mut Cursor::new(event))?;
    let kind = header.kind();
    if kind != Some(expected) || header.flags & FLAG_ARTIFICIAL == 0 {
        return Err(malformed(format!("no segment of a log: its head has no made-up {} event", expected.name()))
            .hint("give a binlog file to penstock as a file; only segments have such a head"));
    }
    Ok((checked_body(Some(format), false, true, kind, event)?, at + size))
}

/// Returns the format description at the start of a file, both as bytes and parsed.
pub(super) fn split_head(head: &[u8]) -> Result<(&[u8], Format)> {
    let Some(magic) = head.first_chunk::<MAGIC_BYTES>() else {
        return Err(Error::new(ErrorKind::FileTruncated, "the file's first bytes are missing"));
    };
    check_magic(*magic)?;
    let rest = head.get(MAGIC_BYTES..).unwrap_or_default();
    let size =
        event_size(rest)?.ok_or_else(|| Error::new(ErrorKind::FileTruncated, "the format description is not whole"))?;
    let event = rest.get(..size).unwrap_or_default();
    let header = Header::read(&mut Cursor::new(event))?;
    if header.kind() != Some(EventKind::FormatDescription) {
        return Err(malformed("the first event is no format description"));
    }
    Ok((event, read_format(&header, event)?))
}

pub(super) fn read_format(header: &Header, event: &[u8]) -> Result<Format> {
    let format = Format::read(event.get(EVENT_HEADER_BYTES..).unwrap_or_default())?;
    if !checksum_holds_without_flag(event, header) && !checksum_holds(event) {
        return Err(mismatch());
    }
    Ok(format)
}
