//! BINARY, VARBINARY and the BLOB family: a length, then bytes.
//!
//! Row images omit the trailing zero bytes of BINARY(n) (`Field_string::pack`); they are restored here.

use std::borrow::Cow;

use super::store::{Appended, Runs};
use super::{base64, Form};
use crate::cursor::Cursor;
use crate::error::{value_malformed, Result};

/// Returns how many zero bytes a value must be padded with.
#[inline(always)]
fn padding(bytes: &[u8], form: Form) -> usize {
    match form {
        Form::Fixed(width) => usize::from(width).saturating_sub(bytes.len()),
        Form::Varying(_) | Form::Large => 0,
    }
}

#[inline(always)]
pub(super) fn read<'a>(prefix: u8, form: Form, cursor: &mut Cursor<'a>) -> Result<&'a [u8]> {
    let bytes = cursor.prefixed(prefix)?;
    match form {
        Form::Fixed(width) if bytes.len() > usize::from(width) => {
            Err(value_malformed(format!("{} bytes in a BINARY({width})", bytes.len())))
        }
        _ => Ok(bytes),
    }
}

#[inline]
pub(super) fn append(bytes: &[u8], form: Form, runs: &mut Runs<u8>) -> Appended {
    write_padded(bytes, form, &mut runs.items);
    runs.close()?;
    Ok(None)
}

/// Reads and appends a value in one step.
#[inline(always)]
pub(super) fn append_read(prefix: u8, form: Form, cursor: &mut Cursor<'_>, runs: &mut Runs<u8>) -> Appended {
    if let Form::Fixed(_) = form {
        return append(read(prefix, form, cursor)?, form, runs);
    }
    let (bytes, block) = cursor.prefixed_block(prefix)?;
    runs.append(bytes, block)?;
    Ok(None)
}

/// Appends bytes without padding.
pub(super) fn append_plain(bytes: &[u8], runs: &mut Runs<u8>) -> Appended {
    append(bytes, Form::Large, runs)
}

#[inline]
pub(crate) fn write_padded(bytes: &[u8], form: Form, out: &mut Vec<u8>) {
    out.extend_from_slice(bytes);
    let padding = padding(bytes, form);
    if padding > 0 {
        out.resize(out.len() + padding, 0);
    }
}

/// Writes bytes as ISO-8859-1 text, encoded in UTF-8.
pub(crate) fn write_latin1(bytes: &[u8], form: Form, out: &mut Vec<u8>) {
    write_latin1_plain(bytes, out);
    out.resize(out.len() + padding(bytes, form), 0);
}

/// Writes bytes without padding as ISO-8859-1 text, encoded in UTF-8.
pub(crate) fn write_latin1_plain(bytes: &[u8], out: &mut Vec<u8>) {
    for byte in bytes {
        if *byte < 0x80 {
            out.push(*byte);
        } else {
            out.extend_from_slice(&[0xc0 | byte >> 6, 0x80 | byte & 0x3f]);
        }
    }
}

/// Reads a fixed-width value that row images store like a BINARY column.
#[inline(always)]
pub(super) fn read_fixed<const WIDTH: usize>(cursor: &mut Cursor<'_>) -> Result<[u8; WIDTH]> {
    let bytes = cursor.prefixed(1)?;
    let mut fixed = [0; WIDTH];
    match fixed.get_mut(..bytes.len()) {
        Some(head) => head.copy_from_slice(bytes),
        None => return Err(value_malformed(format!("{} bytes in a column of {WIDTH}", bytes.len()))),
    }
    Ok(fixed)
}

/// Returns the bytes, padded with the zeros that the server does not store.
pub(crate) fn padded(bytes: &[u8], form: Form) -> Cow<'_, [u8]> {
    if padding(bytes, form) == 0 {
        return Cow::Borrowed(bytes);
    }
    let mut padded = Vec::new();
    write_padded(bytes, form, &mut padded);
    Cow::Owned(padded)
}

/// Writes the bytes in base64 as a JSON string.
pub(crate) fn write_json(bytes: &[u8], form: Form, out: &mut Vec<u8>) {
    base64::write_quoted(&padded(bytes, form), out);
}

/// Returns the type in SQL.
pub(super) fn type_text(prefix: u8, form: Form) -> String {
    form.type_text(["binary", "varbinary", "blob"], prefix, 1)
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;

    use super::*;
    use crate::column::{ColumnBuilder, Kind};

    #[test]
    fn trailing_zero_bytes_are_restored() {
        let kind = Kind::Binary { prefix: 1, form: Form::Fixed(4) };
        let mut builder = ColumnBuilder::new(&kind);
        for image in [&b"\x02ab"[..], b"\x00", b"\x04abcd"] {
            builder.append_from(&kind, &mut Cursor::new(image)).unwrap();
        }
        let array = builder.finish();
        let values: Vec<_> = array.as_binary::<i32>().iter().flatten().collect();
        assert_eq!(values, [&b"ab\0\0"[..], b"\0\0\0\0", b"abcd"]);
    }

    #[test]
    fn binary_longer_than_declared_is_malformed() {
        assert!(read(1, Form::Fixed(1), &mut Cursor::new(b"\x02ab")).is_err());
        assert!(read_fixed::<4>(&mut Cursor::new(b"\x05abcde")).is_err());
    }

    #[test]
    fn blobs_have_prefixes_of_one_to_four_bytes() {
        let images: [&[u8]; 4] = [b"\x01x", b"\x01\0x", b"\x01\0\0x", b"\x01\0\0\0x"];
        for (prefix, image) in (1..).zip(images) {
            assert_eq!(read(prefix, Form::Large, &mut Cursor::new(image)).unwrap(), b"x");
        }
    }
}
