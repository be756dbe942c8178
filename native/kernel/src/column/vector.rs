//! VECTOR: little-endian 32-bit floats. MySQL stores them as a BLOB, MariaDB as a VARBINARY.

use super::float;
use super::layout::prefix_of;
use super::parsed::Parsed;
use super::store::{Appended, Runs};
use crate::cursor::Cursor;
use crate::error::{value_malformed, Error, Result};

/// Maximum number of dimensions on both servers.
const DIMENSIONS_MAX: u64 = 16_383;

/// Returns the width of the length prefix in bytes, and the dimensions of a declared VECTOR.
pub(super) fn declared(parsed: &Parsed<'_>, mariadb: bool) -> Result<(u8, Option<u16>)> {
    let dimensions = match parsed.numbers() {
        [] => None,
        _ => u16::try_from(parsed.number(0, 0, DIMENSIONS_MAX)?).ok(),
    };
    match (mariadb, dimensions) {
        (false, _) => Ok((4, dimensions)),
        (true, Some(count)) => Ok((prefix_of(count * 4), dimensions)),
        (true, None) => Err(parsed.invalid("a vector without its dimensions")),
    }
}

#[inline(always)]
pub(super) fn read<'a>(prefix: u8, cursor: &mut Cursor<'a>) -> Result<&'a [u8]> {
    let bytes = cursor.prefixed(prefix)?;
    if bytes.len() % 4 == 0 {
        Ok(bytes)
    } else {
        Err(odd(bytes))
    }
}

/// Returns the error for bytes that are not a list of floats. When ALTER TABLE turns a BLOB into a VECTOR, MySQL 9
/// keeps a value's bytes even if their number is not a multiple of four.
#[cold]
pub(super) fn odd(bytes: &[u8]) -> Error {
    value_malformed(format!("a VECTOR of {} bytes, which is no number of 32-bit floats", bytes.len()))
        .hint("find such rows by LENGTH(CAST(column AS BINARY)) % 4 <> 0, and correct or remove them at the source")
}

pub(super) fn append(bytes: &[u8], runs: &mut Runs<f32>) -> Appended {
    let mut cursor = Cursor::new(bytes);
    while let Ok(bits) = cursor.u32() {
        runs.items.push(f32::from_bits(bits));
    }
    runs.close()?;
    Ok(None)
}

/// Writes the floats as a JSON list of numbers.
pub(crate) fn write_list(bytes: &[u8], out: &mut Vec<u8>) {
    out.push(b'[');
    let mut cursor = Cursor::new(bytes);
    let mut first = true;
    while let Ok(bits) = cursor.u32() {
        if !std::mem::take(&mut first) {
            out.push(b',');
        }
        float::write_json_single(f32::from_bits(bits), out);
    }
    out.push(b']');
}

/// Returns the type in SQL.
pub(super) fn type_text(dimensions: Option<u16>) -> String {
    dimensions.map_or_else(|| "vector".to_owned(), |count| format!("vector({count})"))
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;
    use arrow_array::types::Float32Type;

    use super::*;
    use crate::column::{ColumnBuilder, Kind};

    #[test]
    fn a_vector_becomes_a_list_of_floats() {
        let kind = Kind::Vector { prefix: 4, dimensions: None };
        let mut builder = ColumnBuilder::new(&kind);
        builder.append_from(&kind, &mut Cursor::new(b"\x08\0\0\0\0\0\x80\x3f\0\0\x20\xc0")).unwrap();
        builder.append_null();
        let array = builder.finish();
        assert_eq!(array.data_type(), &kind.arrow_type());
        let first = array.as_list::<i32>().value(0);
        assert_eq!(first.as_primitive::<Float32Type>().values().as_ref(), [1.0, -2.5]);
        assert!(array.is_null(1));
    }

    #[test]
    fn a_vector_of_odd_length_is_malformed() {
        let error = read(1, &mut Cursor::new(b"\x06abcdef")).unwrap_err();
        assert!(error.to_string().contains("a VECTOR of 6 bytes"), "{error}");
        assert!(format!("{error:?}").contains("LENGTH(CAST(column AS BINARY))"), "{error:?}");
    }
}
