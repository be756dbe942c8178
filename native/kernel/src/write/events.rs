//! Appends events to the bytes of a file, with positions and checksums.

use crate::checksum::crc32;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{EventKind, Header};
use crate::limits::{CHECKSUM_BYTES, EVENT_BYTES_MAX, EVENT_HEADER_BYTES};

/// The events to append to a file.
#[derive(Debug, Clone)]
pub struct EventWriter {
    bytes: Vec<u8>,
    /// The offset of `bytes` in the file.
    offset: u64,
    server_id: u32,
    time_s: u32,
}

impl EventWriter {
    /// Creates a writer whose first event starts at `offset`. All events have the server id `server_id` and the time
    /// `time_s`, in seconds since 1970.
    pub fn new(offset: u64, server_id: u32, time_s: u32) -> EventWriter {
        EventWriter { bytes: Vec::new(), offset, server_id, time_s }
    }

    /// Appends an event with the body that `write` appends. Raises `LimitExceeded` if the event is too long.
    pub fn event(&mut self, kind: EventKind, flags: u16, write: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        let start = self.open();
        write(&mut self.bytes);
        self.close(start, kind, flags)
    }

    /// Opens an event, whose body the caller appends to `body`. Returns its start, for `close`.
    pub fn open(&mut self) -> usize {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; EVENT_HEADER_BYTES]);
        start
    }

    /// The bytes of the file, to which the body of the open event is appended.
    #[inline]
    pub fn body(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Closes the event that was opened at `start`. Raises `LimitExceeded` if the event is too long.
    pub fn close(&mut self, start: usize, kind: EventKind, flags: u16) -> Result<()> {
        let size = self.bytes.len().saturating_sub(start) + CHECKSUM_BYTES;
        if size > EVENT_BYTES_MAX {
            let message = format!("a {} event of {size} bytes", kind.name());
            return Err(Error::new(ErrorKind::LimitExceeded, message)
                .hint("a binlog event holds 1 GiB at most: the row cannot be written to a binlog"));
        }
        let header = Header {
            timestamp: self.time_s,
            code: kind.code(),
            server_id: self.server_id,
            size: size as u32,
            end_position: (self.offset + (start + size) as u64) as u32,
            flags,
        };
        let mut head = Vec::with_capacity(EVENT_HEADER_BYTES);
        header.write(&mut head);
        if let Some(space) = self.bytes.get_mut(start..start + EVENT_HEADER_BYTES) {
            space.copy_from_slice(&head);
        }
        let checksum = crc32(self.bytes.get(start..).unwrap_or_default());
        self.bytes.extend_from_slice(&checksum.to_le_bytes());
        Ok(())
    }

    /// Where the next event starts in the file.
    pub fn position(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }

    /// Removes and returns the first `count` bytes.
    pub fn take(&mut self, count: usize) -> Vec<u8> {
        let rest = self.bytes.split_off(count.min(self.bytes.len()));
        self.offset += (self.bytes.len()) as u64;
        std::mem::replace(&mut self.bytes, rest)
    }

    /// Returns all bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// Appends a length-encoded integer (MySQL internals, "Protocol::LengthEncodedInteger").
pub fn length_encoded(value: u64, out: &mut Vec<u8>) {
    let bytes = value.to_le_bytes();
    let (first, width) = match value {
        0..=250 => (None, 1),
        251..=0xffff => (Some(252), 2),
        0x1_0000..=0xff_ffff => (Some(253), 3),
        _ => (Some(254), 8),
    };
    out.extend(first);
    out.extend_from_slice(bytes.get(..width).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cursor::Cursor;
    use crate::frame::events::checksum_holds;

    #[test]
    fn events_follow_each_other_without_a_gap() {
        let mut writer = EventWriter::new(0xffff_fff0, 9, 77);
        writer.event(EventKind::Xid, 0, |out| out.extend_from_slice(&[1; 8])).unwrap();
        writer.event(EventKind::Stop, 0x80, |_| ()).unwrap();
        assert_eq!(writer.position(), 0xffff_fff0 + 31 + 23);
        let bytes = writer.take(31);
        let header = Header::read(&mut Cursor::new(&bytes)).unwrap();
        assert_eq!((header.code, header.size, header.end_position, header.timestamp), (16, 31, 15, 77));
        assert!(checksum_holds(&bytes));
        let bytes = writer.into_bytes();
        let header = Header::read(&mut Cursor::new(&bytes)).unwrap();
        assert_eq!((header.code, header.size, header.end_position, header.flags), (3, 23, 38, 0x80));
        assert!(checksum_holds(&bytes));
    }

    #[test]
    fn length_encoded_integers_are_read_as_written() {
        for value in [0, 250, 251, 0xffff, 0x1_0000, 0xff_ffff, 0x100_0000, u64::MAX] {
            let mut out = Vec::new();
            length_encoded(value, &mut out);
            let mut cursor = Cursor::new(&out);
            assert_eq!(cursor.length_encoded(), Ok(value));
            assert!(cursor.is_empty());
        }
    }
}
