//! A whole transaction in one event, compressed (MySQL 8.0.20 and later, code 40).

use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::limits::PAYLOAD_BYTES_MAX;

/// How the payload is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Zstandard.
    Zstd,
    /// As it is.
    Nothing,
}

/// The payload, as a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransactionPayload<'a> {
    /// How it is packed.
    pub compression: Compression,
    /// Bytes after decompression, as announced.
    pub plain_bytes: u64,
    /// The packed events, which carry no checksums of their own.
    pub payload: &'a [u8],
}

impl<'a> TransactionPayload<'a> {
    /// Reads the body, without checksum (`Transaction_payload_event`).
    pub fn read(body: &'a [u8]) -> Result<TransactionPayload<'a>> {
        let (head, fields_bytes, size) = TransactionPayload::read_head(body)?;
        let mut cursor = Cursor::new(body);
        cursor.skip(fields_bytes)?;
        let payload = cursor.take(usize::try_from(size).map_err(|_| malformed("a payload's size"))?)?;
        Ok(TransactionPayload { payload, ..head })
    }

    /// Reads the fields before the payload: type, length and value, all length-encoded integers: 1 the payload's
    /// size, 2 the compression, 3 the plain size; 0 ends them. Returns a view without its payload, how many bytes the
    /// fields are, and how many the payload is.
    pub fn read_head(body: &[u8]) -> Result<(TransactionPayload<'a>, usize, u64)> {
        let mut cursor = Cursor::new(body);
        let mut size = None;
        let mut plain_bytes = None;
        let mut compression = Compression::Nothing;
        loop {
            let field = cursor.length_encoded()?;
            if field == 0 {
                break;
            }
            let mut value = Cursor::new(cursor.length_encoded_bytes()?);
            match field {
                1 => size = Some(value.length_encoded()?),
                2 => {
                    compression = match value.length_encoded()? {
                        0 => Compression::Zstd,
                        255 => Compression::Nothing,
                        other => {
                            let message = format!("transaction compression type {other}");
                            return Err(Error::new(ErrorKind::EventUnsupported, message));
                        }
                    }
                }
                3 => plain_bytes = Some(value.length_encoded()?),
                _ => {}
            }
        }
        let size = size.ok_or_else(|| malformed("a transaction payload without its size"))?;
        let plain_bytes = plain_bytes.unwrap_or(size);
        if plain_bytes > PAYLOAD_BYTES_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, format!("a payload of {plain_bytes} bytes")));
        }
        Ok((TransactionPayload { compression, plain_bytes, payload: &[] }, body.len() - cursor.remaining(), size))
    }
}
