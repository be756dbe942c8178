//! The schemas of Debezium's messages in the JSON of Kafka Connect, built once for each table definition.

use std::sync::Arc;

use super::column_traits::{column_traits, ColumnTraits};
use super::handling::{BinaryMode, DebeziumOptions, DecimalMode, Flat, Handling, TimeMode, UnsignedMode};
use crate::column::{quoted, write_unsigned_integer, Kind};
use crate::emit::dialect::{MessageColumn, TableView};

const SOURCE_FIELDS: &str = concat!(
    r#"{"type":"struct","fields":[{"type":"string","optional":false,"field":"version"},"#,
    r#"{"type":"string","optional":false,"field":"connector"},{"type":"string","optional":false,"field":"name"},"#,
    r#"{"type":"int64","optional":false,"field":"ts_ms"},"#,
    r#"{"type":"string","optional":true,"name":"io.debezium.data.Enum","version":1,"#,
    r#""parameters":{"allowed":"true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"},"#,
    r#""default":"false","field":"snapshot"},{"type":"string","optional":false,"field":"db"},"#,
    r#"{"type":"string","optional":true,"field":"sequence"},{"type":"int64","optional":true,"field":"ts_us"},"#,
    r#"{"type":"int64","optional":true,"field":"ts_ns"},{"type":"string","optional":true,"field":"table"},"#,
    r#"{"type":"int64","optional":false,"field":"server_id"},{"type":"string","optional":true,"field":"gtid"},"#,
    r#"{"type":"string","optional":false,"field":"file"},{"type":"int64","optional":false,"field":"pos"},"#,
    r#"{"type":"int32","optional":false,"field":"row"},{"type":"int64","optional":true,"field":"thread"},"#,
    r#"{"type":"string","optional":true,"field":"query"}],"optional":false,"#,
    r#""name":"io.debezium.connector.mysql.Source","version":1,"field":"source"}"#,
);

const ENVELOPE_TAIL: &str = concat!(
    r#",{"type":"struct","fields":[{"type":"string","optional":false,"field":"id"},"#,
    r#"{"type":"int64","optional":false,"field":"total_order"},"#,
    r#"{"type":"int64","optional":false,"field":"data_collection_order"}],"#,
    r#""optional":true,"name":"event.block","version":1,"field":"transaction"},"#,
    r#"{"type":"string","optional":false,"field":"op"},{"type":"int64","optional":true,"field":"ts_ms"},"#,
    r#"{"type":"int64","optional":true,"field":"ts_us"},{"type":"int64","optional":true,"field":"ts_ns"}],"#,
    r#""optional":false,"name":"#,
);

/// Writes the text before the payload of a DDL message.
pub(super) fn write_statement_head(out: &mut Vec<u8>) {
    out.extend_from_slice(br#"{"schema":{"type":"struct","fields":["#);
    out.extend_from_slice(SOURCE_FIELDS.as_bytes());
    out.extend_from_slice(
        concat!(
            r#",{"type":"int64","optional":false,"field":"ts_ms"},"#,
            r#"{"type":"string","optional":true,"field":"databaseName"},"#,
            r#"{"type":"string","optional":true,"field":"schemaName"},"#,
            r#"{"type":"string","optional":true,"field":"ddl"},"#,
            r#"{"type":"array","items":{"type":"string","optional":false},"optional":false,"field":"tableChanges"}],"#,
            r#""optional":false,"name":"io.debezium.connector.mysql.SchemaChangeValue","version":1},"payload":"#,
        )
        .as_bytes(),
    );
}

/// Returns the text before the payload of messages with this schema.
pub(crate) fn head(schema: &[u8]) -> Vec<u8> {
    [br#"{"schema":"#, schema, br#","payload":"#].concat()
}

/// Returns the schema of a table's messages, for the cluster `instance`.
pub(crate) fn value(instance: &str, table: &TableView, options: &DebeziumOptions) -> Vec<u8> {
    let handling = options.handling;
    if let Some(flat) = &options.flat {
        return flat_value(instance, table, handling, flat);
    }
    let mut out = br#"{"type":"struct","fields":["#.to_vec();
    let topic = topic(instance, table);
    for side in ["before", "after"] {
        write_row(&topic, table, side, handling, &mut out);
        out.push(b',');
    }
    out.extend_from_slice(SOURCE_FIELDS.as_bytes());
    out.extend_from_slice(ENVELOPE_TAIL.as_bytes());
    quoted::write(format!("{topic}.Envelope").as_bytes(), &mut out);
    out.extend_from_slice(br#","version":2}"#);
    out
}

/// Returns the schema of a table's flat rows.
fn flat_value(instance: &str, table: &TableView, handling: Handling, flat: &Flat) -> Vec<u8> {
    let mut out = br#"{"type":"struct","fields":["#.to_vec();
    let start = out.len();
    for column in table.columns.iter().filter(|column| column.wanted) {
        out.push(b',');
        write_column(column, handling, &mut out);
    }
    let deleted = flat.deleted.then_some(("__deleted", ("string", true)));
    for (name, (shape, optional)) in
        flat.fields.iter().map(|(name, field)| (name.as_str(), field.shape())).chain(deleted)
    {
        out.extend_from_slice(format!(r#",{{"type":"{shape}","optional":{optional},"field":"#).as_bytes());
        quoted::write(name.as_bytes(), &mut out);
        out.push(b'}');
    }
    // The first field has no comma before it.
    if out.len() > start {
        out.remove(start);
    }
    close_named(&format!("{}.Value", topic(instance, table)), out)
}

/// Returns the schema of a table's keys, for the cluster `instance`.
pub(crate) fn key(instance: &str, table: &TableView, columns: &[&MessageColumn], handling: Handling) -> Vec<u8> {
    let mut out = br#"{"type":"struct","fields":["#.to_vec();
    for (at, column) in columns.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write_column(column, handling, &mut out);
    }
    close_named(&format!("{}.Key", topic(instance, table)), out)
}

/// Closes a struct's list of fields, and writes the struct's name.
fn close_named(name: &str, mut out: Vec<u8>) -> Vec<u8> {
    out.extend_from_slice(br#"],"optional":false,"name":"#);
    quoted::write(name.as_bytes(), &mut out);
    out.push(b'}');
    out
}

/// Writes the schema of an image.
fn write_row(topic: &str, table: &TableView, side: &str, handling: Handling, out: &mut Vec<u8>) {
    out.extend_from_slice(br#"{"type":"struct","fields":["#);
    for (at, column) in table.columns.iter().filter(|column| column.wanted).enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write_column(column, handling, out);
    }
    out.extend_from_slice(br#"],"optional":true,"name":"#);
    quoted::write(format!("{topic}.Value").as_bytes(), out);
    out.extend_from_slice(br#","field":"#);
    quoted::write(side.as_bytes(), out);
    out.push(b'}');
}

/// The Kafka Connect type of a column and its semantic type.
struct Meaning {
    /// The type, with its fields or elements, as JSON.
    shape: &'static str,
    /// The name of the semantic type; empty if there is none.
    name: &'static str,
    /// Parameters as names and values.
    parameters: Vec<(&'static str, String)>,
}

fn plain(shape: &'static str) -> Meaning {
    named(shape, "")
}

fn named(shape: &'static str, name: &'static str) -> Meaning {
    Meaning { shape, name, parameters: Vec::new() }
}

fn with(shape: &'static str, name: &'static str, parameters: &[(&'static str, String)]) -> Meaning {
    Meaning { shape, name, parameters: parameters.to_vec() }
}

const GEOMETRY: &str = concat!(
    r#""struct","fields":[{"type":"bytes","optional":false,"field":"wkb"},"#,
    r#"{"type":"int32","optional":true,"field":"srid"}]"#,
);

const POINT: &str = concat!(
    r#""struct","fields":[{"type":"double","optional":false,"field":"x"},"#,
    r#"{"type":"double","optional":false,"field":"y"},{"type":"bytes","optional":true,"field":"wkb"},"#,
    r#"{"type":"int32","optional":true,"field":"srid"}]"#,
);

/// Returns the members separated by commas. Commas and backslashes inside a member are escaped by a backslash.
fn allowed(members: &[Arc<str>]) -> [(&'static str, String); 1] {
    let escaped = members.iter().map(|member| member.replace('\\', r"\\").replace(',', r"\,"));
    [("allowed", escaped.collect::<Vec<_>>().join(","))]
}

/// Returns the name of a table as it appears in topics and schemas. Characters other than ASCII letters, digits, dots,
/// dashes and underscores become underscores.
fn topic(instance: &str, table: &TableView) -> String {
    let is_kept = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
    let name = format!("{instance}.{}.{}", table.database, table.table);
    name.chars().map(|letter| if is_kept(letter) { letter } else { '_' }).collect()
}

fn decimal(precision: u8, scale: u8) -> Meaning {
    with(
        r#""bytes""#,
        "org.apache.kafka.connect.data.Decimal",
        &[("scale", scale.to_string()), ("connect.decimal.precision", precision.to_string())],
    )
}

fn meaning_of_date(mode: TimeMode) -> Meaning {
    match mode {
        TimeMode::Connect => named(r#""int32""#, "org.apache.kafka.connect.data.Date"),
        TimeMode::Adaptive | TimeMode::AdaptiveTimeMicroseconds | TimeMode::Microseconds => {
            named(r#""int32""#, "io.debezium.time.Date")
        }
    }
}

fn meaning_of_time(fsp: u8, mode: TimeMode) -> Meaning {
    match mode {
        TimeMode::Connect => named(r#""int32""#, "org.apache.kafka.connect.data.Time"),
        TimeMode::Adaptive if fsp <= 3 => named(r#""int32""#, "io.debezium.time.Time"),
        TimeMode::Adaptive | TimeMode::AdaptiveTimeMicroseconds | TimeMode::Microseconds => {
            named(r#""int64""#, "io.debezium.time.MicroTime")
        }
    }
}

fn meaning_of_datetime(fsp: u8, mode: TimeMode) -> Meaning {
    match mode {
        TimeMode::Connect => named(r#""int64""#, "org.apache.kafka.connect.data.Timestamp"),
        TimeMode::Adaptive | TimeMode::AdaptiveTimeMicroseconds if fsp <= 3 => {
            named(r#""int64""#, "io.debezium.time.Timestamp")
        }
        TimeMode::Adaptive | TimeMode::AdaptiveTimeMicroseconds | TimeMode::Microseconds => {
            named(r#""int64""#, "io.debezium.time.MicroTimestamp")
        }
    }
}

fn meaning(kind: &Kind, traits: ColumnTraits) -> Meaning {
    let handling = traits.handling;
    match kind {
        // 20 digits, as the largest BIGINT UNSIGNED has.
        Kind::Integer { bytes: 8, unsigned: true } if handling.bigint_unsigned == UnsignedMode::Precise => {
            decimal(20, 0)
        }
        Kind::Integer { bytes: 1, .. } | Kind::Integer { bytes: 2, unsigned: false } => plain(r#""int16""#),
        Kind::Integer { bytes: 2 | 3, .. } | Kind::Integer { bytes: 4, unsigned: false } => plain(r#""int32""#),
        Kind::Integer { .. } => plain(r#""int64""#),
        Kind::Float if traits.has_digits => plain(r#""double""#),
        Kind::Float => plain(r#""float""#),
        Kind::Double => plain(r#""double""#),
        Kind::Decimal { precision, scale } => match handling.decimal {
            DecimalMode::Precise => decimal(*precision, *scale),
            DecimalMode::Double => plain(r#""double""#),
            DecimalMode::String => plain(r#""string""#),
        },
        Kind::Bit { bits: 1 } => plain(r#""boolean""#),
        Kind::Bit { bits } => with(r#""bytes""#, "io.debezium.data.Bits", &[("length", bits.to_string())]),
        Kind::Year => named(r#""int32""#, "io.debezium.time.Year"),
        Kind::Date => meaning_of_date(handling.time),
        Kind::Time { fsp, .. } => meaning_of_time(*fsp, handling.time),
        Kind::DateTime { fsp, .. } => meaning_of_datetime(*fsp, handling.time),
        Kind::Timestamp { .. } => named(r#""string""#, "io.debezium.time.ZonedTimestamp"),
        Kind::Binary { .. } | Kind::CompressedBinary { .. } if handling.binary == BinaryMode::Bytes => {
            plain(r#""bytes""#)
        }
        Kind::Binary { .. } | Kind::CompressedBinary { .. } => plain(r#""string""#),
        Kind::Enumeration { values, .. } => with(r#""string""#, "io.debezium.data.Enum", &allowed(values)),
        Kind::Set { values, .. } => with(r#""string""#, "io.debezium.data.EnumSet", &allowed(values)),
        Kind::Json { .. } => named(r#""string""#, "io.debezium.data.Json"),
        Kind::Geometry { .. } if traits.is_point => named(POINT, "io.debezium.data.geometry.Point"),
        Kind::Geometry { .. } => named(GEOMETRY, "io.debezium.data.geometry.Geometry"),
        Kind::Vector { .. } => {
            named(r#""array","items":{"type":"float","optional":false}"#, "io.debezium.data.FloatVector")
        }
        Kind::Null | Kind::Text { .. } | Kind::CompressedText { .. } | Kind::Uuid | Kind::Inet4 | Kind::Inet6 => {
            plain(r#""string""#)
        }
    }
}

fn write_column(column: &MessageColumn, handling: Handling, out: &mut Vec<u8>) {
    let meaning = meaning(&column.kind, column_traits(&column.type_text, column.nullable, handling));
    out.extend_from_slice(br#"{"type":"#);
    out.extend_from_slice(meaning.shape.as_bytes());
    out.extend_from_slice(if column.nullable { br#","optional":true"# } else { br#","optional":false"# });
    if !meaning.name.is_empty() {
        out.extend_from_slice(br#","name":"#);
        quoted::write(meaning.name.as_bytes(), out);
        out.extend_from_slice(br#","version":"#);
        write_unsigned_integer(1, out);
    }
    if !meaning.parameters.is_empty() {
        out.extend_from_slice(br#","parameters":{"#);
        for (at, (name, value)) in meaning.parameters.iter().enumerate() {
            if at > 0 {
                out.push(b',');
            }
            quoted::write(name.as_bytes(), out);
            out.push(b':');
            quoted::write(value.as_bytes(), out);
        }
        out.push(b'}');
    }
    out.extend_from_slice(br#","field":"#);
    quoted::write(column.name.as_bytes(), out);
    out.push(b'}');
}
