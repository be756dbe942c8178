//! Table definitions: TiDB's `TableInfo`, as JSON from DDL jobs and the status port.
//!
//! Source: TiDB's `parser/model` and `parser/types`. Column types and flags have the same numbers as in MySQL.

use serde_json::Value as Json;

use super::column::{self, TidbColumn};
use super::table_info::{flag, invalid, items, name, numbers};
use crate::error::Result;
use crate::write::table::{KeyPart, WrittenColumn, WrittenTable};

/// The schema state of a column or an index that is visible to readers.
const PUBLIC: i64 = 5;
/// The column number of the hidden row id.
const ROW_ID: i64 = -1;
/// Flag of a column of the primary key.
const PRIMARY_KEY_FLAG: u64 = 2;

/// The kind of handle, which an inserted row stores in its first datums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Handle {
    /// A hidden row id, which is not a column.
    RowId,
    /// The integer primary key, by the index of its column.
    Integer(usize),
    /// A clustered primary key, by the indexes of its columns, in the order of the key.
    Clustered(Vec<Option<usize>>),
}

/// A table, prepared for reading rows.
#[derive(Debug)]
pub struct TidbTable {
    /// TiDB's number of the table.
    pub id: i64,
    /// Numbers of the partitions; empty if there are none.
    pub partitions: Vec<i64>,
    /// The table as written in table maps.
    pub written: WrittenTable,
    /// The columns in TiDB's form, in the order of `written`.
    pub columns: Vec<TidbColumn>,
    /// How an inserted row begins.
    pub handle: Handle,
    /// The largest number that a column of the table ever had.
    pub last_number: i64,
    /// Numbers of columns that are not written although rows may contain values for them: columns that are not public,
    /// virtual columns, and dropped columns of earlier definitions.
    pub unwritten: Vec<i64>,
}

impl TidbTable {
    /// Reads a definition. `database` is the name of the table's database.
    ///
    /// The written table omits columns that are not public, and virtual columns, which TiDB does not send. A view or a
    /// sequence has no rows and therefore no columns. Raises `SchemaInvalid` for an incomplete definition,
    /// `EventUnsupported` for a column type that MySQL does not have.
    pub fn read(database: &str, json: &Json) -> Result<TidbTable> {
        let (id, partitions) = numbers(json)?;
        let table = name(json.get("name").unwrap_or(&Json::Null))?.to_owned();
        let has_rows = ["view", "sequence"].iter().all(|kind| json.get(*kind).is_none_or(Json::is_null));
        let columns = if has_rows { items(json, "cols") } else { &[] };
        let ids: Vec<i64> = columns.iter().filter_map(|column| column.get("id").and_then(Json::as_i64)).collect();
        let last_number = json.get("max_col_id").and_then(Json::as_i64).or(ids.iter().max().copied());
        let mut stored: Vec<&Json> = columns.iter().filter(|column| is_stored(column)).collect();
        stored.sort_by_key(|column| column.get("offset").and_then(Json::as_i64));
        let mut columns = Vec::with_capacity(stored.len());
        let mut written_columns: Vec<WrittenColumn> = Vec::with_capacity(stored.len());
        for column in &stored {
            let (read, written) = column::read(column).map_err(|error| error.within(&format!("table `{table}`")))?;
            columns.push(read);
            written_columns.push(written);
        }
        let keys = KeyReader { json, stored: &stored };
        let handle = keys.handle()?;
        let written = WrittenTable {
            // The id does not change with the definition, because readers recognize a changed definition by its
            // content. Only six bytes are written, which are enough for the id of any user table.
            id: u64::from_ne_bytes(id.to_ne_bytes()) & 0xffff_ffff_ffff,
            database: database.to_owned(),
            primary_key: keys.primary_key(&handle)?,
            table,
            columns: written_columns,
        };
        let unwritten = ids.into_iter().filter(|id| columns.iter().all(|column| column.id != *id)).collect();
        Ok(TidbTable { id, partitions, written, columns, handle, last_number: last_number.unwrap_or(0), unwritten })
    }

    /// Records the columns of an earlier table definition. Rows may still contain the numbers of these columns.
    pub fn follow(&mut self, earlier: &TidbTable) {
        let ids = earlier.columns.iter().map(|column| column.id).chain(earlier.unwritten.iter().copied());
        let dropped: Vec<i64> = ids.filter(|id| self.columns.iter().all(|column| column.id != *id)).collect();
        self.unwritten.extend(dropped);
    }

    /// Whether a row may have a value with this number even though the number belongs to no written column.
    ///
    /// The row id has the number -1. A number above `last_number` belongs to a column that was added later. That column
    /// was not public when the row was written, because the definitions of all earlier schema versions have been read.
    pub fn skips(&self, id: i64) -> bool {
        id == ROW_ID || id > self.last_number || self.unwritten.contains(&id)
    }

    /// Returns the index of a column by TiDB's number; None for a column that is not written.
    #[inline]
    pub fn column_of(&self, id: i64, expected: usize) -> Option<usize> {
        // Rows nearly always have their columns in table order.
        if self.columns.get(expected).is_some_and(|column| column.id == id) {
            return Some(expected);
        }
        self.columns.iter().position(|column| column.id == id)
    }
}

/// Whether a column is public and in the rows that TiDB sends.
fn is_stored(column: &Json) -> bool {
    let expression = column.get("generated_expr_string").and_then(Json::as_str).unwrap_or_default();
    let is_virtual = !expression.is_empty() && !flag(column, "generated_stored");
    column.get("state").and_then(Json::as_i64) == Some(PUBLIC) && !is_virtual
}

/// Determines which columns identify a row.
struct KeyReader<'a> {
    json: &'a Json,
    stored: &'a [&'a Json],
}

impl KeyReader<'_> {
    fn handle(&self) -> Result<Handle> {
        if flag(self.json, "pk_is_handle") {
            let is_key = |column: &&Json| {
                let flags = column.get("type").and_then(|kind| kind.get("Flag")).and_then(Json::as_u64);
                flags.is_some_and(|flags| flags & PRIMARY_KEY_FLAG != 0)
            };
            let index = self.stored.iter().position(is_key);
            return Ok(Handle::Integer(index.ok_or_else(|| invalid("has no column for its integer primary key"))?));
        }
        if !flag(self.json, "is_common_handle") {
            return Ok(Handle::RowId);
        }
        let index = self.primary_index().ok_or_else(|| invalid("has no index for its clustered primary key"))?;
        let parts = items(index, "idx_cols").iter();
        let whole = |part: &Json| part.get("length").and_then(Json::as_i64) == Some(-1);
        let columns = parts.map(|part| Ok(self.column_of(part)?.filter(|_| whole(part))));
        Ok(Handle::Clustered(columns.collect::<Result<_>>()?))
    }

    fn primary_index(&self) -> Option<&Json> {
        let public = |index: &&Json| index.get("state").and_then(Json::as_i64) == Some(PUBLIC);
        items(self.json, "index_info").iter().filter(public).find(|index| flag(index, "is_primary"))
    }

    /// Returns the written column that a part of an index refers to; None if the column is not written.
    fn column_of(&self, part: &Json) -> Result<Option<usize>> {
        let wanted = name(part.get("name").unwrap_or(&Json::Null))?;
        let has_name =
            |column: &&Json| column.get("name").and_then(|names| name(names).ok()).is_some_and(|name| name == wanted);
        Ok(self.stored.iter().position(has_name))
    }

    fn primary_key(&self, handle: &Handle) -> Result<Vec<KeyPart>> {
        if let Handle::Integer(column) = handle {
            return Ok(vec![KeyPart { column: *column, prefix: 0 }]);
        }
        let Some(index) = self.primary_index() else { return Ok(Vec::new()) };
        let part = |part: &Json| -> Result<KeyPart> {
            let column = self.column_of(part)?.ok_or_else(|| invalid("has a primary key of a hidden column"))?;
            let length = part.get("length").and_then(Json::as_i64).unwrap_or(-1);
            Ok(KeyPart { column, prefix: u32::try_from(length).unwrap_or(0) })
        };
        items(index, "idx_cols").iter().map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn column(id: u64, name: &str, others: &str) -> String {
        let kind = r#"{"Tp": 3, "Flag": 0}"#;
        format!(r#"{{"id": {id}, "name": {{"O": "{name}"}}, "offset": {id}, "state": 5, "type": {kind}{others}}}"#)
    }

    fn table(columns: &[String], others: &str) -> Result<TidbTable> {
        let columns = columns.join(",");
        let json = format!(r#"{{"id": 8, "name": {{"O": "T"}}, "cols": [{columns}]{others}}}"#);
        TidbTable::read("shop", &serde_json::from_str(&json).unwrap())
    }

    fn names(table: &TidbTable) -> Vec<&str> {
        table.written.columns.iter().map(|column| column.name.as_str()).collect()
    }

    #[test]
    fn columns_that_rows_do_not_have_are_left_out() {
        let columns = [
            column(1, "plain", ""),
            column(2, "virtual", r#", "generated_expr_string": "`plain` + 1", "generated_stored": false"#),
            column(3, "stored", r#", "generated_expr_string": "`plain` + 1", "generated_stored": true"#),
            column(4, "dropped", "").replace(r#""state": 5"#, r#""state": 1"#),
            column(5, "last", ""),
        ];
        let table = table(&columns, "").unwrap();
        assert_eq!(names(&table), ["plain", "stored", "last"]);
        assert_eq!([table.column_of(5, 0), table.column_of(5, 2), table.column_of(2, 0)], [Some(2), Some(2), None]);
        assert_eq!(table.handle, Handle::RowId);
        assert!(table.written.primary_key.is_empty());
    }

    #[test]
    fn columns_stand_in_the_order_of_their_offsets() {
        let moved = column(3, "c", "").replace(r#""offset": 3"#, r#""offset": 0"#);
        let table = table(&[column(1, "a", ""), column(2, "b", ""), moved], "").unwrap();
        assert_eq!(names(&table), ["c", "a", "b"]);
    }

    #[test]
    fn parts_of_a_clustered_key_come_from_the_handle_unless_they_are_prefixes() {
        let columns = [column(1, "a", ""), column(2, "b", ""), column(3, "c", "")];
        let index = |clustered: bool| {
            format!(
                r#", "is_common_handle": {clustered}, "index_info": [
                {{"is_primary": false, "state": 5, "idx_cols": [{{"name": {{"O": "a"}}, "length": -1}}]}},
                {{"is_primary": true, "state": 5, "idx_cols": [{{"name": {{"O": "c"}}, "length": 4}},
                 {{"name": {{"O": "b"}}, "length": -1}}]}}]"#
            )
        };
        let expected_key = vec![KeyPart { column: 2, prefix: 4 }, KeyPart { column: 1, prefix: 0 }];
        let clustered = table(&columns, &index(true)).unwrap();
        assert_eq!(clustered.handle, Handle::Clustered(vec![None, Some(1)]));
        assert_eq!(clustered.written.primary_key, expected_key);
        let plain = table(&columns, &index(false)).unwrap();
        assert_eq!((plain.handle, plain.written.primary_key), (Handle::RowId, expected_key));
    }

    #[test]
    fn views_and_sequences_have_no_columns() {
        let unknown = [column(1, "a", "").replace(r#""Tp": 3"#, r#""Tp": 0"#)];
        assert!(names(&table(&unknown, r#", "view": {"view_select": "SELECT 1"}"#).unwrap()).is_empty());
        assert!(names(&table(&unknown, r#", "sequence": {"sequence_start": 1}"#).unwrap()).is_empty());
        assert!(table(&unknown, r#", "view": null"#).is_err());
    }

    #[test]
    fn definitions_that_contradict_themselves_are_refused() {
        for others in [r#", "pk_is_handle": true"#, r#", "is_common_handle": true"#] {
            let error = table(&[column(1, "a", "")], others).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::SchemaInvalid, "{others}");
        }
    }
}
