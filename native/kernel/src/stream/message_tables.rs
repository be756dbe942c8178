//! Describes tables to dialects.

use super::proof::prove_column;
use crate::column::{DeclaredColumn, Kind};
use crate::emit::dialect::{MessageColumn, TableView};
use crate::emit::rows::SourceColumn;
use crate::emit::system::TableRef;
use crate::error::{Error, ErrorKind, Result};
use crate::event::table_map::{LogColumn, TableMap};

/// The key columns of a table, the columns to emit, and whether its rows have conditions.
pub(super) struct Keys<'a> {
    pub primary: &'a [String],
    pub shard: Option<&'a [String]>,
    pub wanted: Option<&'a [String]>,
    pub judged: bool,
}

/// Builds the view of a table for dialects. A declared type replaces the type in the log if the column has the same
/// name and the two types are compatible.
pub(super) fn table_view(
    table: &TableRef,
    map: &TableMap,
    sources: Vec<SourceColumn>,
    declared: Option<&[DeclaredColumn]>,
    keys: &Keys<'_>,
    mariadb: bool,
) -> Result<TableView> {
    let is_key = |name: &str| match map.primary_key.is_empty() {
        true => keys.primary.iter().any(|key| key == name),
        false => map.primary_key.iter().any(|key| **key == *name),
    };
    let column = |(source, logged): (SourceColumn, &LogColumn)| {
        let declaration = declared.unwrap_or_default().iter().find(|declared| *declared.name == *source.name);
        let fits = declaration.filter(|declaration| prove_column(declaration, logged, mariadb).is_ok());
        MessageColumn {
            type_text: match fits {
                Some(declared) => declared.type_text.as_str().into(),
                None => logged.geometry.map_or_else(|| source.kind.type_text(), str::to_owned).into(),
            },
            nullable: logged.nullable,
            is_key: is_key(&source.name),
            wanted: keys.wanted.is_none_or(|wanted| wanted.iter().any(|name| *name == *source.name)),
            name: source.name,
            kind: source.kind,
        }
    };
    let columns: Vec<MessageColumn> = sources.into_iter().zip(&map.columns).map(column).collect();
    let is_shard_column = |column: &MessageColumn| match keys.shard {
        Some(names) => names.iter().any(|name| *name == *column.name),
        None => column.is_key,
    };
    let has_column = |name: &String| columns.iter().any(|column| *name == *column.name);
    if let Some(missing) = keys.shard.unwrap_or_default().iter().find(|name| !has_column(name)) {
        let message = format!("rows are to be sharded by the column `{missing}`, which is not there");
        return Err(Error::new(ErrorKind::OptionInvalid, message)
            .hint("name columns of the table, or none to shard by its primary key"));
    }
    Ok(TableView {
        name: format!("{}.{}", table.database, table.table).into(),
        database: table.database.clone(),
        table: table.table.clone(),
        schema_version: table.schema_version,
        shard_columns: (0..columns.len()).filter(|at| columns.get(*at).is_some_and(is_shard_column)).collect(),
        json_columns: columns.iter().filter(|column| matches!(column.kind, Kind::Json { .. })).count(),
        columns,
        mariadb,
        judged: keys.judged,
    })
}
