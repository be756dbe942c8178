//! Presents Arrow rows in the form that dialects expect: a value for each column, or none if the image did not have the
//! column.

use std::collections::HashMap;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ListArray, RecordBatch};

use crate::charset::Charset;
use crate::column::{json, noted, CellColumn, DeclaredColumn, Kind, Noted, Value};
use crate::emit::system;
use crate::emit::unrepresentable::{array, UnrepresentableValues};
use crate::error::Result;

/// A change in a batch: the rows that hold its images, and its number in its transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The row before the change.
    pub before: Option<usize>,
    /// The row after the change.
    pub after: Option<usize>,
    /// The number of the change in its transaction.
    pub index: u32,
}

/// The table's columns in a batch, without the system columns.
pub struct ArrowRows<'a> {
    columns: Vec<CellColumn<'a>>,
    names: Vec<&'a str>,
    style: json::JsonStyle,
    /// For each row, the names of the columns that its image lacked; None if every image was complete.
    absent: Option<&'a ListArray>,
    /// Values that their columns cannot represent, by row and column.
    noted: HashMap<(usize, usize), Noted>,
}

impl<'a> ArrowRows<'a> {
    /// Reads the declared columns of a batch, together with the values in `_metadata`. Raises `SchemaInvalid`,
    /// `OptionInvalid` and `ValueMalformed` if the batch or the metadata contradicts the declaration.
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

    /// Puts the values of a row into `out`. Raises `ValueMalformed` for values that are invalid for the column's
    /// type.
    pub fn image<'r>(&'r self, row: usize, out: &mut Vec<Option<Value<'r>>>) -> Result<()> {
        out.clear();
        for at in 0..self.columns.len() {
            out.push(self.cell(row, at)?);
        }
        Ok(())
    }

    /// Returns a value of a row; None if its image did not have the column. Raises the same errors as `image`.
    #[inline]
    pub fn cell(&self, row: usize, at: usize) -> Result<Option<Value<'_>>> {
        let (Some(column), Some(name)) = (self.columns.get(at), self.names.get(at)) else { return Ok(None) };
        if self.is_absent(row, name) {
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

    fn is_absent(&self, row: usize, name: &str) -> bool {
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
    let mut values = HashMap::new();
    let Some(unrepresentable) = UnrepresentableValues::of(batch) else { return Ok(values) };
    for (at, (column, kind)) in declared.iter().zip(kinds).enumerate() {
        let charset = column.charset.as_deref().and_then(Charset::from_name).unwrap_or(Charset::Utf8mb4);
        for row in 0..batch.num_rows() {
            if let Some(text) = unrepresentable.text(row, &column.name) {
                let value = noted(text, kind, charset);
                values.insert((row, at), value.map_err(|error| error.within(&format!("column `{}`", column.name)))?);
            }
        }
    }
    Ok(values)
}
