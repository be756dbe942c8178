//! What a batch of changes says of its columns beside their arrays.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch};

use crate::emit::system;
use crate::error::{Error, ErrorKind, Result};

/// A column of a batch. Raises `OptionInvalid` for one that is not there.
pub(crate) fn array<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef> {
    batch.column_by_name(name).ok_or_else(|| no_column(name))
}

#[cold]
pub(crate) fn no_column(name: &str) -> Error {
    Error::new(ErrorKind::OptionInvalid, format!("there is no column `{name}` in these rows"))
        .hint("name columns that the table has after all steps before")
}

/// Values that their Arrow types cannot hold, by row.
pub(crate) struct Unheld<'a> {
    maps: &'a arrow_array::MapArray,
}

impl<'a> Unheld<'a> {
    /// What a batch tells of such values in `_metadata`; None where it tells of none.
    pub(crate) fn of(batch: &'a RecordBatch) -> Option<Unheld<'a>> {
        let metadata = batch.column_by_name(system::METADATA)?.as_struct_opt()?;
        let maps = metadata.column_by_name("unrepresentable")?.as_map_opt()?;
        (maps.null_count() < maps.len()).then_some(Unheld { maps })
    }

    /// The exact text of a row's value; None where its column holds it.
    pub(crate) fn text(&self, row: usize, column: &str) -> Option<&'a str> {
        if self.maps.is_null(row) {
            return None;
        }
        let ends = self.maps.value_offsets();
        let at = |place: usize| ends.get(place).and_then(|end| usize::try_from(*end).ok());
        let names = self.maps.keys().as_string_opt::<i32>()?;
        let texts = self.maps.values().as_string_opt::<i32>()?;
        (at(row)?..at(row + 1)?).find(|place| names.value(*place) == column).map(|place| texts.value(place))
    }
}
