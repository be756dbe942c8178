//! The first event of every file, which describes the format of all later events.

use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::limits::EVENT_HEADER_BYTES;

const TABLE_MAP_CODE: usize = 19;
const ROWS_V1_FIRST_CODE: usize = 23;

/// The fields of a format description event that are needed to read events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Format {
    /// The server's version text, such as `9.7.4` or `10.11.19-MariaDB-log`.
    pub server_version: String,
    /// Whether the server is MariaDB, which has its own optional metadata and type codes.
    pub mariadb: bool,
    /// Whether every transaction begins with a GTID event, anonymous or not: MySQL from 5.7, MariaDB from 10.0.
    pub gtid_events: bool,
    /// Whether every event ends with a CRC32.
    pub checksum: bool,
    /// When the server started, in seconds, if this is the first file after a start; 0 otherwise.
    pub created: u32,
    /// Size in bytes of a table id in table maps (4 before MySQL 5.1.4, otherwise 6).
    pub table_id_bytes_table_map: usize,
    /// Size in bytes of a table id in rows events of version 1.
    pub table_id_bytes_rows: usize,
}

impl Format {
    /// Reads the body (after the header), whose last five bytes are the checksum algorithm and the checksum.
    ///
    /// Layout: version u16, server version 50 bytes, created u32, header length u8, one post-header length per
    /// type, algorithm u8, crc u32 (`Format_description_event`).
    pub fn read(body: &[u8]) -> Result<Format> {
        let mut cursor = Cursor::new(body);
        let version = cursor.u16()?;
        if version != 4 {
            return Err(Error::new(ErrorKind::EventUnsupported, format!("binlog version {version}, not 4"))
                .hint("only logs of MySQL 5.0 and later, and of MariaDB, can be read"));
        }
        let text = cursor.take(50)?;
        let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
        let server_version = String::from_utf8_lossy(text).into_owned();
        let created = cursor.u32()?;
        let header_bytes = usize::from(cursor.u8()?);
        if header_bytes != EVENT_HEADER_BYTES {
            return Err(malformed(format!("event headers of {header_bytes} bytes")));
        }
        let tail = cursor.take_rest();
        let Some((lengths, [algorithm, ..])) = tail.split_last_chunk::<5>() else {
            return Err(malformed("the format description is too short"));
        };
        if *algorithm > 1 {
            return Err(Error::new(ErrorKind::EventUnsupported, format!("checksum algorithm {algorithm}"))
                .hint("only NONE and CRC32 exist; logs older than MySQL 5.6.1 name none and cannot be read"));
        }
        let id_bytes = |code: usize, short: u8| if lengths.get(code - 1) == Some(&short) { 4 } else { 6 };
        Ok(Format {
            mariadb: server_version.contains("MariaDB"),
            gtid_events: release(&server_version) >= (5, 7),
            server_version,
            checksum: *algorithm == 1,
            created,
            table_id_bytes_table_map: id_bytes(TABLE_MAP_CODE, 6),
            table_id_bytes_rows: id_bytes(ROWS_V1_FIRST_CODE, 6),
        })
    }
}

/// Returns the first two numbers of a version text; a missing number is 0.
fn release(version: &str) -> (u32, u32) {
    let mut numbers =
        version.split(|character: char| !character.is_ascii_digit()).map(|digits| digits.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_the_first_two_numbers() {
        for (version, expected) in [
            ("9.7.4-2", (9, 7)),
            ("5.6.24-log", (5, 6)),
            ("10.11.19-MariaDB-log", (10, 11)),
            ("26.7.0", (26, 7)),
            ("", (0, 0)),
            ("x", (0, 0)),
        ] {
            assert_eq!(release(version), expected, "{version}");
        }
    }
}
