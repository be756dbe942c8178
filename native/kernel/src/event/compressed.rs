//! MariaDB's compressed event bodies (`binlog_buf_uncompress`).
//!
//! ```text
//! ┌──────────────────────┬──────────────────────────┬──────────────┐
//! │ 1 alg:3 000 bytes:3  │ plain length, big-endian │ zlib stream  │
//! └──────────────────────┴──────────────────────────┴──────────────┘
//! ```

use std::io::Read;

use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::limits::DECOMPRESSED_BYTES_MAX;

/// Decompresses a body; rejects a stream whose length differs from the announced length.
pub fn decompress(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut cursor = Cursor::new(bytes);
    let head = cursor.u8()?;
    let algorithm = (head & 0x70) >> 4;
    if head & 0x80 == 0 || algorithm != 0 {
        return Err(Error::new(ErrorKind::EventUnsupported, format!("compression header {head:#04x}")));
    }
    let length = cursor.uint_be(usize::from(head & 0x07))?;
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > DECOMPRESSED_BYTES_MAX {
        return Err(Error::new(ErrorKind::LimitExceeded, format!("an event of {length} bytes after decompression")));
    }
    // Do not allocate the announced length before the stream has produced that much data.
    let mut plain = Vec::with_capacity(length.min(bytes.len().saturating_mul(16)));
    flate2::read::ZlibDecoder::new(cursor.take_rest())
        .take(length as u64 + 1)
        .read_to_end(&mut plain)
        .map_err(|error| malformed(format!("a compressed body: {error}")))?;
    if plain.len() != length {
        return Err(malformed(format!("a compressed body announces {length} bytes and holds {}", plain.len())));
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn compressed(plain: &[u8], announced: u8) -> Vec<u8> {
        let mut encoder = flate2::write::ZlibEncoder::new(vec![0x81, announced], flate2::Compression::fast());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn a_body_is_decompressed() {
        assert_eq!(decompress(&compressed(b"hello hello", 11)).unwrap(), b"hello hello");
    }

    #[test]
    fn a_wrong_length_is_rejected() {
        for announced in [0, 10, 12, 255] {
            assert_eq!(
                decompress(&compressed(b"hello hello", announced)).unwrap_err().kind(),
                ErrorKind::EventMalformed
            );
        }
    }
}
