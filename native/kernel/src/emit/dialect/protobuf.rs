//! Writes protobuf into a growing buffer.
//!
//! A length precedes its content, so one byte is reserved for it. If the content exceeds 127 bytes, it is moved to
//! make room for a longer length.

/// The wire types in use.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

/// Writes a number in groups of seven bits.
#[inline]
pub fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Returns the number of bytes that [`varint`] writes for a number.
#[inline]
pub fn varint_len(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

#[inline]
fn tag(field: u32, wire: u8, out: &mut Vec<u8>) {
    varint(u64::from(field) << 3 | u64::from(wire), out);
}

/// Writes a number field, even if it is zero.
#[inline]
pub fn number(field: u32, value: u64, out: &mut Vec<u8>) {
    tag(field, VARINT, out);
    varint(value, out);
}

/// Writes a signed number field, even if it is zero; negative numbers take ten bytes.
#[inline]
pub fn signed(field: u32, value: i64, out: &mut Vec<u8>) {
    number(field, u64::from_ne_bytes(value.to_ne_bytes()), out);
}

/// Writes a signed number field unless it is zero, as in proto3.
#[inline]
pub fn signed_unless_zero(field: u32, value: i64, out: &mut Vec<u8>) {
    if value != 0 {
        signed(field, value, out);
    }
}

/// Writes a field of a float, even if it is zero.
#[inline]
pub fn float(field: u32, value: f32, out: &mut Vec<u8>) {
    tag(field, FIXED32, out);
    out.extend_from_slice(&value.to_le_bytes());
}

/// Writes a field of a double, even if it is zero.
#[inline]
pub fn double(field: u32, value: f64, out: &mut Vec<u8>) {
    tag(field, FIXED64, out);
    out.extend_from_slice(&value.to_le_bytes());
}

/// Writes a field of bytes or text, even if it is empty.
#[inline]
pub fn bytes(field: u32, value: &[u8], out: &mut Vec<u8>) {
    tag(field, BYTES, out);
    varint(value.len() as u64, out);
    out.extend_from_slice(value);
}

/// Writes a text field unless it is empty, as in proto3.
#[inline]
pub fn text(field: u32, value: &str, out: &mut Vec<u8>) {
    if !value.is_empty() {
        bytes(field, value.as_bytes(), out);
    }
}

/// Opens a field of bytes of unknown length. Returns the start, for [`close`].
#[inline]
pub fn open(field: u32, out: &mut Vec<u8>) -> usize {
    tag(field, BYTES, out);
    out.push(0);
    out.len()
}

/// Closes the field that was opened at `start`.
#[inline]
pub fn close(start: usize, out: &mut Vec<u8>) {
    let length = out.len().saturating_sub(start);
    if length < 0x80 {
        if let Some(length_byte) = start.checked_sub(1).and_then(|at| out.get_mut(at)) {
            *length_byte = length as u8;
        }
    } else {
        move_up(start, length, out);
    }
}

/// Closes the field that was opened at `start`, to which the caller will add `following` more bytes.
#[inline]
pub fn close_before(start: usize, following: usize, out: &mut Vec<u8>) {
    move_up(start, out.len().saturating_sub(start) + following, out);
}

/// Overwrites the byte before `start` with the content's length. A longer length moves the content up.
#[inline(never)]
fn move_up(start: usize, length: usize, out: &mut Vec<u8>) {
    let extra_bytes = varint_len(length as u64) - 1;
    let end = out.len();
    out.resize(end + extra_bytes, 0);
    out.copy_within(start..end, start + extra_bytes);
    let mut value = length as u64;
    let length_bytes = out.get_mut(start.saturating_sub(1)..start + extra_bytes).unwrap_or_default();
    if let Some((last, length_bytes)) = length_bytes.split_last_mut() {
        for length_byte in length_bytes {
            *length_byte = value as u8 | 0x80;
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
    fn lengths_of_any_size_precede_their_content() {
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
