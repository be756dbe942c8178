//! DECIMAL: big-endian groups of nine decimal digits, the sign in the first bit.
//!
//! Source: the server's `decimal2bin`. Digits before and after the point are grouped outward from it, so the first
//! and the last group may have fewer than nine digits and fewer bytes. The first bit is inverted, and in a negative
//! number all bits are inverted in addition, so that the bytes sort like the numbers.

use arrow_schema::DataType;

use super::base64;
use super::integer::write_digits;
use super::parsed::Parsed;
use super::store::{Appended, Store};
use crate::cursor::Cursor;
use crate::error::{value_malformed, Error, ErrorKind, Result};

/// Maximum number of digits of Arrow's (and Spark's) widest decimal.
const ARROW_DIGITS_MAX: u8 = 38;

/// Number of digits of a DECIMAL that is declared without a precision.
const DIGITS_DEFAULT: u8 = 10;

/// Maximum number of digits of a server's DECIMAL.
const DIGITS_MAX: usize = 65;

/// Number of bytes needed for any number of 65 digits with its sign.
const WIDE_BYTES: usize = 32;

/// Number of digits of a full group.
const GROUP_DIGITS: u8 = 9;

/// Maximum number of digit groups in a computed number. Its integer part is padded to full groups, so the number may
/// have more digits than a column allows.
const GROUPS_MAX: u8 = 9;

/// Size of a group in bytes, by its number of digits.
const GROUP_BYTES: [u8; 10] = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4];

const POWERS: [u32; 10] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];

/// A DECIMAL whose digits are still in packed groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decimal<'a> {
    bytes: &'a [u8],
    precision: u8,
    scale: u8,
}

/// Returns precision and scale of a declared DECIMAL.
pub(super) fn declared(parsed: &Parsed<'_>) -> Result<(u8, u8)> {
    let precision = match parsed.small(0, DIGITS_DEFAULT.into(), 65)? {
        0 => DIGITS_DEFAULT,
        digits => digits,
    };
    let scale = parsed.small(1, 0, 38)?;
    match scale <= precision {
        true => Ok((precision, scale)),
        false => Err(parsed.invalid("more digits behind the point than in all")),
    }
}

pub(super) fn arrow_type(precision: u8, scale: u8) -> DataType {
    match i8::try_from(scale) {
        Ok(scale) if precision <= ARROW_DIGITS_MAX => DataType::Decimal128(precision, scale),
        _ => DataType::Utf8,
    }
}

#[inline(always)]
fn group_bytes(digits: u8) -> usize {
    GROUP_BYTES.get(usize::from(digits)).copied().unwrap_or(0).into()
}

#[inline(always)]
fn power(digits: u8) -> u32 {
    POWERS.get(usize::from(digits)).copied().unwrap_or(1)
}

/// The size in bytes of the digits before or after the point, by their number.
static HALF_BYTES: [u8; 256] = {
    let mut sizes = [0; 256];
    let mut digits = 0;
    while digits < sizes.len() {
        let partial = GROUP_BYTES[digits % GROUP_DIGITS as usize];
        sizes[digits] = (digits / GROUP_DIGITS as usize * 4 + partial as usize) as u8;
        digits += 1;
    }
    sizes
};

/// Returns the width of a value in bytes.
#[inline(always)]
pub(super) fn width(precision: u8, scale: u8) -> usize {
    let half = |digits: u8| usize::from(HALF_BYTES[usize::from(digits)]);
    half(precision.saturating_sub(scale)) + half(scale)
}

/// Whether the server can compute a number with this many digits. JSON documents may contain computed numbers.
pub(super) fn fits_words(precision: u8, scale: u8) -> bool {
    let groups = |digits: u8| digits.div_ceil(GROUP_DIGITS);
    precision > 0 && scale <= precision && groups(precision - scale) + groups(scale) <= GROUPS_MAX
}

#[inline(always)]
pub(super) fn read<'a>(precision: u8, scale: u8, cursor: &mut Cursor<'a>) -> Result<Decimal<'a>> {
    Ok(Decimal { bytes: cursor.take(width(precision, scale))?, precision, scale })
}

/// Iterates over the groups of a value from the left.
struct Groups<'a> {
    cursor: Cursor<'a>,
    /// Masks that undo the inversion of the first bit and, if the number is negative, of all bits.
    first: u8,
    mask: u32,
}

impl<'a> Groups<'a> {
    #[inline(always)]
    fn new(bytes: &'a [u8]) -> Groups<'a> {
        let negative = bytes.first().is_some_and(|byte| byte & 0x80 == 0);
        Groups { cursor: Cursor::new(bytes), first: 0x80, mask: if negative { u32::MAX } else { 0 } }
    }

    #[inline(always)]
    fn negative(&self) -> bool {
        self.mask != 0
    }

    /// Reads the next group, of `digits` digits (1 to 9).
    #[inline(always)]
    fn next(&mut self, digits: u8) -> Result<u32> {
        let first = u32::from(std::mem::take(&mut self.first));
        let group = match group_bytes(digits) {
            1 => (u32::from(self.cursor.u8()?) ^ first ^ self.mask) & 0xff,
            2 => (u32::from(self.cursor.u16_be()?) ^ first << 8 ^ self.mask) & 0xffff,
            3 => (self.cursor.u24_be()? ^ first << 16 ^ self.mask) & 0xff_ffff,
            _ => self.cursor.u32_be()? ^ first << 24 ^ self.mask,
        };
        if group < power(digits) {
            Ok(group)
        } else {
            Err(value_malformed(format!("a DECIMAL group of {digits} digits holds {group}")))
        }
    }
}

impl Decimal<'_> {
    /// Returns four sizes: the digits of the partial group and the number of full groups before the point, and the
    /// number of full groups and the digits of the partial group after it.
    #[inline(always)]
    fn layout(&self) -> [u8; 4] {
        let whole = self.precision.saturating_sub(self.scale);
        [whole % GROUP_DIGITS, whole / GROUP_DIGITS, self.scale / GROUP_DIGITS, self.scale % GROUP_DIGITS]
    }

    /// Calls `write` with the unscaled number in two's complement, big-endian, with as few bytes as possible.
    #[inline]
    pub(crate) fn with_unscaled_bytes(&self, write: impl FnOnce(&[u8])) -> Result<()> {
        if self.precision <= ARROW_DIGITS_MAX {
            let value = self.unscaled()?;
            let bytes = value.to_be_bytes();
            // Bits equal to the sign are redundant, except for one.
            let redundant = usize::try_from((value ^ (value >> 127)).leading_zeros().saturating_sub(1) / 8);
            write(bytes.get(redundant.unwrap_or(0)..).unwrap_or(&bytes));
        } else {
            let wide = self.unscaled_wide()?;
            write(wide.get(redundant_bytes(&wide)..).unwrap_or(&wide));
        }
        Ok(())
    }

    /// Returns the unscaled number. It may have 65 digits, the server's maximum, and thus more than 128 bits.
    #[cold]
    fn unscaled_wide(&self) -> Result<[u8; WIDE_BYTES]> {
        let [head, before, after, tail] = self.layout();
        let mut groups = Groups::new(self.bytes);
        let mut limbs = [0u32; WIDE_BYTES / 4];
        let whole = (0..before + after).map(|_| GROUP_DIGITS);
        for digits in [head].into_iter().chain(whole).chain([tail]).filter(|digits| *digits > 0) {
            let mut carry = u64::from(groups.next(digits)?);
            for limb in limbs.iter_mut().rev() {
                carry += u64::from(*limb) * u64::from(power(digits));
                *limb = (carry & 0xffff_ffff) as u32;
                carry >>= 32;
            }
        }
        if groups.negative() {
            let mut carry = true;
            for limb in limbs.iter_mut().rev() {
                (*limb, carry) = (!*limb).overflowing_add(u32::from(carry));
            }
        }
        let mut bytes = [0; WIDE_BYTES];
        for (bytes, limb) in bytes.chunks_exact_mut(4).zip(limbs) {
            bytes.copy_from_slice(&limb.to_be_bytes());
        }
        Ok(bytes)
    }

    /// Returns the unscaled number. The caller guarantees at most 38 digits.
    #[inline(always)]
    fn unscaled(&self) -> Result<i128> {
        let [head, before, after, tail] = self.layout();
        let mut groups = Groups::new(self.bytes);
        let negative = groups.negative();
        let mut low: u64 = 0;
        if head > 0 {
            low = groups.next(head)?.into();
        }
        let magnitude = if self.precision <= 18 {
            for _ in 0..before + after {
                low = low * 1_000_000_000 + u64::from(groups.next(GROUP_DIGITS)?);
            }
            if tail > 0 {
                low = low * u64::from(power(tail)) + u64::from(groups.next(tail)?);
            }
            i128::from(low)
        } else {
            let mut wide = i128::from(low);
            for _ in 0..before + after {
                wide = wide * 1_000_000_000 + i128::from(groups.next(GROUP_DIGITS)?);
            }
            if tail > 0 {
                wide = wide * i128::from(power(tail)) + i128::from(groups.next(tail)?);
            }
            wide
        };
        Ok(if negative { -magnitude } else { magnitude })
    }
}

impl Decimal<'_> {
    /// Returns the value as an unsigned 64-bit integer if its type is DECIMAL(20,0) and it fits; otherwise None.
    pub(crate) fn as_u64_of_20_digits(&self) -> Option<u64> {
        if (self.precision, self.scale) != (20, 0) {
            return None;
        }
        self.unscaled().ok().and_then(|value| u64::try_from(value).ok())
    }
}

#[inline]
pub(super) fn append(value: &Decimal<'_>, store: &mut Store) -> Appended {
    match store {
        Store::Decimal128 { values, precision, scale }
            if *precision == value.precision
                && u8::try_from(*scale) == Ok(value.scale)
                && *precision <= ARROW_DIGITS_MAX =>
        {
            values.push(value.unscaled()?);
            Ok(None)
        }
        Store::Utf8(runs) => {
            if let Err(error) = write_text(value, &mut runs.items) {
                runs.take_back();
                return Err(error);
            }
            runs.close()?;
            Ok(None)
        }
        _ => Err(Error::new(ErrorKind::SchemaMismatch, "a DECIMAL of another precision than its Arrow column")),
    }
}

/// Writes the number in the JSON format of Kafka Connect's Decimal: the bytes of the unscaled number in base64. The
/// scale is in the message's schema.
pub(crate) fn write_debezium(value: &Decimal<'_>, out: &mut Vec<u8>) -> Result<()> {
    value.with_unscaled_bytes(|bytes| base64::write_quoted(bytes, out))
}

/// Returns how many leading bytes only repeat the sign of the next byte.
fn redundant_bytes(number: &[u8]) -> usize {
    let redundant = number.windows(2).take_while(|pair| match pair {
        [first, second] => *first == if second & 0x80 == 0 { 0 } else { 0xff },
        _ => false,
    });
    redundant.count()
}

/// Writes an unsigned integer in Kafka Connect's Decimal format with scale 0.
pub(crate) fn write_unsigned_debezium(value: u64, out: &mut Vec<u8>) {
    with_unsigned_bytes(value, |bytes| base64::write_quoted(bytes, out));
}

/// Calls `write` with an unsigned integer in two's complement, big-endian, with as few bytes as possible.
pub(crate) fn with_unsigned_bytes(value: u64, write: impl FnOnce(&[u8])) {
    let wide = u128::from(value).to_be_bytes();
    // The highest bit of the first byte is the sign.
    let kept = (128 - value.leading_zeros().saturating_add(64)) / 8 + 1;
    let first = wide.len().saturating_sub(usize::try_from(kept).unwrap_or(wide.len()));
    write(wide.get(first..).unwrap_or(&wide));
}

/// Returns the nearest double.
pub(crate) fn to_double(value: &Decimal<'_>) -> Result<f64> {
    let mut text = Vec::new();
    write_text(value, &mut text)?;
    let number = std::str::from_utf8(&text).ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| Error::new(ErrorKind::ValueMalformed, "a DECIMAL without digits"))
}

/// Appends a number as a server sends it: an optional sign, digits, and exactly `scale` digits after a point.
#[inline]
pub(super) fn append_sent(sent: &[u8], precision: u8, scale: u8, store: &mut Store) -> Appended {
    let (negative, number) = match sent.split_first() {
        Some((b'-', rest)) => (true, rest),
        _ => (false, sent),
    };
    let (whole, part) = match number.split_at_checked(number.len().wrapping_sub(usize::from(scale) + 1)) {
        Some((whole, [b'.', part @ ..])) if scale > 0 => (whole, part),
        _ if scale == 0 => (number, &[][..]),
        _ => return Err(not_a_decimal(sent, precision, scale)),
    };
    let zeros = whole.iter().take_while(|byte| **byte == b'0').count();
    let digits = whole.get(zeros..).unwrap_or_default();
    let is_number = whole.iter().chain(part).all(u8::is_ascii_digit);
    if !is_number || whole.is_empty() || digits.len() > usize::from(precision.saturating_sub(scale)) {
        return Err(not_a_decimal(sent, precision, scale));
    }
    match store {
        Store::Decimal128 { values, .. } if precision <= ARROW_DIGITS_MAX => {
            let magnitude = unscaled_of(digits, part);
            values.push(if negative { -magnitude } else { magnitude });
            Ok(None)
        }
        Store::Utf8(runs) => {
            if negative {
                runs.items.push(b'-');
            }
            runs.items.extend_from_slice(if digits.is_empty() { b"0" } else { digits });
            if scale > 0 {
                runs.items.push(b'.');
                runs.items.extend_from_slice(part);
            }
            runs.close()?;
            Ok(None)
        }
        _ => Err(Error::new(ErrorKind::SchemaMismatch, "a DECIMAL of another precision than its Arrow column")),
    }
}

/// Returns a number of at most 38 digits; up to 18 digits need no 128-bit arithmetic.
#[inline(always)]
fn unscaled_of(whole: &[u8], part: &[u8]) -> i128 {
    let digit = |byte: &u8| u64::from(byte.wrapping_sub(b'0'));
    let digits = whole.iter().chain(part);
    if whole.len() + part.len() <= 18 {
        return i128::from(digits.fold(0u64, |value, byte| value * 10 + digit(byte)));
    }
    digits.fold(0i128, |value, byte| value * 10 + i128::from(digit(byte)))
}

#[cold]
fn not_a_decimal(sent: &[u8], precision: u8, scale: u8) -> Error {
    let shown = String::from_utf8_lossy(sent.get(..80).unwrap_or(sent));
    value_malformed(format!("{shown:?} is no value of decimal({precision},{scale})"))
}

pub(crate) fn write_text(value: &Decimal<'_>, out: &mut Vec<u8>) -> Result<()> {
    let [head, before, after, tail] = value.layout();
    let mut groups = Groups::new(value.bytes);
    if groups.negative() {
        out.push(b'-');
    }
    let start = out.len();
    let first = (head > 0).then_some(head);
    for digits in first.into_iter().chain((0..before).map(|_| GROUP_DIGITS)) {
        let group = groups.next(digits)?;
        match (out.len() == start, group) {
            (true, 0) => {}
            (true, _) => write_digits(group.into(), 1, out),
            (false, _) => write_digits(group.into(), usize::from(digits), out),
        }
    }
    if out.len() == start {
        out.push(b'0');
    }
    if value.scale > 0 {
        out.push(b'.');
    }
    let last = (tail > 0).then_some(tail);
    for digits in (0..after).map(|_| GROUP_DIGITS).chain(last) {
        let group = groups.next(digits)?;
        write_digits(group.into(), usize::from(digits), out);
    }
    Ok(())
}

impl<'a> Decimal<'a> {
    /// Takes the next value, packed as in a row image of a DECIMAL(`precision`,`scale`).
    ///
    /// Raises `ValueMalformed` for a precision or scale that no server allows.
    pub fn take(precision: u8, scale: u8, cursor: &mut Cursor<'a>) -> Result<Decimal<'a>> {
        if !fits_words(precision, scale) {
            return Err(value_malformed(format!("a DECIMAL({precision},{scale})")));
        }
        read(precision, scale, cursor)
    }

    /// Appends the number in the format of a row image of a DECIMAL(`precision`,`scale`). Raises `ValueMalformed` if
    /// that type has too few digits for the number.
    #[inline]
    pub fn repack(&self, precision: u8, scale: u8, out: &mut Vec<u8>) -> Result<()> {
        if (self.precision, self.scale) == (precision, scale) {
            out.extend_from_slice(self.bytes);
            return Ok(());
        }
        let mut text = Vec::new();
        write_text(self, &mut text)?;
        pack_text(&String::from_utf8_lossy(&text), precision, scale, out)
    }
}

/// Returns the value of bytes packed as in a row image.
#[inline]
pub(super) fn of_packed(bytes: &[u8], precision: u8, scale: u8) -> Decimal<'_> {
    Decimal { bytes, precision, scale }
}

/// Packs an unscaled number as in a row image. Raises `ValueMalformed` if it has too many digits.
pub(super) fn pack_number(value: i128, precision: u8, scale: u8, out: &mut Vec<u8>) -> Result<()> {
    let mut digits = [b'0'; DIGITS_MAX];
    let mut rest = value.unsigned_abs();
    for digit in digits.iter_mut().rev() {
        if rest == 0 {
            break;
        }
        *digit = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
    }
    let (beyond, digits) =
        digits.split_at_checked(DIGITS_MAX - usize::from(precision).min(DIGITS_MAX)).unwrap_or_default();
    if beyond.iter().any(|digit| *digit != b'0') {
        return Err(value_malformed(format!("{value} without its point in a DECIMAL({precision},{scale})")));
    }
    pack(value < 0, digits, scale, out);
    Ok(())
}

/// Packs a number given as text. Raises `ValueMalformed` if the text is not a number or has too many digits.
pub(crate) fn pack_text(text: &str, precision: u8, scale: u8, out: &mut Vec<u8>) -> Result<()> {
    let wrong = || value_malformed(format!("`{text}` in a DECIMAL({precision},{scale})"));
    let (negative, number) = match text.strip_prefix('-') {
        Some(number) => (true, number),
        None => (false, text),
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let whole = whole.trim_start_matches('0');
    let digit_counts = (usize::from(precision.saturating_sub(scale)), usize::from(scale));
    let is_number = whole.bytes().chain(part.bytes()).all(|byte| byte.is_ascii_digit());
    if !is_number || number.is_empty() || whole.len() > digit_counts.0 || part.len() > digit_counts.1 {
        return Err(wrong());
    }
    let zeros = |count: usize| std::iter::repeat_n(b'0', count);
    let before = zeros(digit_counts.0 - whole.len()).chain(whole.bytes());
    let digits: Vec<u8> = before.chain(part.bytes()).chain(zeros(digit_counts.1 - part.len())).collect();
    pack(negative, &digits, scale, out);
    Ok(())
}

/// Writes the number padded to all digits of its precision.
fn pack(negative: bool, digits: &[u8], scale: u8, out: &mut Vec<u8>) {
    let start = out.len();
    let (whole, part) = digits.split_at_checked(digits.len().saturating_sub(scale.into())).unwrap_or((digits, &[]));
    let (head, whole) = whole.split_at_checked(whole.len() % usize::from(GROUP_DIGITS)).unwrap_or((whole, &[]));
    let group = usize::from(GROUP_DIGITS);
    for digits in std::iter::once(head).chain(whole.chunks(group)).chain(part.chunks(group)) {
        let value = digits.iter().fold(0u32, |value, digit| value * 10 + u32::from(digit - b'0'));
        let width = group_bytes(u8::try_from(digits.len()).unwrap_or(GROUP_DIGITS));
        let bytes = value.to_be_bytes();
        out.extend_from_slice(bytes.get(bytes.len() - width..).unwrap_or_default());
    }
    let written = out.get_mut(start..).unwrap_or_default();
    if let Some(first) = written.first_mut() {
        *first ^= 0x80;
    }
    if negative {
        written.iter_mut().for_each(|byte| *byte = !*byte);
    }
}

/// Returns the type in SQL.
pub(super) fn type_text(precision: u8, scale: u8) -> String {
    format!("decimal({precision},{scale})")
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;
    use arrow_array::types::Decimal128Type;

    use super::*;
    use crate::column::{ColumnBuilder, Kind};

    fn text(precision: u8, scale: u8, bytes: &[u8]) -> String {
        let mut out = Vec::new();
        write_text(&read(precision, scale, &mut Cursor::new(bytes)).unwrap(), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_example_in_the_server_source_is_decoded() {
        // The example in decimal2bin: 1234567890.1234 as DECIMAL(14,4).
        let positive = [0x81, 0x0d, 0xfb, 0x38, 0xd2, 0x04, 0xd2];
        let negative = positive.map(|byte: u8| !byte);
        assert_eq!(text(14, 4, &positive), "1234567890.1234");
        assert_eq!(text(14, 4, &negative), "-1234567890.1234");
        let kind = Kind::Decimal { precision: 14, scale: 4 };
        let mut builder = ColumnBuilder::new(&kind);
        for bytes in [positive, negative] {
            builder.append_from(&kind, &mut Cursor::new(&bytes)).unwrap();
        }
        let array = builder.finish();
        let values = array.as_primitive::<Decimal128Type>().values();
        assert_eq!(values.as_ref(), [12_345_678_901_234, -12_345_678_901_234]);
    }

    #[test]
    fn zeros_before_the_point_show_once() {
        assert_eq!(text(5, 2, &[0x80, 0x00, 0x07]), "0.07");
        assert_eq!(text(3, 0, &[0x80, 0x00]), "0");
        assert_eq!(text(2, 2, &[0x80 | 5]), "0.05");
    }

    #[test]
    fn more_than_38_digits_become_text() {
        let kind = Kind::Decimal { precision: 39, scale: 0 };
        let mut bytes = vec![0x83, 0xe7];
        bytes.extend([0x3b, 0x9a, 0xc9, 0xff].repeat(4));
        let mut builder = ColumnBuilder::new(&kind);
        builder.append_from(&kind, &mut Cursor::new(&bytes)).unwrap();
        assert_eq!(builder.finish().as_string::<i32>().value(0), "9".repeat(39));
    }

    #[test]
    fn groups_with_too_many_digits_are_malformed_and_append_nothing() {
        for (precision, bytes) in [(2, vec![0x80 | 100]), (39, vec![0xff; 18])] {
            let kind = Kind::Decimal { precision, scale: 0 };
            let mut builder = ColumnBuilder::new(&kind);
            let error = builder.append_from(&kind, &mut Cursor::new(&bytes)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ValueMalformed);
            assert_eq!(builder.len(), 0);
            builder.append_null();
            assert_eq!(builder.finish().null_count(), 1);
        }
    }

    #[test]
    fn widths_follow_the_groups() {
        assert_eq!(width(65, 30), 4 * 3 + 4 + 4 * 3 + 2);
        assert_eq!(width(9, 9), 4);
        assert_eq!(width(10, 2), 5);
    }

    #[test]
    fn packed_numbers_round_trip() {
        let cases =
            [(14, 4, "1234567890.1234"), (14, 4, "-1234567890.1234"), (5, 2, "0.07"), (2, 2, "-0.05"), (9, 0, "7")];
        let wide = ["9".repeat(35), "8".repeat(30)].join(".");
        for (precision, scale, number) in cases.into_iter().chain([(65, 30, wide.as_str())]) {
            let mut bytes = Vec::new();
            pack_text(number, precision, scale, &mut bytes).unwrap();
            assert_eq!(text(precision, scale, &bytes), number);
            if let Ok(unscaled) = number.replace('.', "").parse() {
                let mut same = Vec::new();
                pack_number(unscaled, precision, scale, &mut same).unwrap();
                assert_eq!(same, bytes);
            }
        }
        for (precision, scale, number) in [(2, 0, "100"), (2, 1, "1.25"), (2, 1, "x"), (2, 1, "")] {
            assert!(pack_text(number, precision, scale, &mut Vec::new()).is_err(), "{number}");
        }
        assert!(pack_number(100, 2, 1, &mut Vec::new()).is_err());
    }
}
