//! The first and the last events of a file.

use super::events::EventWriter;
use crate::error::Result;
use crate::event::EventKind;
use crate::limits::{EVENT_HEADER_BYTES, MAGIC_BYTES};

/// The version in the format description: readers expect the events of this release.
pub const SERVER_VERSION: &str = "8.0.36-TiDB";

/// The version in the format description as a number, in MySQL's form.
pub const SERVER_VERSION_NUMBER: u32 = 80_036;

/// Size in bytes of the server version in a format description.
const VERSION_BYTES: usize = 50;

/// Lengths of the fixed part of each event type's body, as MySQL 8.0 writes them: from START_EVENT_V3, code 1, to
/// TAGGED_GTID, code 42. The length for the format description itself is filled in later.
const POST_HEADER_BYTES: [u8; 42] = [
    56, 13, 0, 8, 0, 0, 0, 0, 4, 0, 4, 0, 0, 0, 0, 0, 4, 26, 8, 0, 0, 0, 8, 8, 8, 2, 0, 0, 0, 10, 10, 10, 42, 42, 0,
    18, 52, 0, 10, 40, 0, 0,
];

/// MySQL rejects an event whose code is higher than the number of types in the format description, or higher than 127,
/// even if the event is ignorable.
const TYPES: usize = EventKind::TidbCommit.code() as usize;

const CRC32: u8 = 1;
const MAGIC: [u8; MAGIC_BYTES] = *b"\xfebin";

const _: () = assert!(TYPES < 128, "MySQL refuses higher codes");

/// Returns the first bytes of a file: the magic, FORMAT_DESCRIPTION and an empty PREVIOUS_GTIDS.
///
/// All logs that Penstock writes itself begin with these bytes.
pub fn head(server_id: u32, time_s: u32) -> Result<Vec<u8>> {
    let mut events = EventWriter::new(MAGIC_BYTES as u64, server_id, time_s);
    events.event(EventKind::FormatDescription, 0, |out| {
        out.extend_from_slice(&4u16.to_le_bytes());
        let version = SERVER_VERSION.bytes().chain(std::iter::repeat(0));
        out.extend(version.take(VERSION_BYTES));
        // The server's start time. It is 0, because the file does not follow a crash that ended a transaction.
        out.extend_from_slice(&0u32.to_le_bytes());
        out.push(EVENT_HEADER_BYTES as u8);
        let lengths = POST_HEADER_BYTES.into_iter().chain(std::iter::repeat(0)).take(TYPES);
        out.extend(lengths.zip(1u8..).map(|(length, code)| match code {
            _ if code == EventKind::FormatDescription.code() => (56 + 1 + TYPES) as u8,
            _ => length,
        }));
        out.push(CRC32);
    })?;
    events.event(EventKind::PreviousGtids, 0, |out| out.extend_from_slice(&0u64.to_le_bytes()))?;
    Ok([&MAGIC, events.into_bytes().as_slice()].concat())
}

/// Returns the last event of a file, at `offset`: the log continues in `file`.
pub fn rotation(file: &str, offset: u64, server_id: u32, time_s: u32) -> Result<Vec<u8>> {
    let mut events = EventWriter::new(offset, server_id, time_s);
    events.event(EventKind::Rotate, 0, |out| {
        out.extend_from_slice(&(MAGIC_BYTES as u64).to_le_bytes());
        out.extend_from_slice(file.as_bytes());
    })?;
    Ok(events.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::format_description::Format;
    use crate::event::rotate::Rotate;

    #[test]
    fn a_head_is_read_as_one_of_mysql() {
        let bytes = head(7, 1_700_000_000).unwrap();
        let size = EVENT_HEADER_BYTES + 2 + VERSION_BYTES + 4 + 1 + TYPES + 1 + 4;
        let body = bytes.get(MAGIC_BYTES + EVENT_HEADER_BYTES..MAGIC_BYTES + size).unwrap();
        let format = Format::read(body).unwrap();
        assert!(format.checksum && format.gtid_events && !format.mariadb);
        assert_eq!((format.table_id_bytes_table_map, format.table_id_bytes_rows), (6, 6));
        assert_eq!(format.server_version, SERVER_VERSION);
    }

    #[test]
    fn a_rotation_names_the_next_file() {
        let bytes = rotation("tidb-binlog.000002", 4711, 7, 1).unwrap();
        let body = bytes.get(EVENT_HEADER_BYTES..bytes.len() - 4).unwrap();
        assert_eq!(Rotate::read(body).unwrap(), Rotate { offset: 4, file: "tidb-binlog.000002".to_owned() });
    }
}
