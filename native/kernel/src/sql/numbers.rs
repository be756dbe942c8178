//! Writes numbers in a form that both MySQL and PostgreSQL parse.

/// Writes a number with a decimal point before its last `scale` digits.
pub(super) fn decimal(value: i128, scale: usize, out: &mut Vec<u8>) {
    if value < 0 {
        out.push(b'-');
    }
    let digits = value.unsigned_abs().to_string();
    let (integer, fraction) = digits.split_at_checked(digits.len().saturating_sub(scale)).unwrap_or((&digits, ""));
    out.extend_from_slice(if integer.is_empty() { b"0" } else { integer.as_bytes() });
    if scale > 0 {
        out.push(b'.');
        out.resize(out.len() + (scale - fraction.len()), b'0');
        out.extend_from_slice(fraction.as_bytes());
    }
}

/// Writes the shortest digits that parse to the same FLOAT. Always writes an exponent, because MySQL reads a number
/// without an exponent as a DECIMAL.
pub(super) fn single(value: f32, out: &mut Vec<u8>) {
    if value.abs() >= f32::MAX {
        // The shortest digits of the maximum FLOAT denote a larger number, which a server in strict mode rejects.
        return double(value.into(), out);
    }
    with_exponent(ryu::Buffer::new().format_finite(value), out);
}

/// Writes a DOUBLE in the format that `single` uses for a FLOAT.
pub(super) fn double(value: f64, out: &mut Vec<u8>) {
    with_exponent(ryu::Buffer::new().format_finite(value), out);
}

fn with_exponent(digits: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(digits.as_bytes());
    if !digits.contains('e') {
        out.extend_from_slice(b"e0");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn decimals_keep_all_digits() {
        let cases = [(0, 0, "0"), (0, 2, "0.00"), (-5, 2, "-0.05"), (12345, 2, "123.45"), (-100, 0, "-100")];
        for (value, scale, expected) in cases {
            assert_eq!(text(|out| decimal(value, scale, out)), expected);
        }
        assert_eq!(text(|out| decimal(i128::from(u64::MAX), 0, out)), "18446744073709551615");
    }

    #[test]
    fn floats_always_have_an_exponent() {
        assert_eq!(text(|out| single(0.1, out)), "0.1e0");
        assert_eq!(text(|out| single(f32::MIN, out)), "-3.4028234663852886e38");
        assert_eq!(text(|out| double(-0.0, out)), "-0.0e0");
        assert_eq!(text(|out| double(1e300, out)), "1e300");
    }
}
