//! XA transaction ids, and the event that prepares an XA transaction (code 38).

use std::fmt;

use crate::cursor::Cursor;
use crate::error::{malformed, Result};

/// The server's limit for each of the two parts of an id: MAXGTRIDSIZE and MAXBQUALSIZE.
const PART_BYTES_MAX: usize = 64;

/// The id of an XA transaction.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct XaId {
    format: u32,
    global: Box<[u8]>,
    branch: Box<[u8]>,
}

impl XaId {
    /// Raises `EventMalformed` if a part is longer than servers allow.
    pub fn new(global: &[u8], branch: &[u8], format: u32) -> Result<XaId> {
        if global.len() > PART_BYTES_MAX || branch.len() > PART_BYTES_MAX {
            return Err(malformed(format!("an XA id of {} and {} bytes", global.len(), branch.len())));
        }
        Ok(XaId { format, global: global.into(), branch: branch.into() })
    }

    /// Parses the id in a logged statement such as `XA COMMIT X'67747269',X'62',1`.
    pub fn of_statement(statement: &[u8]) -> Result<XaId> {
        XaId::parse(text_in(statement).unwrap_or_default())
    }

    /// Parses the id from its `Display` text.
    pub fn of_text(text: &str) -> Result<XaId> {
        XaId::parse(text.as_bytes())
    }

    fn parse(text: &[u8]) -> Result<XaId> {
        let parsed = parse_hexadecimal(text).and_then(|(global, rest)| {
            let (branch, rest) = parse_hexadecimal(rest.strip_prefix(b",")?)?;
            let digits = rest.strip_prefix(b",")?.split(u8::is_ascii_whitespace).next()?;
            let number: i64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
            // MySQL writes the format unsigned, MariaDB signed.
            let format = if number < 0 { i32::try_from(number).ok()? as u32 } else { u32::try_from(number).ok()? };
            Some((global, branch, format))
        });
        match parsed {
            Some((global, branch, format)) => XaId::new(&global, &branch, format),
            None => Err(malformed("an XA statement without an id")),
        }
    }
}

impl fmt::Display for XaId {
    /// Writes the id in the syntax of XA statements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in [&self.global, &self.branch] {
            f.write_str("X'")?;
            part.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
            f.write_str("',")?;
        }
        write!(f, "{}", self.format)
    }
}

/// Returns the text of the id in a statement such as `XA END id` or `XA COMMIT id`.
pub fn text_in(statement: &[u8]) -> Option<&[u8]> {
    let mut words = statement.splitn(3, |byte| byte.is_ascii_whitespace());
    let (first, _, id) = (words.next()?, words.next()?, words.next()?);
    (first.eq_ignore_ascii_case(b"XA") && !id.is_empty()).then_some(id.trim_ascii())
}

/// Parses `X'6162'` at the start of `text`; returns the bytes and the rest of the text.
fn parse_hexadecimal(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let inside = text.strip_prefix(b"X'").or_else(|| text.strip_prefix(b"x'"))?;
    let end = inside.iter().take(2 * PART_BYTES_MAX + 1).position(|byte| *byte == b'\'')?;
    let (digits, rest) = inside.split_at_checked(end)?;
    let bytes = digits
        .chunks(2)
        .map(|pair| match pair {
            [high, low] => Some((hex_digit(*high)? << 4) | hex_digit(*low)?),
            _ => None,
        })
        .collect::<Option<Vec<u8>>>()?;
    Some((bytes, rest.strip_prefix(b"'")?))
}

fn hex_digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

/// Reads the body, without checksum, of an event that ends the first phase (`XA_prepare_log_event`).
///
/// Layout: one phase u8 (1 if the transaction commits immediately), format i32, two lengths u32, the two parts of the
/// id.
pub fn read_prepare(body: &[u8]) -> Result<(bool, XaId)> {
    let mut cursor = Cursor::new(body);
    let one_phase = cursor.u8()? != 0;
    let format = cursor.u32()?;
    let (global, branch) = (cursor.u32()? as usize, cursor.u32()? as usize);
    Ok((one_phase, XaId::new(cursor.take(global)?, cursor.take(branch)?, format)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_the_same_from_statements_and_events() {
        let body = b"\x00\xff\xff\xff\xff\x03\x00\x00\x00\x01\x00\x00\x00\x00\xff'\n";
        let (one_phase, id) = read_prepare(body).unwrap();
        assert!(!one_phase);
        assert_eq!(id.to_string(), "X'00ff27',X'0a',4294967295");
        for statement in ["XA COMMIT X'00ff27',X'0a',4294967295", "XA END X'00FF27',X'0a',-1 ONE PHASE"] {
            assert_eq!(XaId::of_statement(statement.as_bytes()).unwrap(), id, "{statement}");
        }
    }

    #[test]
    fn malformed_ids_are_rejected() {
        let long = format!("XA END X'{}',X'',1", "00".repeat(65));
        for statement in ["XA END", "XA END 'a'", "XA END X'0',X'',1", "XA END X'+1',X'',1", "XA END X'',X''", &long] {
            assert!(XaId::of_statement(statement.as_bytes()).is_err(), "{statement}");
        }
        assert!(read_prepare(&[0, 1, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0]).is_err());
    }
}
