//! Writing protobuf into one growing buffer.
//!
//! A length stands before what it counts, so one byte is kept free for it; where the content comes to more than 127
//! bytes, it is moved up by the few bytes that the length takes more.

/// The wire types that are used.
const VARINT: u8 = 0;
const BYTES: u8 = 2;

/// Adds a number in groups of seven bits.
#[inline]
pub fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// How many bytes [`varint`] adds.
#[inline]
pub fn varint_len(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

#[inline]
fn tag(field: u8, wire: u8, out: &mut Vec<u8>) {
    varint(u64::from(field) << 3 | u64::from(wire), out);
}

/// Adds a number field, also where it is zero.
#[inline]
pub fn number(field: u8, value: u64, out: &mut Vec<u8>) {
    tag(field, VARINT, out);
    varint(value, out);
}

/// Adds a signed number field, also where it is zero; negative ones take ten bytes.
#[inline]
pub fn signed(field: u8, value: i64, out: &mut Vec<u8>) {
    number(field, u64::from_ne_bytes(value.to_ne_bytes()), out);
}

/// Adds a signed number field, except where it is zero, as proto3 does.
#[inline]
pub fn signed_unless_zero(field: u8, value: i64, out: &mut Vec<u8>) {
    if value != 0 {
        signed(field, value, out);
    }
}

/// Adds a field of bytes or text, also where it is empty.
#[inline]
pub fn bytes(field: u8, value: &[u8], out: &mut Vec<u8>) {
    tag(field, BYTES, out);
    varint(value.len() as u64, out);
    out.extend_from_slice(value);
}

/// Adds a field of text, except where it is empty, as proto3 does.
#[inline]
pub fn text(field: u8, value: &str, out: &mut Vec<u8>) {
    if !value.is_empty() {
        bytes(field, value.as_bytes(), out);
    }
}

/// Opens a field of bytes of which the length is not known yet; [`close`] takes what this gives.
#[inline]
pub fn open(field: u8, out: &mut Vec<u8>) -> usize {
    tag(field, BYTES, out);
    out.push(0);
    out.len()
}

/// Closes a field that was opened at `start`.
#[inline]
pub fn close(start: usize, out: &mut Vec<u8>) {
    let length = out.len().saturating_sub(start);
    if length < 0x80 {
        if let Some(place) = start.checked_sub(1).and_then(|at| out.get_mut(at)) {
            *place = length as u8;
        }
    } else {
        move_up(start, length, out);
    }
}

/// Closes a field that was opened at `start` and of which `behind` more bytes follow, by the caller.
#[inline]
pub fn close_before(start: usize, behind: usize, out: &mut Vec<u8>) {
    move_up(start, out.len().saturating_sub(start) + behind, out);
}

/// Writes a length in place of the byte before `start`, and moves up what stands behind it.
#[inline(never)]
fn move_up(start: usize, length: usize, out: &mut Vec<u8>) {
    let more = varint_len(length as u64) - 1;
    let end = out.len();
    out.resize(end + more, 0);
    out.copy_within(start..end, start + more);
    let mut value = length as u64;
    let places = out.get_mut(start.saturating_sub(1)..start + more).unwrap_or_default();
    if let Some((last, places)) = places.split_last_mut() {
        for place in places {
            *place = value as u8 | 0x80;
            value >>= 7;
        }
        *last = value as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_take_seven_bits_a_byte() {
        for (value, bytes) in [
            (0, &[0][..]),
            (127, &[127]),
            (128, &[0x80, 1]),
            (300, &[0xac, 2]),
            (1 << 35, &[0x80, 0x80, 0x80, 0x80, 0x80, 1]),
        ] {
            let mut out = Vec::new();
            varint(value, &mut out);
            assert_eq!(out, bytes);
            assert_eq!(varint_len(value), bytes.len());
        }
        let mut out = Vec::new();
        signed(2, -7, &mut out);
        assert_eq!(out, [0x10, 0xf9, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
        assert_eq!(varint_len(u64::MAX), 10);
    }

    #[test]
    fn a_length_takes_its_place_whatever_it_is() {
        for length in [0usize, 1, 127, 128, 16_383, 16_384, 2_097_152] {
            let content = vec![7u8; length];
            let (mut whole, mut piecewise) = (vec![9], vec![9]);
            bytes(3, &content, &mut whole);
            let start = open(3, &mut piecewise);
            piecewise.extend_from_slice(&content);
            close(start, &mut piecewise);
            assert!(whole == piecewise, "{length}");
        }
    }
}
