//! ENUM: the number of the member, starting at 1, in one or two bytes.

use std::sync::Arc;

use super::parsed::Parsed;
use super::store::{Appended, Runs};
use crate::cursor::Cursor;
use crate::error::{value_malformed, Error, ErrorKind, Result};

/// Maximum number of members on the server.
const MEMBERS_MAX: usize = 65_535;

/// Returns the width of a value in bytes, and the members of a declared ENUM.
pub(super) fn declared(parsed: &Parsed<'_>) -> Result<(u8, Arc<[Arc<str>]>)> {
    let bytes = width(parsed.members().len());
    Ok((bytes, members(bytes, parsed.members().into())?))
}

/// Returns the members of an ENUM after checking their number against the width of a value.
pub(super) fn members(bytes: u8, values: Arc<[Arc<str>]>) -> Result<Arc<[Arc<str>]>> {
    if values.len() <= MEMBERS_MAX && bytes == width(values.len()) {
        return Ok(values);
    }
    let message = format!("an ENUM of {} members in {bytes} bytes", values.len());
    Err(Error::new(ErrorKind::SchemaMismatch, message))
}

/// Returns the width of a value in bytes for this number of members (`get_enum_pack_length`).
pub(super) fn width(members: usize) -> u8 {
    if members < 256 {
        1
    } else {
        2
    }
}

#[inline(always)]
pub(super) fn read(bytes: u8, cursor: &mut Cursor<'_>) -> Result<u16> {
    match bytes {
        1 => cursor.u8().map(u16::from),
        _ => cursor.u16(),
    }
}

/// Returns the text of a member; 0 is the empty string, which the server stores for invalid values.
#[inline]
fn member(index: u16, values: &[Arc<str>]) -> Result<&str> {
    match usize::from(index).checked_sub(1) {
        None => Ok(""),
        Some(slot) => match values.get(slot) {
            Some(text) => Ok(text),
            None => Err(value_malformed(format!("member {index} of an ENUM of {}", values.len()))),
        },
    }
}

#[inline]
pub(super) fn append(index: u16, values: &[Arc<str>], runs: &mut Runs<u8>) -> Appended {
    runs.items.extend_from_slice(member(index, values)?.as_bytes());
    runs.close()?;
    Ok(None)
}

pub(crate) fn write_text(index: u16, values: &[Arc<str>], out: &mut Vec<u8>) -> Result<()> {
    out.extend_from_slice(member(index, values)?.as_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_count_from_one_and_zero_is_empty() {
        let values: Vec<Arc<str>> = vec!["a".into(), "b,c".into()];
        assert_eq!(member(0, &values).unwrap(), "");
        assert_eq!(member(2, &values).unwrap(), "b,c");
        assert_eq!(member(3, &values).unwrap_err().kind(), ErrorKind::ValueMalformed);
    }

    #[test]
    fn the_members_decide_the_width() {
        let named = |count: usize| -> Arc<[Arc<str>]> { (0..count).map(|slot| slot.to_string().into()).collect() };
        assert!(members(1, named(255)).is_ok());
        assert!(members(2, named(256)).is_ok());
        assert_eq!(members(1, named(256)).unwrap_err().kind(), ErrorKind::SchemaMismatch);
    }
}
