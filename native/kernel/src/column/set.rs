//! SET: a bit for each of up to 64 members, little-endian, in 1, 2, 3, 4 or 8 bytes.

use std::sync::Arc;

use super::parsed::Parsed;
use super::quoted;
use super::store::{Appended, Runs};
use crate::cursor::Cursor;
use crate::error::{value_malformed, Error, ErrorKind, Result};

/// Maximum number of members on the server.
const MEMBERS_MAX: usize = 64;

/// Returns the width of a value in bytes, and the members of a declared SET.
pub(super) fn declared(parsed: &Parsed<'_>) -> Result<(u8, Arc<[Arc<str>]>)> {
    let bytes = width(parsed.members().len());
    Ok((bytes, members(bytes, parsed.members().into())?))
}

/// Returns the members of a SET after checking their number against the width of a value.
pub(super) fn members(bytes: u8, values: Arc<[Arc<str>]>) -> Result<Arc<[Arc<str>]>> {
    if values.len() <= MEMBERS_MAX && bytes == width(values.len()) {
        return Ok(values);
    }
    let message = format!("a SET of {} members in {bytes} bytes", values.len());
    Err(Error::new(ErrorKind::SchemaMismatch, message))
}

/// Returns the width of a value in bytes for this number of members (`get_set_pack_length`).
pub(super) fn width(members: usize) -> u8 {
    match members {
        0..=8 => 1,
        9..=16 => 2,
        17..=24 => 3,
        25..=32 => 4,
        _ => 8,
    }
}

#[inline(always)]
pub(super) fn read(bytes: u8, cursor: &mut Cursor<'_>) -> Result<u64> {
    cursor.uint(bytes.into())
}

pub(super) fn append(bits: u64, values: &[Arc<str>], runs: &mut Runs<u8>) -> Appended {
    if let Err(error) = write_text(bits, values, &mut runs.items) {
        runs.take_back();
        return Err(error);
    }
    runs.close()?;
    Ok(None)
}

/// Writes the members in their declared order, separated by commas.
pub(crate) fn write_text(bits: u64, values: &[Arc<str>], out: &mut Vec<u8>) -> Result<()> {
    let mut rest = bits;
    while rest != 0 {
        let slot = rest.trailing_zeros();
        let Some(text) = values.get(usize::try_from(slot).unwrap_or(MEMBERS_MAX)) else {
            return Err(value_malformed(format!("bits {bits:#x} in a SET of {} members", values.len())));
        };
        if rest != bits {
            out.push(b',');
        }
        match text.as_bytes() {
            // A push needs no call.
            [letter] => out.push(*letter),
            text => out.extend_from_slice(text),
        }
        rest &= rest - 1;
    }
    Ok(())
}

/// Writes the members as a JSON list of strings.
pub(crate) fn write_list(bits: u64, values: &[Arc<str>], out: &mut Vec<u8>) -> Result<()> {
    out.push(b'[');
    let mut rest = bits;
    while rest != 0 {
        let slot = rest.trailing_zeros();
        let Some(text) = values.get(usize::try_from(slot).unwrap_or(MEMBERS_MAX)) else {
            return Err(value_malformed(format!("bits {bits:#x} in a SET of {} members", values.len())));
        };
        if rest != bits {
            out.push(b',');
        }
        quoted::write(text.as_bytes(), out);
        rest &= rest - 1;
    }
    out.push(b']');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_written_in_their_declared_order() {
        let values: Vec<Arc<str>> = (0..64).map(|slot| format!("m{slot}").into()).collect();
        for (bits, text) in [(0, ""), (1, "m0"), (0b101, "m0,m2"), (1 << 63 | 2, "m1,m63")] {
            let mut out = Vec::new();
            write_text(bits, &values, &mut out).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), text);
        }
    }

    #[test]
    fn a_bit_without_a_member_is_malformed() {
        let values: Vec<Arc<str>> = vec!["a".into()];
        assert_eq!(write_text(2, &values, &mut Vec::new()).unwrap_err().kind(), ErrorKind::ValueMalformed);
    }

    #[test]
    fn a_bit_without_a_member_appends_nothing() {
        let values: Vec<Arc<str>> = vec!["a".into()];
        let mut runs = Runs::new();
        assert!(append(3, &values, &mut runs).is_err());
        assert!(runs.items.is_empty());
    }

    #[test]
    fn widths_skip_from_four_to_eight() {
        assert_eq!([8, 9, 17, 25, 32, 33, 64].map(width), [1, 2, 3, 4, 4, 8, 8]);
    }
}
