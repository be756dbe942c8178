//! Compressed transactions: a whole transaction in a single event (MySQL 8.0.20 and later, code 40).

use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::limits::PAYLOAD_BYTES_MAX;

/// The compression of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Zstandard.
    Zstd,
    /// No compression.
    Nothing,
}

/// The payload, as a view of the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransactionPayload<'a> {
    /// The compression of the payload.
    pub compression: Compression,
    /// Announced size after decompression, in bytes.
    pub plain_bytes: u64,
    /// The compressed events, none of which has a checksum.
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

    /// Reads the fields before the payload.
    ///
    /// Each field has a type, a length and a value, all of which are length-encoded integers. Type 1 is the payload's
    /// size, type 2 the compression, and type 3 the size after decompression. Type 0 ends the list. Returns a view
    /// without the payload, the size of the fields and the size of the payload, in bytes.
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
                        code => {
                            let message = format!("transaction compression type {code}");
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
