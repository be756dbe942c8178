//! Appends values given as text, in the form of row images.

use std::borrow::Cow;

use serde_json::Value as Json;

use super::json::{code, sized, write_document, Element};
use super::value::pack;
use crate::column::{decimal, value_of_text, Kind, Value};
use crate::error::{value_malformed, Error, Result};

/// Appends the value that a text represents.
///
/// Numbers, dates and times are as MySQL shows them, TIMESTAMP is in UTC, BIT is a number, an ENUM is a member, a SET
/// is a list of members separated by commas, and a document is JSON. Texts of other types are appended unchanged.
/// Raises `ValueMalformed` for a text that is not a value of the column, or that the column cannot store.
pub fn pack_text(kind: &Kind, text: &[u8], out: &mut Vec<u8>) -> Result<()> {
    match kind {
        Kind::Decimal { precision, scale } => decimal::pack_text(utf8(text)?, *precision, *scale, out),
        Kind::Enumeration { values, .. } => {
            let index = values.iter().position(|member| member.as_bytes() == text);
            let index = match (index, text) {
                (Some(index), _) => index + 1,
                (None, []) => 0,
                (None, _) => return Err(no_member(kind, text)),
            };
            pack(kind, &Value::Enumeration(index as u16), out)
        }
        Kind::Set { values, .. } => {
            let mut members = 0u64;
            for part in text.split(|byte| *byte == b',').filter(|part| !part.is_empty()) {
                let index = values.iter().position(|member| member.as_bytes() == part);
                members |= 1u64 << index.ok_or_else(|| no_member(kind, part))?;
            }
            pack(kind, &Value::Set(members), out)
        }
        Kind::Json { .. } => {
            let json: Json = serde_json::from_slice(text)
                .map_err(|error| value_malformed(format!("a text that is no JSON document: {error}")))?;
            let mut document = Vec::new();
            write_document(&element(&json), &mut document)?;
            pack(kind, &Value::Json(&document), out)
        }
        kind => pack(kind, &value_of_text(kind, text)?, out),
    }
}

/// Appends the value of an ENUM or a SET that is given as its number, and handles all other types like `pack_text`.
///
/// Raises `ValueMalformed` for a text that is not a value of the column, or that the column cannot store.
pub fn pack_number_or_text(kind: &Kind, text: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let number = || utf8(text)?.parse::<u64>().map_err(|_| no_member(kind, text));
    match kind {
        Kind::Enumeration { .. } => {
            let index = u16::try_from(number()?).map_err(|_| no_member(kind, text))?;
            pack(kind, &Value::Enumeration(index), out)
        }
        Kind::Set { .. } => pack(kind, &Value::Set(number()?), out),
        kind => pack_text(kind, text, out),
    }
}

fn utf8(text: &[u8]) -> Result<&str> {
    std::str::from_utf8(text).map_err(|_| value_malformed("a number that is no text"))
}

#[cold]
fn no_member(kind: &Kind, text: &[u8]) -> Error {
    let shown = String::from_utf8_lossy(text.get(..80).unwrap_or(text));
    value_malformed(format!("{shown:?} is no member of {}", kind.type_text()))
}

fn element(json: &Json) -> Element<'_> {
    let scalar = |code, bytes: [u8; 8]| Element::Scalar(code, Cow::Owned(bytes.to_vec()));
    match json {
        Json::Null => Element::Null,
        Json::Bool(value) => Element::Bool(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(value), ..) => scalar(code::INT64, value.to_le_bytes()),
            (None, Some(value), _) => scalar(code::UINT64, value.to_le_bytes()),
            (None, None, value) => scalar(code::DOUBLE, value.unwrap_or(f64::NAN).to_le_bytes()),
        },
        Json::String(text) => sized(code::STRING, &[], text.as_bytes()),
        Json::Array(values) => Element::Array(values.iter().map(element).collect()),
        Json::Object(members) => {
            let member = |(key, value)| {
                let key: &String = key;
                (Cow::Borrowed(key.as_bytes()), element(value))
            };
            Element::Object(members.iter().map(member).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::charset::Charset;
    use crate::cursor::Cursor;

    type Pack = fn(&Kind, &[u8], &mut Vec<u8>) -> Result<()>;

    fn shown(pack: Pack, type_text: &str, text: &str) -> Result<String> {
        let kind = Kind::declared(type_text, Some(Charset::Utf8mb4), false).unwrap();
        let (mut image, mut shown) = (Vec::new(), Vec::new());
        pack(&kind, text.as_bytes(), &mut image)?;
        kind.read(&mut Cursor::new(&image))?.write_text(&kind, &mut shown)?;
        Ok(String::from_utf8(shown).unwrap())
    }

    #[test]
    fn texts_survive_a_row_image() {
        for (type_text, text) in [
            ("bigint", "-9223372036854775808"),
            ("bigint unsigned", "18446744073709551615"),
            ("float", "1.5"),
            ("double", "-2.25e-100"),
            ("decimal(65,30)", "-12345678901234567890123456789012345.123456789012345678901234567890"),
            ("year", "2026"),
            ("date", "2024-02-29"),
            ("datetime(6)", "2026-11-22 11:15:00.123456"),
            ("timestamp(3)", "2026-11-22 11:15:00.123"),
            ("timestamp", "0000-00-00 00:00:00"),
            ("time(3)", "-838:59:58.120"),
            ("varchar(5)", "h\u{e9}llo"),
            ("varbinary(5)", "bytes"),
            ("enum('x','y')", "y"),
            ("enum('x','y')", ""),
            ("set('p','q','r')", "p,r"),
            ("set('p','q','r')", ""),
            ("json", r#"{"a": 18446744073709551615, "bb": [-1, 2.5, "x", null, true, {}]}"#),
        ] {
            assert_eq!(shown(pack_text, type_text, text).as_deref(), Ok(text), "{type_text}");
        }
        assert_eq!(shown(pack_text, "bit(10)", "321").unwrap(), "\u{1}A");
    }

    #[test]
    fn members_may_be_given_by_their_numbers() {
        for (type_text, text, expected) in
            [("enum('x','y')", "2", "y"), ("set('p','q','r')", "5", "p,r"), ("varchar(5)", "2", "2")]
        {
            assert_eq!(shown(pack_number_or_text, type_text, text).as_deref(), Ok(expected), "{type_text}");
        }
        for (type_text, text) in [("enum('x','y')", "3"), ("enum('x','y')", "x"), ("set('p')", "2"), ("set('p')", "-1")]
        {
            assert!(shown(pack_number_or_text, type_text, text).is_err(), "{type_text} {text}");
        }
    }

    #[test]
    fn texts_that_are_no_values_are_refused() {
        for (type_text, text) in [
            ("tinyint", "128"),
            ("int", "1.5"),
            ("decimal(3,1)", "100"),
            ("decimal(3,1)", "0.12"),
            ("date", "2024-13-01"),
            ("date", "2024-12-01 10:00:00"),
            ("datetime(3)", "2026-11-22 11:15:00.1234"),
            ("datetime(6)", "2026-11-22 11:15:00.1234567"),
            ("timestamp", "2026-11-22 11:15:00.5"),
            ("time(1)", "-838:59:58.12"),
            ("time(6)", "00:00:00.0000001"),
            ("timestamp", "1969-12-31 23:59:59"),
            ("varchar(1)", "12345"),
            ("enum('x')", "y"),
            ("set('p')", "p,q"),
            ("json", "{"),
        ] {
            assert!(shown(pack_text, type_text, text).is_err(), "{type_text} {text}");
        }
    }
}
