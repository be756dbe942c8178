//! Values in a batch's `_metadata` that their columns cannot represent.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch};

use crate::emit::system;
use crate::error::{Error, ErrorKind, Result};

/// Finds a column of a batch. Raises `OptionInvalid` if it is missing.
pub(crate) fn array<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef> {
    batch.column_by_name(name).ok_or_else(|| no_column(name))
}

#[cold]
pub(crate) fn no_column(name: &str) -> Error {
    Error::new(ErrorKind::OptionInvalid, format!("there is no column `{name}` in these rows"))
        .hint("name columns that the table has after all steps before")
}

/// The values that their Arrow types cannot represent, by row.
pub(crate) struct UnrepresentableValues<'a> {
    maps: &'a arrow_array::MapArray,
}

impl<'a> UnrepresentableValues<'a> {
    /// Finds the unrepresentable values in the `_metadata` of a batch; None if there are none.
    pub(crate) fn of(batch: &'a RecordBatch) -> Option<UnrepresentableValues<'a>> {
        let metadata = batch.column_by_name(system::METADATA)?.as_struct_opt()?;
        let maps = metadata.column_by_name("unrepresentable")?.as_map_opt()?;
        (maps.null_count() < maps.len()).then_some(UnrepresentableValues { maps })
    }

    /// Returns the exact text of a row's value; None if its column represents it.
    pub(crate) fn text(&self, row: usize, column: &str) -> Option<&'a str> {
        if self.maps.is_null(row) {
            return None;
        }
        let ends = self.maps.value_offsets();
        let at = |index: usize| ends.get(index).and_then(|end| usize::try_from(*end).ok());
        let names = self.maps.keys().as_string_opt::<i32>()?;
        let texts = self.maps.values().as_string_opt::<i32>()?;
        (at(row)?..at(row + 1)?).find(|index| names.value(*index) == column).map(|index| texts.value(index))
    }
}
