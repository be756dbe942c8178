//! Checks table definitions against the log.

use super::open_tables::TableRequest;
use super::sources::logged_sources;
use crate::charset::Charset;
use crate::column::{DeclaredColumn, Form, Kind};
use crate::emit::rows::SourceColumn;
use crate::error::{Error, ErrorKind, Result};
use crate::event::table_map::{LogColumn, TableMap};

const HINT: &str = "the schema is not the one in force here; give the schema of this time in `schemas`";

fn mismatch(message: String) -> Error {
    Error::new(ErrorKind::SchemaMismatch, message).hint(HINT)
}

impl TableRequest {
    /// Checks a definition against everything that the table map contains.
    ///
    /// That is the number of columns, their types, lengths and nullability, and, if the server logs them, their signs,
    /// character sets, names and members, the primary key and visibility. The key is not checked if the definition has
    /// none, because a schema given by the caller may omit it. The visibility of a column is not checked if `visible`
    /// is unknown. Visibility does not affect values, but a mismatch shows that the definition is wrong. Raises
    /// `SchemaMismatch`, and `SchemaInvalid` for a type that cannot be parsed.
    pub fn prove(&self, columns: &[DeclaredColumn], primary_key: &[String], visible: &[Option<bool>]) -> Result<()> {
        let locate = |error: Error| {
            error.within(&format!("table `{}`.`{}`", self.database, self.table)).at(&self.file, self.offset)
        };
        self.check_definition(columns, primary_key)
            .and_then(|()| self.check_visibility(columns, visible))
            .map_err(locate)
    }

    fn check_visibility(&self, columns: &[DeclaredColumn], visible: &[Option<bool>]) -> Result<()> {
        for ((declared, visible), logged) in columns.iter().zip(visible).zip(&self.map.columns) {
            let (Some(visible), Some(logged)) = (visible, logged.visible) else { continue };
            if *visible != logged {
                let text = |visible| if visible { "VISIBLE" } else { "INVISIBLE" };
                let message = format!(
                    "column `{}`: declared as {}, but the log tells {}",
                    declared.name,
                    text(*visible),
                    text(logged)
                );
                return Err(mismatch(message));
            }
        }
        Ok(())
    }

    fn check_definition(&self, columns: &[DeclaredColumn], primary_key: &[String]) -> Result<()> {
        source_columns(&self.map, Some(columns), self.mariadb)?;
        if !self.map.is_complete() {
            return Ok(());
        }
        for (declared, logged) in columns.iter().zip(&self.map.columns) {
            prove_complete(declared, logged, self.mariadb)?;
        }
        let logged = self.map.primary_key.iter().map(|name| &**name);
        if !primary_key.is_empty() && !logged.eq(primary_key.iter().map(String::as_str)) {
            return Err(mismatch(format!(
                "the primary key is declared as ({}), but the log tells ({})",
                primary_key.join(", "),
                self.map.primary_key.join(", ")
            )));
        }
        Ok(())
    }
}

/// Checks the properties of a column that only FULL metadata logs: members, and the kind of geometry.
fn prove_complete(declared: &DeclaredColumn, logged: &LogColumn, mariadb: bool) -> Result<()> {
    let kind = declared.kind(mariadb)?;
    let differs = match (&kind, &logged.hints.values, logged.geometry) {
        (Kind::Enumeration { values, .. } | Kind::Set { values, .. }, Some(members), _) => values != members,
        (Kind::Geometry { .. }, _, Some(geometry)) => {
            let name = declared.type_text.to_ascii_lowercase();
            name != geometry && !(name == "geomcollection" && geometry == "geometrycollection")
        }
        _ => false,
    };
    if differs {
        let message =
            format!("column `{}`: declared as {}, but the log tells otherwise", declared.name, declared.type_text);
        return Err(mismatch(message));
    }
    Ok(())
}

/// Returns the columns of rows: those of the log, or the declared columns after checking them against the table map.
pub(super) fn source_columns(
    map: &TableMap,
    declared: Option<&[DeclaredColumn]>,
    mariadb: bool,
) -> Result<Vec<SourceColumn>> {
    let Some(declared) = declared else { return logged_sources(map, &[], mariadb) };
    if declared.len() != map.columns.len() {
        let message = format!("the schema has {} columns, the table map {}", declared.len(), map.columns.len());
        return Err(mismatch(message));
    }
    let columns = declared.iter().zip(&map.columns);
    columns
        .map(|(declared, logged)| {
            if let Some(name) = logged.name.as_deref().filter(|name| *name != declared.name) {
                let message = format!("the schema names a column `{}` where the log has `{name}`", declared.name);
                return Err(mismatch(message));
            }
            let kind = prove_column(declared, logged, mariadb);
            let kind = kind.map_err(|error| error.within(&format!("column `{}`", declared.name)))?;
            Ok(SourceColumn { name: declared.name.as_str().into(), kind })
        })
        .collect()
}

/// Returns how to read a column, after checking that type, length, nullability, sign and character set fit the log.
pub(super) fn prove_column(declared: &DeclaredColumn, logged: &LogColumn, mariadb: bool) -> Result<Kind> {
    let kind = declared.kind(mariadb)?;
    let fitting = kind.fit(logged.wire)?;
    prove_length(declared, &kind, &fitting)?;
    // If the log describes a column as nullable, a declaration as NOT NULL contradicts it. The reverse is not a
    // contradiction, because a schema given by the caller may omit NOT NULL, and TIMESTAMP implies it.
    if logged.nullable && !declared.nullable {
        return Err(mismatch(format!(
            "declared as {} NOT NULL, but the log tells that it may be null",
            declared.type_text
        )));
    }
    prove_described(fitting, logged)
}

/// Fails if the logged length differs from the declared length. Then either columns were swapped, or the character set
/// is different.
fn prove_length(declared: &DeclaredColumn, kind: &Kind, fitting: &Kind) -> Result<()> {
    let (Some((declared_form, charset)), Some((logged_form, _))) = (form_of(kind), form_of(fitting)) else {
        return Ok(());
    };
    let (declared_bytes, logged_bytes) = match (declared_form, logged_form) {
        (Form::Fixed(declared), Form::Fixed(logged)) | (Form::Varying(declared), Form::Varying(logged)) => {
            (declared, logged)
        }
        _ => return Ok(()),
    };
    // Text that is utf8mb3 on the server, with three bytes per character, may be declared as utf8mb4.
    let header = u32::from(matches!(kind, Kind::CompressedText { .. }));
    let (declared_text, logged_text) = (u32::from(declared_bytes) - header, u32::from(logged_bytes) - header);
    if declared_bytes == logged_bytes || charset == Some(Charset::Utf8mb4) && declared_text * 3 == logged_text * 4 {
        return Ok(());
    }
    let charset = charset.map_or_else(String::new, |charset| format!(" of the character set {}", charset.name()));
    let message = format!(
        "declared as {}{charset}, {declared_bytes} bytes, but the log tells {logged_bytes} bytes",
        declared.type_text
    );
    Err(mismatch(message))
}

fn form_of(kind: &Kind) -> Option<(Form, Option<Charset>)> {
    match kind {
        Kind::Text { form, .. } | Kind::CompressedText { form, .. } => Some((*form, charset_of(kind))),
        Kind::Binary { form, .. } | Kind::CompressedBinary { form, .. } => Some((*form, None)),
        _ => None,
    }
}

/// Fails if the logged sign or character set differs from the declaration. MySQL 8 logs both in every table map.
fn prove_described(kind: Kind, logged: &LogColumn) -> Result<Kind> {
    if !logged.described {
        return Ok(kind);
    }
    let logged_type = match (&kind, logged.hints.charset) {
        (Kind::Integer { unsigned, .. }, _) if *unsigned != logged.hints.unsigned => {
            if *unsigned { "a signed number" } else { "an unsigned number" }.to_owned()
        }
        // Text logged as utf8mb3 can be read as utf8mb4.
        (Kind::Text { charset: Charset::Utf8mb4, .. }, Some(Charset::Utf8mb3)) => return Ok(kind),
        (Kind::Text { charset, .. } | Kind::CompressedText { charset, .. }, Some(logged_charset))
            if *charset != logged_charset =>
        {
            format!("the character set {}", logged_charset.name())
        }
        (Kind::Binary { .. } | Kind::CompressedBinary { .. }, Some(logged_charset)) if !logged_charset.is_binary() => {
            format!("the character set {}", logged_charset.name())
        }
        _ => return Ok(kind),
    };
    let declared = match charset_of(&kind) {
        Some(charset) => format!("{} of the character set {}", kind.type_text(), charset.name()),
        None => kind.type_text(),
    };
    let message = format!("declared as {declared}, but the log tells {logged_type}");
    Err(mismatch(message))
}

/// Returns the character set of a text column.
pub(super) fn charset_of(kind: &Kind) -> Option<Charset> {
    match kind {
        Kind::Text { charset, .. } | Kind::CompressedText { charset, .. } => Some(*charset),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
