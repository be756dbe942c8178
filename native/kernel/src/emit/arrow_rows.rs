//! Rows that are Arrow already, as dialects see rows: one value for each column, or none where the image had none.

use std::collections::HashMap;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ListArray, RecordBatch};

use crate::charset::Charset;
use crate::column::{json, noted, CellColumn, DeclaredColumn, Kind, Noted, Value};
use crate::emit::system;
use crate::emit::unheld::{array, Unheld};
use crate::error::Result;

/// One change in a batch: where its images stand, and which change of its transaction it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The row before it.
    pub before: Option<usize>,
    /// The row behind it.
    pub after: Option<usize>,
    /// Its number in its transaction.
    pub index: u32,
}

/// The table's own columns of a batch.
pub struct ArrowRows<'a> {
    columns: Vec<CellColumn<'a>>,
    names: Vec<&'a str>,
    style: json::JsonStyle,
    /// For each row the names of the columns that its image lacked, where there are such rows.
    absent: Option<&'a ListArray>,
    /// What columns cannot hold, by row and column.
    noted: HashMap<(usize, usize), Noted>,
}

impl<'a> ArrowRows<'a> {
    /// Reads the declared columns of a batch, with what `_metadata` tells of them. Raises `SchemaInvalid`,
    /// `OptionInvalid` and `ValueMalformed` where they are not what was declared.
    pub fn new(
        batch: &'a RecordBatch,
        declared: &'a [DeclaredColumn],
        mariadb: bool,
        style: json::JsonStyle,
    ) -> Result<ArrowRows<'a>> {
        let kinds = declared.iter().map(|column| column.kind(mariadb)).collect::<Result<Vec<Kind>>>()?;
        let mut columns = Vec::with_capacity(declared.len());
        for (column, kind) in declared.iter().zip(&kinds) {
            columns.push(CellColumn::new(&column.name, kind, array(batch, &column.name)?)?);
        }
        let names: Vec<&str> = declared.iter().map(|column| column.name.as_str()).collect();
        let noted = noted_values(batch, declared, &kinds)?;
        Ok(ArrowRows { columns, names, style, absent: absent(batch), noted })
    }

    /// The columns, with the kinds of their values.
    pub fn columns(&self) -> &[CellColumn<'a>] {
        &self.columns
    }

    /// Puts a row's values into `out`. Raises `ValueMalformed` for what a column's type cannot hold.
    pub fn image<'r>(&'r self, row: usize, out: &mut Vec<Option<Value<'r>>>) -> Result<()> {
        out.clear();
        for at in 0..self.columns.len() {
            out.push(self.cell(row, at)?);
        }
        Ok(())
    }

    /// One value of a row; None where its image had none. Raises what `image` raises.
    #[inline]
    pub fn cell(&self, row: usize, at: usize) -> Result<Option<Value<'_>>> {
        let (Some(column), Some(name)) = (self.columns.get(at), self.names.get(at)) else { return Ok(None) };
        if self.lacks(row, name) {
            return Ok(None);
        }
        if let Some(noted) = self.noted.get(&(row, at)) {
            return Ok(Some(noted.value()));
        }
        let value = match column.value(row) {
            Ok(Value::JsonText(text)) if self.style == json::JsonStyle::Canal => {
                json::restyle(&text).map(Value::JsonText)
            }
            value => value,
        };
        value.map(Some).map_err(|error| error.within(&format!("column `{name}`")))
    }

    fn lacks(&self, row: usize, name: &str) -> bool {
        let Some(lists) = self.absent.filter(|lists| !lists.is_null(row)) else { return false };
        lists.value(row).as_string_opt::<i32>().is_some_and(|names| names.iter().any(|lacking| lacking == Some(name)))
    }
}

fn absent(batch: &RecordBatch) -> Option<&ListArray> {
    let metadata = batch.column_by_name(system::METADATA)?.as_struct_opt()?;
    let lists = metadata.column_by_name("absent")?.as_list_opt::<i32>()?;
    (lists.null_count() < lists.len()).then_some(lists)
}

fn noted_values(
    batch: &RecordBatch,
    declared: &[DeclaredColumn],
    kinds: &[Kind],
) -> Result<HashMap<(usize, usize), Noted>> {
    let mut found = HashMap::new();
    let Some(unheld) = Unheld::of(batch) else { return Ok(found) };
    for (at, (column, kind)) in declared.iter().zip(kinds).enumerate() {
        let charset = column.charset.as_deref().and_then(Charset::from_name).unwrap_or(Charset::Utf8mb4);
        for row in 0..batch.num_rows() {
            if let Some(text) = unheld.text(row, &column.name) {
                let value = noted(text, kind, charset);
                found.insert((row, at), value.map_err(|error| error.within(&format!("column `{}`", column.name)))?);
            }
        }
    }
    Ok(found)
}
