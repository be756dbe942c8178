//! The formats of values and messages that users can configure in Debezium's connector: its handling modes, and flat
//! rows.
//!
//! The names are those of the connector's properties `decimal.handling.mode`, `time.precision.mode`,
//! `bigint.unsigned.handling.mode` and `binary.handling.mode`, and of the fields that its transformation
//! `ExtractNewRecordState` adds.

use crate::emit::messages::TransactionCounts;
use crate::error::{Error, ErrorKind, Result};

/// The form of DECIMAL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DecimalMode {
    /// The bytes of the unscaled number.
    #[default]
    Precise,
    /// The nearest double.
    Double,
    /// The digits as text.
    String,
}

/// The representation of TIME and DATETIME, and the semantic type of DATE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TimeMode {
    /// Units that depend on the column's fractional digits.
    Adaptive,
    /// Like `Adaptive`, but TIME always has microseconds.
    #[default]
    AdaptiveTimeMicroseconds,
    /// Kafka Connect's time types, in milliseconds.
    Connect,
    /// Microseconds, whatever the number of fractional digits.
    Microseconds,
}

/// The form of BIGINT UNSIGNED.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UnsignedMode {
    /// A long, so values above its range become negative.
    #[default]
    Long,
    /// The number's bytes, as a decimal with scale 0.
    Precise,
}

/// The representation of BINARY, VARBINARY and BLOB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BinaryMode {
    /// Bytes, which JSON shows in base64.
    #[default]
    Bytes,
    /// A string in base64.
    Base64,
    /// A string in base64 with the alphabet for URLs.
    Base64UrlSafe,
    /// A string of hexadecimal digits in lower case.
    Hex,
}

/// The handling modes; the default is the connector's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Handling {
    pub decimal: DecimalMode,
    pub time: TimeMode,
    pub bigint_unsigned: UnsignedMode,
    pub binary: BinaryMode,
}

/// An additional field after the columns of a flat row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FlatField {
    Op,
    Db,
    Table,
    Gtid,
    File,
    Pos,
    Row,
    ServerId,
    Thread,
    Snapshot,
    TsMs,
    TsUs,
    TsNs,
}

impl FlatField {
    /// Finds a field by its name. A field of the source may be named with or without the prefix `source.`.
    fn parse(name: &str) -> Option<FlatField> {
        Some(match name {
            "op" => FlatField::Op,
            _ => match name.strip_prefix("source.").unwrap_or(name) {
                "db" => FlatField::Db,
                "table" => FlatField::Table,
                "gtid" => FlatField::Gtid,
                "file" => FlatField::File,
                "pos" => FlatField::Pos,
                "row" => FlatField::Row,
                "server_id" => FlatField::ServerId,
                "thread" => FlatField::Thread,
                "snapshot" => FlatField::Snapshot,
                "ts_ms" => FlatField::TsMs,
                "ts_us" => FlatField::TsUs,
                "ts_ns" => FlatField::TsNs,
                _ => return None,
            },
        })
    }

    /// Returns the Kafka Connect type, and whether the field may be null.
    pub(super) fn shape(self) -> (&'static str, bool) {
        match self {
            FlatField::Op | FlatField::Db | FlatField::File => ("string", false),
            FlatField::Table | FlatField::Gtid | FlatField::Snapshot => ("string", true),
            FlatField::Pos | FlatField::ServerId => ("int64", false),
            FlatField::Row => ("int32", false),
            FlatField::Thread | FlatField::TsMs | FlatField::TsUs | FlatField::TsNs => ("int64", true),
        }
    }
}

/// The additional fields of flat rows, after the columns.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Flat {
    /// Pairs of a name in the message, such as `__op` or `__source_ts_ms`, and the field.
    pub fields: Vec<(String, FlatField)>,
    /// Whether rows have a field `__deleted`, which tells whether the row was deleted.
    pub deleted: bool,
}

/// A binary format, whose schemas are in a schema registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub enum BinaryFormat {
    #[default]
    Avro,
    Protobuf,
}

/// The ids of a table's schemas in a schema registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegisteredSchemas {
    /// The format of messages and keys.
    pub format: BinaryFormat,
    /// The schema of messages.
    pub value: u32,
    /// The schema of keys.
    pub key: u32,
}

/// The options of the dialect.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DebeziumOptions {
    /// The forms of values.
    pub handling: Handling,
    /// Rows without an envelope; None for messages with an envelope.
    pub flat: Option<Flat>,
    /// The schemas of messages in a binary format; None for messages in JSON.
    pub registered: Option<RegisteredSchemas>,
    /// The transaction that is open before the first message; None for messages without a transaction.
    pub transactions: Option<TransactionCounts>,
}

impl DebeziumOptions {
    /// Parses pairs of names and values: `decimal`, `time`, `bigint_unsigned` and `binary` with the connector's values;
    /// `flat` with names of fields, separated by commas; `deleted`; `transactions` with the three numbers of
    /// [`TransactionCounts`]; and for a binary format, `avro` or `protobuf` with the schema ids of messages and keys.
    /// Raises `OptionInvalid`.
    pub fn parse(options: &[(String, String)]) -> Result<DebeziumOptions> {
        let mut parsed = DebeziumOptions::default();
        for (name, value) in options {
            let handling = &mut parsed.handling;
            match (name.as_str(), value.as_str()) {
                ("decimal", "precise") => handling.decimal = DecimalMode::Precise,
                ("decimal", "double") => handling.decimal = DecimalMode::Double,
                ("decimal", "string") => handling.decimal = DecimalMode::String,
                ("time", "adaptive") => handling.time = TimeMode::Adaptive,
                ("time", "adaptive_time_microseconds") => handling.time = TimeMode::AdaptiveTimeMicroseconds,
                ("time", "connect") => handling.time = TimeMode::Connect,
                ("time", "microseconds") => handling.time = TimeMode::Microseconds,
                ("bigint_unsigned", "long") => handling.bigint_unsigned = UnsignedMode::Long,
                ("bigint_unsigned", "precise") => handling.bigint_unsigned = UnsignedMode::Precise,
                ("binary", "bytes") => handling.binary = BinaryMode::Bytes,
                ("binary", "base64") => handling.binary = BinaryMode::Base64,
                ("binary", "base64-url-safe") => handling.binary = BinaryMode::Base64UrlSafe,
                ("binary", "hex") => handling.binary = BinaryMode::Hex,
                ("flat", names) => parsed.flat.get_or_insert_default().fields = flat_fields(names)?,
                ("deleted", value @ ("true" | "false")) => {
                    parsed.flat.get_or_insert_default().deleted = value == "true";
                }
                ("transactions", numbers) => parsed.transactions = Some(counts(numbers)?),
                ("avro", ids) => parsed.registered = Some(registered(BinaryFormat::Avro, ids)?),
                ("protobuf", ids) => parsed.registered = Some(registered(BinaryFormat::Protobuf, ids)?),
                _ => return Err(unknown(&format!("`{value}` is no value of `{name}` for Debezium's messages"))),
            }
        }
        Ok(parsed)
    }
}

fn counts(text: &str) -> Result<TransactionCounts> {
    let mut numbers = text.split(',').map(str::parse::<u64>);
    match (numbers.next(), numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(version)), Some(Ok(total)), Some(Ok(of_table)), None) => {
            let commit_version = i64::try_from(version).map_err(|_| unknown("a commit version above 2^63"))?;
            Ok(TransactionCounts { commit_version, total, of_table })
        }
        _ => Err(unknown(&format!("`{text}` is not a commit version and two counts"))),
    }
}

fn registered(format: BinaryFormat, text: &str) -> Result<RegisteredSchemas> {
    let ids = text.split_once(',').map(|(value, key)| (value.parse(), key.parse()));
    match ids {
        Some((Ok(value), Ok(key))) => Ok(RegisteredSchemas { format, value, key }),
        _ => Err(unknown(&format!("`{text}` are not the ids of two schemas"))),
    }
}

fn flat_fields(names: &str) -> Result<Vec<(String, FlatField)>> {
    let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| {
            let field = FlatField::parse(name);
            let field = field.ok_or_else(|| unknown(&format!("`{name}` is no field of Debezium's messages")))?;
            Ok((format!("__{}", name.replace('.', "_")), field))
        })
        .collect()
}

#[cold]
fn unknown(message: &str) -> Error {
    Error::new(ErrorKind::OptionInvalid, message)
        .hint("docs/formats/messages.md lists the modes, and the fields of flat rows")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(options: &[(&str, &str)]) -> Result<DebeziumOptions> {
        let owned: Vec<_> = options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        DebeziumOptions::parse(&owned)
    }

    #[test]
    fn modes_are_those_of_the_connector() {
        assert_eq!(parsed(&[]).unwrap(), DebeziumOptions::default());
        let handling = parsed(&[("decimal", "string"), ("time", "connect"), ("binary", "hex")]).unwrap().handling;
        let expected =
            Handling { decimal: DecimalMode::String, time: TimeMode::Connect, binary: BinaryMode::Hex, ..handling };
        assert_eq!((handling, handling.bigint_unsigned), (expected, UnsignedMode::Long));
    }

    #[test]
    fn unknown_modes_and_fields_are_refused() {
        for options in [
            [("decimal", "exact")],
            [("color", "red")],
            [("flat", "op,lsn")],
            [("avro", "1,-1")],
            [("transactions", "1,2")],
        ] {
            assert_eq!(parsed(&options).unwrap_err().kind(), ErrorKind::OptionInvalid);
        }
    }

    #[test]
    fn fields_are_named_after_their_place() {
        let flat = parsed(&[("flat", "op, table,source.ts_ms"), ("deleted", "true")]).unwrap().flat.unwrap();
        let names: Vec<_> = flat.fields.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!((names, flat.deleted), (vec!["__op", "__table", "__source_ts_ms"], true));
    }
}
