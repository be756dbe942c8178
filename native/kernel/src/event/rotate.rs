//! The log goes on in another file.

use crate::cursor::Cursor;
use crate::error::{malformed, Result};

/// Where the log goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rotate {
    /// Offset in the next file; 4 but for the made-up event that opens a stream.
    pub offset: u64,
    /// Name of the next file.
    pub file: String,
}

impl Rotate {
    /// Reads the body, without checksum: offset u64, then the name up to the end.
    pub fn read(body: &[u8]) -> Result<Rotate> {
        let mut cursor = Cursor::new(body);
        let offset = cursor.u64()?;
        let file = std::str::from_utf8(cursor.take_rest()).map_err(|_| malformed("the next file's name"))?;
        Ok(Rotate { offset, file: file.to_owned() })
    }
}
