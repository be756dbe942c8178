//! Columns with the same value in every row, which are built once and reused.
//!
//! Most system columns are constant for all batches of a table: the database, the table, the file, and the list of
//! absent columns, which is usually null. Such a column is cached, and each batch gets a slice with as many rows as it
//! needs.

use arrow_array::{new_null_array, Array, ArrayRef, StringArray};
use arrow_schema::DataType;
use std::sync::Arc;

/// Number of cache slots for text columns and for null columns.
const TEXTS: usize = 5;
const NULLS: usize = 2;

/// The cached columns, by slots that the caller assigns.
#[derive(Default)]
pub(super) struct Constants {
    texts: [Option<(Box<str>, ArrayRef)>; TEXTS],
    nulls: [Option<ArrayRef>; NULLS],
}

impl Constants {
    /// Returns a column that repeats a text `rows` times.
    pub(super) fn text(&mut self, slot: usize, text: &str, rows: usize) -> ArrayRef {
        let make = || -> ArrayRef {
            let values = StringArray::from_iter_values(std::iter::repeat_n(text, padded_length(rows)));
            Arc::new(values)
        };
        let Some(cached) = self.texts.get_mut(slot) else { return make().slice(0, rows) };
        match cached {
            Some((same, array)) if **same == *text && array.len() >= rows => array.slice(0, rows),
            _ => cached.insert((text.into(), make())).1.slice(0, rows),
        }
    }

    /// Returns a column with `rows` nulls of a type; each slot must always have the same type.
    pub(super) fn nulls(&mut self, slot: usize, data_type: &DataType, rows: usize) -> ArrayRef {
        let make = || new_null_array(data_type, padded_length(rows));
        let Some(cached) = self.nulls.get_mut(slot) else { return make().slice(0, rows) };
        match cached {
            Some(array) if array.len() >= rows => array.slice(0, rows),
            _ => cached.insert(make()).slice(0, rows),
        }
    }
}

/// Round the length up. Batches vary a little in length, and a slightly longer batch can then reuse the column.
fn padded_length(rows: usize) -> usize {
    rows + rows / 8
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;

    use super::*;

    #[test]
    fn texts_are_rebuilt_only_if_they_change_or_are_too_short() {
        let mut constants = Constants::default();
        let address = |array: &ArrayRef| array.as_string::<i32>().value_data().as_ptr();
        let first = constants.text(0, "shop", 80);
        let second = constants.text(0, "shop", 90);
        assert_eq!(address(&first), address(&second));
        assert_eq!((first.len(), second.len()), (80, 90));
        for (text, rows) in [("shop", 1000), ("", 3), ("other", 3), ("other", 0)] {
            let array = constants.text(0, text, rows);
            assert_eq!(array.len(), rows);
            assert!(array.as_string::<i32>().iter().all(|value| value == Some(text)));
        }
    }

    #[test]
    fn null_columns_have_the_requested_length() {
        let mut constants = Constants::default();
        for rows in [10, 11, 5, 100] {
            let array = constants.nulls(0, &DataType::Utf8, rows);
            assert_eq!((array.len(), array.null_count()), (rows, rows));
        }
    }
}
