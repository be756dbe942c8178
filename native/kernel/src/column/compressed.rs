//! MariaDB's COMPRESSED columns, which row images contain in their stored form.
//!
//! Source: MariaDB's `compress_zlib` and `uncompress_zlib`. A value is empty, or starts with a header byte: the
//! method in the high half (0 stored, 8 zlib), a flag for deflate without zlib's wrapper, and in the low three bits
//! the number of bytes of the uncompressed length, which follows in big-endian order before the data.

use flate2::{Decompress, FlushDecompress, Status};

use super::store::{Appended, Runs};
use super::{base64, binary, text, Form};
use crate::charset::Charset;
use crate::cursor::Cursor;
use crate::error::{value_malformed, Error, ErrorKind, Result};
use crate::limits::DECOMPRESSED_BYTES_MAX;

const METHOD_STORED: u8 = 0;
const METHOD_ZLIB: u8 = 8;
const RAW: u8 = 8;

/// Deflate compresses by at most 1032 to 1. A larger announced length is wrong and must not be allocated.
const RATIO_MAX: usize = 1_032;

#[inline(always)]
pub(super) fn read<'a>(prefix: u8, cursor: &mut Cursor<'a>) -> Result<&'a [u8]> {
    cursor.prefixed(prefix)
}

/// Returns the uncompressed bytes of a value; bytes that are stored uncompressed are not copied.
pub(crate) fn plain(bytes: &[u8]) -> Result<std::borrow::Cow<'_, [u8]>> {
    let mut cursor = Cursor::new(bytes);
    let Ok(header) = cursor.u8() else { return Ok(bytes.into()) };
    match header >> 4 {
        METHOD_STORED => Ok(cursor.take_rest().into()),
        METHOD_ZLIB => inflate(cursor, header).map(Into::into),
        method => {
            let message = format!("a COMPRESSED column with the unknown method {method}");
            Err(Error::new(ErrorKind::EventUnsupported, message))
        }
    }
}

fn inflate(mut cursor: Cursor<'_>, header: u8) -> Result<Vec<u8>> {
    let length = usize::try_from(cursor.uint_be(usize::from(header & 7))?).unwrap_or(usize::MAX);
    let packed = cursor.take_rest();
    if length > DECOMPRESSED_BYTES_MAX {
        let message = format!("a COMPRESSED column of {length} bytes");
        return Err(Error::new(ErrorKind::LimitExceeded, message));
    }
    if length > packed.len().saturating_mul(RATIO_MAX) {
        return Err(value_malformed(format!("{} compressed bytes cannot hold {length}", packed.len())));
    }
    let mut out = Vec::with_capacity(length);
    let mut inflater = Decompress::new(header & RAW == 0);
    match inflater.decompress_vec(packed, &mut out, FlushDecompress::Finish) {
        Ok(Status::StreamEnd) if out.len() == length => Ok(out),
        Ok(_) => Err(value_malformed(format!("a COMPRESSED column holds {} of {length} bytes", out.len()))),
        Err(error) => Err(value_malformed(format!("a COMPRESSED column does not inflate: {error}"))),
    }
}

pub(super) fn append_text(bytes: &[u8], charset: Charset, runs: &mut Runs<u8>) -> Appended {
    text::append(&plain(bytes)?, charset, runs)
}

pub(super) fn append_binary(bytes: &[u8], runs: &mut Runs<u8>) -> Appended {
    binary::append_plain(&plain(bytes)?, runs)
}

pub(crate) fn write_text(bytes: &[u8], charset: Charset, out: &mut Vec<u8>) -> Result<()> {
    text::write_text(&plain(bytes)?, charset, out);
    Ok(())
}

pub(crate) fn write_bytes(bytes: &[u8], out: &mut Vec<u8>) -> Result<()> {
    out.extend_from_slice(&plain(bytes)?);
    Ok(())
}

/// Writes the uncompressed text as a JSON string.
pub(crate) fn write_json(bytes: &[u8], charset: Charset, out: &mut Vec<u8>) -> Result<()> {
    text::write_json(&plain(bytes)?, charset, out);
    Ok(())
}

/// Writes the uncompressed bytes in base64 as a JSON string.
pub(crate) fn write_base64(bytes: &[u8], out: &mut Vec<u8>) -> Result<()> {
    base64::write_quoted(&plain(bytes)?, out);
    Ok(())
}

/// Returns the compressed column's type in SQL, given the uncompressed column's type.
pub(super) fn type_text(plain: String) -> String {
    format!("{plain} /*M!100301 COMPRESSED*/")
}

/// Returns the form of the uncompressed column. The length of a compressed VARCHAR or VARBINARY includes a header byte,
/// which is subtracted.
pub(super) fn plain_form(form: Form) -> Form {
    match form {
        Form::Varying(bytes) => Form::Varying(bytes.saturating_sub(1)),
        Form::Fixed(_) | Form::Large => form,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::write::{DeflateEncoder, ZlibEncoder};
    use flate2::Compression;

    use super::*;

    fn raw(data: &[u8], length: u16) -> Vec<u8> {
        let [high, low] = length.to_be_bytes();
        let mut encoder = DeflateEncoder::new(vec![0x8a, high, low], Compression::default());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn values_are_empty_stored_or_deflated() {
        assert_eq!(plain(b"").unwrap().as_ref(), b"");
        assert_eq!(plain(b"\0abc").unwrap().as_ref(), b"abc");
        let data = b"hello ".repeat(100);
        assert_eq!(plain(&raw(&data, 600)).unwrap().as_ref(), data);
        let mut wrapped = ZlibEncoder::new(vec![0x82, 0x02, 0x58], Compression::default());
        wrapped.write_all(&data).unwrap();
        assert_eq!(plain(&wrapped.finish().unwrap()).unwrap().as_ref(), data);
    }

    #[test]
    fn a_wrong_length_or_method_is_an_error() {
        let data = b"hello ".repeat(100);
        for length in [599, 601] {
            assert_eq!(plain(&raw(&data, length)).unwrap_err().kind(), ErrorKind::ValueMalformed);
        }
        assert_eq!(plain(b"\x8c\xff\xff\xff\xffx").unwrap_err().kind(), ErrorKind::LimitExceeded);
        assert_eq!(plain(b"\x8a\xff\xffx").unwrap_err().kind(), ErrorKind::ValueMalformed);
        assert_eq!(plain(b"\x10abc").unwrap_err().kind(), ErrorKind::EventUnsupported);
    }
}
