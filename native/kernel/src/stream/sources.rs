//! Determines a table's columns from the log and from declarations.

use crate::column::{DeclaredColumn, Kind};
use crate::emit::rows::SourceColumn;
use crate::error::{Error, ErrorKind, Result};
use crate::event::table_map::{LogColumn, TableMap};

/// Returns the columns if the log alone describes them.
pub(super) fn logged_columns(map: &TableMap) -> Result<Option<Vec<DeclaredColumn>>> {
    if !map.is_complete() {
        return Ok(None);
    }
    let mut columns = Vec::with_capacity(map.columns.len());
    for column in &map.columns {
        let kind = match Kind::from_wire(column.wire, &column.hints) {
            Ok(kind) => kind,
            // The log has the column's name but not this type, which only a declaration can supply.
            Err(error) if error.kind() == ErrorKind::SchemaUnknown => return Ok(None),
            Err(error) => return Err(error),
        };
        columns.push(DeclaredColumn {
            name: column.name.as_deref().unwrap_or_default().to_owned(),
            type_text: kind.type_text(),
            charset: column
                .hints
                .charset
                .filter(|charset| !charset.is_binary())
                .map(|charset| charset.name().to_owned()),
            nullable: column.nullable,
        });
    }
    Ok(Some(columns))
}

pub(super) fn declared_columns(columns: &[DeclaredColumn], mariadb: bool) -> Result<Vec<SourceColumn>> {
    columns
        .iter()
        .map(|column| Ok(SourceColumn { name: column.name.as_str().into(), kind: column.kind(mariadb)? }))
        .collect()
}

/// Returns the columns as the log describes them. MariaDB logs some types as plain strings. For these, the type is
/// taken from a declared column of the same name, if that type fits the table map.
pub(super) fn logged_sources(map: &TableMap, declared: &[DeclaredColumn], mariadb: bool) -> Result<Vec<SourceColumn>> {
    let column_name = |column: &LogColumn| {
        column.name.clone().ok_or_else(|| {
            Error::new(ErrorKind::SchemaUnknown, "the log does not name the columns")
                .hint("SET GLOBAL binlog_row_metadata = FULL on the server, or give `schemas`")
        })
    };
    map.columns
        .iter()
        .map(|column| {
            let name = column_name(column)?;
            let declared = declared.iter().filter(|_| mariadb).find(|declared| *declared.name == *name);
            let special_kind = declared.and_then(|declared| declared.kind(mariadb).ok()).filter(needs_declaration);
            let kind = match special_kind.and_then(|kind| kind.fit(column.wire).ok()) {
                Some(kind) => kind,
                None => Kind::from_wire(column.wire, &column.hints)?,
            };
            Ok(SourceColumn { name, kind })
        })
        .collect()
}

fn needs_declaration(kind: &Kind) -> bool {
    matches!(kind, Kind::Uuid | Kind::Inet4 | Kind::Inet6 | Kind::Vector { .. })
}

#[cfg(test)]
mod tests;
