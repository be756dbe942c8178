//! Writes the columns of Canal's rows. Parts that are the same in every row are precomputed.

use super::values;
use crate::column::{quoted, Form, Kind, Value};
use crate::emit::dialect::{protobuf as pb, MessageColumn};
use crate::error::Result;

/// `java.sql.Types`.
const BIT: i64 = -7;
const TINYINT: i64 = -6;
const BIGINT: i64 = -5;
const CHAR: i64 = 1;
const DECIMAL: i64 = 3;
const INTEGER: i64 = 4;
const SMALLINT: i64 = 5;
const REAL: i64 = 7;
const DOUBLE: i64 = 8;
const VARCHAR: i64 = 12;
const DATE: i64 = 91;
const TIME: i64 = 92;
const TIMESTAMP: i64 = 93;
const OTHER: i64 = 1111;
const BLOB: i64 = 2004;
const CLOB: i64 = 2005;

/// Returns Canal's type number for values of a kind, and the number for NULL.
pub(super) fn sql_types(kind: &Kind) -> (i64, i64) {
    let number = match kind {
        Kind::Integer { bytes: 1, .. } => TINYINT,
        Kind::Integer { bytes: 2, .. } => SMALLINT,
        Kind::Integer { bytes: 3 | 4, .. } => INTEGER,
        Kind::Integer { .. } => BIGINT,
        Kind::Float => REAL,
        Kind::Double => DOUBLE,
        Kind::Decimal { .. } => DECIMAL,
        Kind::Bit { .. } => BIT,
        Kind::Date => DATE,
        Kind::Time { .. } => TIME,
        Kind::DateTime { .. } | Kind::Timestamp { .. } => TIMESTAMP,
        Kind::Text { form, .. } | Kind::CompressedText { form, .. } => match form {
            Form::Fixed(_) => CHAR,
            Form::Varying(_) => VARCHAR,
            Form::Large => CLOB,
        },
        Kind::Binary { .. } | Kind::CompressedBinary { .. } | Kind::Geometry { .. } | Kind::Vector { .. } => BLOB,
        Kind::Enumeration { .. } => INTEGER,
        Kind::Set { .. } => return (BIT, BLOB),
        Kind::Json { .. } => return (VARCHAR, OTHER),
        Kind::Year | Kind::Uuid | Kind::Inet4 | Kind::Inet6 => VARCHAR,
        Kind::Null => OTHER,
    };
    (number, number)
}

/// Returns the type number for unsigned values that exceed the range of the kind's own type.
pub(super) fn wide_type(kind: &Kind) -> Option<i64> {
    let Kind::Integer { bytes, unsigned: true } = kind else { return None };
    Some(match bytes {
        1 => SMALLINT,
        2 | 3 => INTEGER,
        4 => BIGINT,
        _ => DECIMAL,
    })
}

/// Returns the smallest unsigned value for which a kind needs [`wide_type`].
pub(super) fn wide_from(kind: &Kind) -> u64 {
    let Kind::Integer { bytes, unsigned: true } = kind else { return u64::MAX };
    1 << (u32::from(*bytes) * 8 - 1).min(63)
}

/// A column of a flat message, with precomputed parts.
pub(super) struct FlatColumn {
    kind: Kind,
    zone_seconds: i32,
    /// `"name":`.
    pub(super) key: Vec<u8>,
    /// The SQL type, in quotes.
    pub(super) type_text: Vec<u8>,
    types: (i64, i64),
    wide: i64,
    wide_from: u64,
}

impl FlatColumn {
    pub(super) fn new(column: &MessageColumn, zone_seconds: i32) -> FlatColumn {
        let (mut key, mut type_text) = (Vec::new(), Vec::new());
        quoted::write(column.name.as_bytes(), &mut key);
        key.push(b':');
        quoted::write(column.type_text.as_bytes(), &mut type_text);
        let types = sql_types(&column.kind);
        FlatColumn {
            zone_seconds,
            key,
            type_text,
            types,
            wide: wide_type(&column.kind).unwrap_or(types.0),
            wide_from: wide_from(&column.kind),
            kind: column.kind.clone(),
        }
    }

    /// Returns the number of a value's type.
    pub(super) fn sql_type(&self, value: &Value<'_>) -> i64 {
        match value {
            Value::Null => self.types.1,
            Value::UInt(value) if *value >= self.wide_from => self.wide,
            _ => self.types.0,
        }
    }

    /// Writes a member of a row's object.
    pub(super) fn write(&self, value: &Value<'_>, out: &mut Vec<u8>) -> Result<()> {
        out.extend_from_slice(&self.key);
        if matches!(value, Value::Null) {
            out.extend_from_slice(b"null");
            return Ok(());
        }
        quoted::within(out, |out| values::write(value, &self.kind, self.zone_seconds, out))
    }

    /// Whether an update changed the value.
    pub(super) fn differs(&self, before: Option<&Value<'_>>, after: &Value<'_>) -> Result<bool> {
        differs(&self.kind, before, after)
    }
}

/// Whether an update changed a value: the previous value is absent, or has a different text.
#[inline]
fn differs(kind: &Kind, before: Option<&Value<'_>>, after: &Value<'_>) -> Result<bool> {
    Ok(match (before, after) {
        (None, _) => true,
        (Some(Value::Json(document)), Value::JsonText(text)) => {
            let mut shown = Vec::new();
            values::write(&Value::Json(document), kind, 0, &mut shown)?;
            shown != text.as_bytes()
        }
        (Some(Value::Float(before)), Value::Float(after)) => before.to_bits() != after.to_bits(),
        (Some(Value::Double(before)), Value::Double(after)) => before.to_bits() != after.to_bits(),
        (Some(before), after) => before != after,
    })
}

/// A column of an entry's rows, with precomputed parts.
pub(super) struct CanalColumn {
    kind: Kind,
    zone_seconds: i32,
    /// Index, type, name and key flag, encoded for values, for unsigned values above the type's range, and for NULL.
    head: Box<[u8]>,
    head_wide: Box<[u8]>,
    head_null: Box<[u8]>,
    wide_from: u64,
    /// The SQL type.
    tail: Box<[u8]>,
}

impl CanalColumn {
    pub(super) fn new(index: usize, column: &MessageColumn, zone_seconds: i32) -> CanalColumn {
        let (number, null) = sql_types(&column.kind);
        let head = |sql_type: i64| {
            let mut out = Vec::new();
            pb::signed_unless_zero(1, index as i64, &mut out);
            pb::signed(2, sql_type, &mut out);
            pb::text(3, &column.name, &mut out);
            if column.is_key {
                pb::number(4, 1, &mut out);
            }
            out.into_boxed_slice()
        };
        let mut tail = Vec::new();
        pb::text(10, &column.type_text, &mut tail);
        CanalColumn {
            zone_seconds,
            head: head(number),
            head_wide: head(wide_type(&column.kind).unwrap_or(number)),
            head_null: head(null),
            wide_from: wide_from(&column.kind),
            tail: tail.into(),
            kind: column.kind.clone(),
        }
    }

    /// Writes a `Column` as field `field` of a row.
    #[inline]
    pub(super) fn write(&self, field: u32, value: &Value<'_>, updated: bool, out: &mut Vec<u8>) -> Result<()> {
        let start = pb::open(field, out);
        out.extend_from_slice(match value {
            Value::Null => &self.head_null,
            Value::UInt(value) if *value >= self.wide_from => &self.head_wide,
            _ => &self.head,
        });
        if updated {
            out.extend_from_slice(&[5 << 3, 1]);
        }
        let is_null = matches!(value, Value::Null);
        out.extend_from_slice(&[6 << 3, u8::from(is_null)]);
        if !is_null {
            let text = pb::open(8, out);
            values::write(value, &self.kind, self.zone_seconds, out)?;
            if out.len() == text {
                // Omit an empty text together with its tag and its length.
                out.truncate(text.saturating_sub(2));
            } else {
                pb::close(text, out);
            }
        }
        out.extend_from_slice(&self.tail);
        pb::close(start, out);
        Ok(())
    }

    /// Whether an update changed the value: the previous value is absent, or has a different text.
    #[inline]
    pub(super) fn differs(&self, before: Option<&Value<'_>>, after: &Value<'_>) -> Result<bool> {
        differs(&self.kind, before, after)
    }
}
