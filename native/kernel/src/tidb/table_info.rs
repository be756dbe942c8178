//! Reads the JSON of a table definition, TiDB's `TableInfo`.

use serde_json::Value as Json;

use crate::error::{Error, ErrorKind, Result};

/// Returns the error for an incomplete definition.
#[cold]
pub(super) fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::SchemaInvalid, format!("a TiDB table definition {what}"))
        .hint("definitions come from mysql.tidb_ddl_history, or from /ddl/history of TiDB's status port")
}

/// Returns the original spelling of a name. TiDB also stores it in lower case.
pub(super) fn name(value: &Json) -> Result<&str> {
    value.get("O").and_then(Json::as_str).ok_or_else(|| invalid("has no name"))
}

/// Returns the elements of a list field; an empty list if the field is null.
pub(super) fn items<'a>(value: &'a Json, field: &str) -> &'a [Json] {
    value.get(field).and_then(Json::as_array).map_or(&[], Vec::as_slice)
}

/// Whether a field is true.
pub(super) fn flag(value: &Json, field: &str) -> bool {
    value.get(field).and_then(Json::as_bool).unwrap_or(false)
}

/// Returns a number that every definition contains.
pub(super) fn number(value: &Json, field: &str) -> Result<i64> {
    value.get(field).and_then(Json::as_i64).ok_or_else(|| invalid(&format!("has no number `{field}`")))
}

/// Parses a definition. Raises `SchemaInvalid`.
pub fn parse(definition: &[u8]) -> Result<Json> {
    serde_json::from_slice(definition).map_err(|error| invalid(&format!("is no JSON: {error}")))
}

/// Returns the number of a table, and those of its partitions.
pub fn numbers(json: &Json) -> Result<(i64, Vec<i64>)> {
    let partition = json.get("partition").unwrap_or(&Json::Null);
    let partitions = items(partition, "definitions").iter().map(|part| number(part, "id"));
    Ok((number(json, "id")?, partitions.collect::<Result<_>>()?))
}
