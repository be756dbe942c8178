//! FLOAT and DOUBLE: IEEE 754, little-endian, written as text in the same way as by the server's `my_gcvt`.

use super::integer::{write_digits, write_signed};
use super::parsed::Parsed;
use crate::cursor::Cursor;
use crate::error::Result;

/// The server switches to exponent notation if the number has more digits than this before the point, or more zeros
/// than this after it (`DBL_DIG`).
const PLAIN_DIGITS_MAX: i32 = 15;

/// Number of significant digits that the server shows of a FLOAT (`FLT_DIG`).
const SINGLE_DIGITS: usize = 6;

/// Whether a declared FLOAT is a DOUBLE: FLOAT(p) is a DOUBLE if p is above 24, and FLOAT(m,d) never is.
pub(super) fn declared_double(parsed: &Parsed<'_>) -> bool {
    matches!(parsed.numbers(), [bits] if *bits > 24)
}

#[inline(always)]
pub(super) fn read_single(cursor: &mut Cursor<'_>) -> Result<f32> {
    cursor.u32().map(f32::from_bits)
}

#[inline(always)]
pub(super) fn read_double(cursor: &mut Cursor<'_>) -> Result<f64> {
    cursor.u64().map(f64::from_bits)
}

/// The shortest form of a DOUBLE has at most 17 digits. The formatter may add zeros before or after the digits.
const DIGITS_MAX: usize = 24;

/// The significant digits `d1 d2 d3 ...` of the number `0.d1d2d3... * 10^point`. They are kept on the stack, because
/// JSON documents have many numbers.
struct Digits {
    negative: bool,
    digits: [u8; DIGITS_MAX],
    count: usize,
    point: i32,
}

impl Digits {
    /// Parses a number in Rust's formats, such as `-1.25e-7`, `0.001` or `120.0`.
    fn parse(text: &str) -> Digits {
        let mut parsed = Digits { negative: false, digits: [0; DIGITS_MAX], count: 0, point: 0 };
        let mut rest = text.as_bytes();
        if let Some((b'-', after)) = rest.split_first() {
            parsed.negative = true;
            rest = after;
        }
        let mut before_point = true;
        while let Some((byte, after)) = rest.split_first() {
            rest = after;
            match byte {
                b'.' => before_point = false,
                b'e' => break,
                digit => parsed.push(*digit, before_point),
            }
        }
        let exponent = std::str::from_utf8(rest).ok().and_then(|digits| digits.parse().ok()).unwrap_or(0i32);
        parsed.point = parsed.point.saturating_add(exponent);
        while parsed.digits().last() == Some(&b'0') {
            parsed.count -= 1;
        }
        parsed
    }

    /// Adds a digit. Leading zeros are not significant; they only move the point.
    #[inline]
    fn push(&mut self, digit: u8, before_point: bool) {
        if self.count == 0 && digit == b'0' {
            self.point -= i32::from(!before_point);
            return;
        }
        if let Some(digit_slot) = self.digits.get_mut(self.count) {
            *digit_slot = digit;
            self.count += 1;
        }
        self.point += i32::from(before_point);
    }

    fn digits(&self) -> &[u8] {
        self.digits.get(..self.count).unwrap_or_default()
    }

    fn write(&self, out: &mut Vec<u8>) {
        if self.negative {
            out.push(b'-');
        }
        let digits = self.digits();
        let (head, tail) = match digits.split_first() {
            Some(parts) => parts,
            None => return out.push(b'0'),
        };
        let whole = usize::try_from(self.point).unwrap_or(0);
        if (1 - PLAIN_DIGITS_MAX..=0).contains(&self.point) {
            out.extend_from_slice(b"0.");
            out.extend((self.point..0).map(|_| b'0'));
            out.extend_from_slice(digits);
        } else if (1..=PLAIN_DIGITS_MAX).contains(&self.point) || (1..digits.len()).contains(&whole) {
            let (before, after) = digits.split_at_checked(whole).unwrap_or((digits, &[]));
            out.extend_from_slice(before);
            out.extend((before.len()..whole).map(|_| b'0'));
            if !after.is_empty() {
                out.push(b'.');
                out.extend_from_slice(after);
            }
        } else {
            out.push(*head);
            if !tail.is_empty() {
                out.push(b'.');
                out.extend_from_slice(tail);
            }
            out.push(b'e');
            write_signed(i64::from(self.point) - 1, out);
        }
    }
}

impl Digits {
    /// Java writes numbers from 0.001 to below 10^7 without an exponent, and all other numbers with one. There is
    /// always a digit on each side of the point.
    fn write_java(&self, out: &mut Vec<u8>) {
        if self.negative {
            out.push(b'-');
        }
        let digits = self.digits();
        let Some((head, tail)) = digits.split_first() else { return out.extend_from_slice(b"0.0") };
        let whole = usize::try_from(self.point).unwrap_or(0);
        if (-2..=0).contains(&self.point) {
            out.extend_from_slice(b"0.");
            out.extend((self.point..0).map(|_| b'0'));
            out.extend_from_slice(digits);
        } else if (1..=7).contains(&self.point) {
            let (before, after) = digits.split_at_checked(whole).unwrap_or((digits, &[]));
            out.extend_from_slice(before);
            out.extend((before.len()..whole).map(|_| b'0'));
            out.push(b'.');
            out.extend_from_slice(if after.is_empty() { b"0" } else { after });
        } else {
            out.extend_from_slice(&[*head, b'.']);
            out.extend_from_slice(if tail.is_empty() { b"0" } else { tail });
            out.push(b'E');
            write_signed(i64::from(self.point) - 1, out);
        }
    }
}

/// Writes a FLOAT with at most six significant digits, as the server's client shows it.
pub(crate) fn write_single(value: f32, out: &mut Vec<u8>) {
    let value = f64::from(value);
    if !value.is_finite() {
        return write_unbounded(value, out);
    }
    // The server converts the value to a DOUBLE and rounds it to six significant digits.
    let rounded = format!("{value:.*e}", SINGLE_DIGITS - 1);
    Digits::parse(&rounded).write(out);
}

/// The first integer of sixteen digits.
const WHOLE_END: f64 = 1e15;

/// Returns the value if it is an integer of at most fifteen digits, except negative zero.
#[inline]
pub(super) fn whole(value: f64) -> Option<i64> {
    // The cast saturates. If it changes the value, the value is not an integer in range.
    let integer = value as i64;
    let is_whole = value.abs() < WHOLE_END && integer as f64 == value && !(integer == 0 && value.is_sign_negative());
    is_whole.then_some(integer)
}

/// Writes a DOUBLE with the shortest digits that parse to the same value.
pub(crate) fn write_double(value: f64, out: &mut Vec<u8>) {
    if let Some(integer) = whole(value) {
        return write_signed(integer, out);
    }
    if write_fraction(value, out) {
        return;
    }
    if !value.is_finite() {
        return write_unbounded(value, out);
    }
    Digits::parse(ryu::Buffer::new().format_finite(value)).write(out);
}

/// Writes a DOUBLE that `whole` does not return, if the server writes it without an exponent. Returns whether it was
/// written. The text always has a point.
#[inline]
pub(super) fn write_fraction(value: f64, out: &mut Vec<u8>) -> bool {
    if let Some(units) = decimal(value) {
        write_decimal(units, out);
        return true;
    }
    // In this range, the formatter writes the same text as the server. All values have a fraction.
    let is_plain = (1e-4..WHOLE_END).contains(&value.abs());
    if is_plain {
        out.extend_from_slice(zmij::Buffer::new().format_finite(value).as_bytes());
    }
    is_plain
}

/// This path is faster than the general one for values with few fractional digits, such as prices.
const DECIMALS: u32 = 4;
const DECIMAL_UNITS: f64 = 10_000.0;

/// Returns the value in units of 0.0001, if it is a whole number of these units.
///
/// The number has at most fifteen digits and is at least 0.001, so that both paths write plain notation. Division
/// rounds like parsing does, so an equal quotient means that parsing these digits yields the value. Two different
/// numbers of at most fifteen digits never parse to the same value, so there is no shorter form either.
#[inline]
fn decimal(value: f64) -> Option<i64> {
    // Adding and subtracting this number rounds numbers of up to 2^51 to integers, without a call.
    const ROUNDING: f64 = 6_755_399_441_055_744.0;
    let scaled = value * DECIMAL_UNITS + ROUNDING - ROUNDING;
    let is_decimal = (10.0..WHOLE_END).contains(&scaled.abs()) && scaled / DECIMAL_UNITS == value;
    is_decimal.then_some(scaled as i64)
}

/// Writes a number given in units of the fourth fractional digit. The number must have a fraction.
fn write_decimal(units: i64, out: &mut Vec<u8>) {
    if units < 0 {
        out.push(b'-');
    }
    let units = units.unsigned_abs();
    let (mut after, mut digits) = (units % 10_000, DECIMALS as usize);
    while after % 10 == 0 && digits > 1 {
        after /= 10;
        digits -= 1;
    }
    write_digits(units / 10_000, 1, out);
    out.push(b'.');
    write_digits(after, digits, out);
}

/// Writes a FLOAT like Java's `Float.toString`.
pub(crate) fn write_java_single(value: f32, out: &mut Vec<u8>) {
    if !value.is_finite() {
        return write_java_unbounded(value.into(), out);
    }
    match whole(value.into()).filter(|integer| integer.unsigned_abs() < JAVA_PLAIN_END) {
        Some(integer) => write_java_whole(integer, out),
        None => Digits::parse(ryu::Buffer::new().format_finite(value)).write_java(out),
    }
}

/// Writes a DOUBLE like Java's `Double.toString`.
pub(crate) fn write_java_double(value: f64, out: &mut Vec<u8>) {
    if !value.is_finite() {
        return write_java_unbounded(value, out);
    }
    match whole(value).filter(|integer| integer.unsigned_abs() < JAVA_PLAIN_END) {
        Some(integer) => write_java_whole(integer, out),
        None => Digits::parse(ryu::Buffer::new().format_finite(value)).write_java(out),
    }
}

/// From this value on, Java writes an exponent.
const JAVA_PLAIN_END: u64 = 10_000_000;

fn write_java_whole(integer: i64, out: &mut Vec<u8>) {
    write_signed(integer, out);
    out.extend_from_slice(b".0");
}

fn write_java_unbounded(value: f64, out: &mut Vec<u8>) {
    out.extend_from_slice(match value {
        _ if value.is_nan() => b"NaN".as_slice(),
        _ if value < 0.0 => b"-Infinity",
        _ => b"Infinity",
    });
}

/// SQL has no infinities or NaN, so servers never write these values; they are written by name anyway.
fn write_unbounded(value: f64, out: &mut Vec<u8>) {
    out.extend_from_slice(match value {
        _ if value.is_nan() => b"nan".as_slice(),
        _ if value < 0.0 => b"-inf",
        _ => b"inf",
    });
}

/// Writes a DOUBLE as a JSON number with a point or an exponent, so that no reader takes it for an integer. Infinities
/// and NaN become strings.
pub(crate) fn write_json(value: f64, out: &mut Vec<u8>) {
    if value.is_finite() {
        out.extend_from_slice(ryu::Buffer::new().format_finite(value).as_bytes());
    } else {
        write_json_unbounded(value, out);
    }
}

/// Writes a FLOAT in the same way as `write_double_json` writes a DOUBLE. The shortest digits that parse to the same
/// value may be more digits than the server's client shows.
pub(crate) fn write_json_single(value: f32, out: &mut Vec<u8>) {
    if value.is_finite() {
        out.extend_from_slice(ryu::Buffer::new().format_finite(value).as_bytes());
    } else {
        write_json_unbounded(value.into(), out);
    }
}

#[cold]
fn write_json_unbounded(value: f64, out: &mut Vec<u8>) {
    let name: &[u8] = match (value.is_nan(), value < 0.0) {
        (true, _) => b"\"NaN\"",
        (false, true) => b"\"-Infinity\"",
        (false, false) => b"\"Infinity\"",
    };
    out.extend_from_slice(name);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single(value: f32) -> String {
        let mut out = Vec::new();
        write_single(value, &mut out);
        String::from_utf8(out).unwrap()
    }

    fn double(value: f64) -> String {
        let mut out = Vec::new();
        write_double(value, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_float_shows_six_digits() {
        let cases = [(0.1, "0.1"), (16_777_216.0, "16777200"), (1e20, "1e20"), (-1.17e-38, "-1.17e-38"), (0.0, "0")];
        for (value, text) in cases {
            assert_eq!(single(value), text);
        }
        assert_eq!(single(999_999.5), "1000000");
        assert_eq!(single(1_234_567.0), "1234570");
    }

    #[test]
    fn a_double_shows_the_shortest_digits_that_give_it_back() {
        let cases = [
            (0.1, "0.1"),
            (0.1 + 0.2, "0.30000000000000004"),
            (1e14, "100000000000000"),
            (1e15, "1e15"),
            (1e-15, "0.000000000000001"),
            (1e-16, "1e-16"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e308"),
            (123_456_789_123_456.77, "123456789123456.77"),
            (1.234_567_891_234_567e15, "1.234567891234567e15"),
            (-3_730_473_413_730_304.5, "-3730473413730304.5"),
            (-0.0, "-0"),
        ];
        for (value, text) in cases {
            assert_eq!(double(value), text);
        }
    }

    #[test]
    fn the_fast_path_for_few_decimals_equals_the_general_path() {
        let general = |value: f64| {
            let mut out = Vec::new();
            Digits::parse(ryu::Buffer::new().format_finite(value)).write(&mut out);
            String::from_utf8(out).unwrap()
        };
        let mut state = 1u64;
        for round in 0..200_000u32 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let units = (state >> 12) as i64 >> (round % 50);
            let value = if round % 2 == 0 { units as f64 } else { -(units as f64) } / 10f64.powi((round % 7) as i32);
            assert_eq!(double(value), general(value), "{value:e}");
            let near = f64::from_bits(value.to_bits() + 1);
            assert_eq!(double(near), general(near), "{near:e}");
        }
        assert_eq!([double(0.001), double(0.0009), double(99_999_999_999.99)], ["0.001", "0.0009", "99999999999.99"]);
    }

    #[test]
    fn fractions_equal_the_general_path_and_have_a_point() {
        let mut state = 1u64;
        let mut written = 0;
        for round in 0..200_000u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Exponents of about 1e-5 to 1e16.
            let value = f64::from_bits((1006 + round % 71) << 52 | state >> 12);
            let mut out = Vec::new();
            if whole(value).is_none() && write_fraction(value, &mut out) {
                let mut general = Vec::new();
                Digits::parse(ryu::Buffer::new().format_finite(value)).write(&mut general);
                assert_eq!(out, general, "{value:e}");
                assert!(out.contains(&b'.'));
                written += 1;
            }
        }
        assert!(written > 100_000, "{written}");
        assert!([1e-5, 1e15, -0.0, f64::NAN, f64::INFINITY]
            .iter()
            .all(|value| !write_fraction(*value, &mut Vec::new())));
    }

    #[test]
    fn java_always_writes_a_point_and_switches_early_to_exponents() {
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (1.1, "1.1"),
            (-1.5, "-1.5"),
            (9_999_999.0, "9999999.0"),
            (10_000_000.0, "1.0E7"),
            (12_345_678.9, "1.23456789E7"),
            (0.001, "0.001"),
            (0.01, "0.01"),
            (0.000_999, "9.99E-4"),
            (0.000_01, "1.0E-5"),
            (1e10, "1.0E10"),
            (f64::MAX, "1.7976931348623157E308"),
            (123.456, "123.456"),
        ];
        for (value, text) in cases {
            let mut out = Vec::new();
            write_java_double(value, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), text);
        }
        for (value, text) in [(1.1f32, "1.1"), (3.4e38, "3.4E38"), (16_777_216.0, "1.6777216E7"), (0.1, "0.1")] {
            let mut out = Vec::new();
            write_java_single(value, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), text);
        }
    }

    #[test]
    fn infinities_and_nan_have_a_name() {
        assert_eq!([double(f64::NAN), double(f64::INFINITY), single(f32::NEG_INFINITY)], ["nan", "inf", "-inf"]);
    }

    #[test]
    fn json_numbers_round_trip() {
        let shown = |value: f64| {
            let mut out = Vec::new();
            write_json(value, &mut out);
            String::from_utf8(out).unwrap()
        };
        assert_eq!([shown(1.0), shown(-0.0), shown(1e300), shown(0.1)], ["1.0", "-0.0", "1e300", "0.1"]);
        assert_eq!([shown(f64::NAN), shown(f64::NEG_INFINITY)], ["\"NaN\"", "\"-Infinity\""]);
        let mut out = Vec::new();
        write_json_single(16_777_216.0, &mut out);
        write_json_single(0.1, &mut out);
        assert_eq!(out, b"16777216.00.1");
    }
}
