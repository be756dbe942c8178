//! Heartbeats: the server is idle and reports its position.

use crate::cursor::Cursor;
use crate::error::{malformed, Result};

/// The position up to which the server has sent everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heartbeat {
    /// Name of the file being sent.
    pub file: String,
    /// Offset in the file; None in version 1, where the event header has the offset modulo 2^32.
    pub offset: Option<u64>,
}

impl Heartbeat {
    /// Reads version 1: the whole body is the file name.
    pub fn read_v1(body: &[u8]) -> Result<Heartbeat> {
        Ok(Heartbeat { file: read_name(body)?, offset: None })
    }

    /// Reads version 2 (`Heartbeat_event_v2`): fields of type, length and value. Type 0 ends the list, 1 is the file
    /// name, 2 the offset.
    pub fn read_v2(body: &[u8]) -> Result<Heartbeat> {
        let mut cursor = Cursor::new(body);
        let mut heartbeat = Heartbeat { file: String::new(), offset: None };
        loop {
            let kind = cursor.length_encoded()?;
            if kind == 0 {
                return Ok(heartbeat);
            }
            let value = cursor.length_encoded_bytes()?;
            match kind {
                1 => heartbeat.file = read_name(value)?,
                2 => heartbeat.offset = Some(Cursor::new(value).length_encoded()?),
                _ => {}
            }
        }
    }
}

fn read_name(bytes: &[u8]) -> Result<String> {
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| malformed("a heartbeat's file name"))
}
