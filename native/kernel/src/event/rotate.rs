//! Rotations: the log continues in another file.

use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};

/// The position where the log continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rotate {
    /// Offset in the next file: 4, except in the artificial event that opens a stream.
    pub offset: u64,
    /// Name of the next file.
    pub file: String,
}

impl Rotate {
    /// Reads the body, without checksum: offset u64, then the file name.
    pub fn read(body: &[u8]) -> Result<Rotate> {
        let mut cursor = Cursor::new(body);
        let offset = cursor.u64()?;
        let file = std::str::from_utf8(cursor.take_rest()).map_err(|_| malformed("the next file's name"))?;
        Ok(Rotate { offset, file: file.to_owned() })
    }
}

/// Returns the number at the end of a file name, 0 if there is none.
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
