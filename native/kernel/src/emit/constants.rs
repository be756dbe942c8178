//! Columns that hold one value in every row, made once and handed over again and again.
//!
//! Most of what system columns say is the same for all rows of a table's batches: the database, the table, the file,
//! and that nothing is absent. Such a column is kept, and a batch gets as much of it as it has rows.

use arrow_array::{new_null_array, Array, ArrayRef, StringArray};
use arrow_schema::DataType;
use std::sync::Arc;

/// How many columns of texts there are, and how many of nulls.
const TEXTS: usize = 5;
const NULLS: usize = 2;

/// The columns made last, by the caller's own numbers.
#[derive(Default)]
pub(super) struct Constants {
    texts: [Option<(Box<str>, ArrayRef)>; TEXTS],
    nulls: [Option<ArrayRef>; NULLS],
}

impl Constants {
    /// `rows` times the same text.
    pub(super) fn text(&mut self, slot: usize, text: &str, rows: usize) -> ArrayRef {
        let make = || -> ArrayRef {
            let values = StringArray::from_iter_values(std::iter::repeat_n(text, with_room(rows)));
            Arc::new(values)
        };
        let Some(held) = self.texts.get_mut(slot) else { return make().slice(0, rows) };
        match held {
            Some((same, array)) if **same == *text && array.len() >= rows => array.slice(0, rows),
            _ => held.insert((text.into(), make())).1.slice(0, rows),
        }
    }

    /// `rows` nulls of a type; the caller's number stands for one type.
    pub(super) fn nulls(&mut self, slot: usize, data_type: &DataType, rows: usize) -> ArrayRef {
        let make = || new_null_array(data_type, with_room(rows));
        let Some(held) = self.nulls.get_mut(slot) else { return make().slice(0, rows) };
        match held {
            Some(array) if array.len() >= rows => array.slice(0, rows),
            _ => held.insert(make()).slice(0, rows),
        }
    }
}

/// Batches differ a little in length; the next longer one need not begin anew.
fn with_room(rows: usize) -> usize {
    rows + rows / 8
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;

    use super::*;

    #[test]
    fn a_text_is_made_again_only_where_it_changes_or_is_too_short() {
        let mut constants = Constants::default();
        let place = |array: &ArrayRef| array.as_string::<i32>().value_data().as_ptr();
        let first = constants.text(0, "shop", 80);
        let second = constants.text(0, "shop", 90);
        assert_eq!(place(&first), place(&second));
        assert_eq!((first.len(), second.len()), (80, 90));
        for (text, rows) in [("shop", 1000), ("", 3), ("other", 3), ("other", 0)] {
            let array = constants.text(0, text, rows);
            assert_eq!(array.len(), rows);
            assert!(array.as_string::<i32>().iter().all(|value| value == Some(text)));
        }
    }

    #[test]
    fn nulls_are_as_many_as_asked_for() {
        let mut constants = Constants::default();
        for rows in [10, 11, 5, 100] {
            let array = constants.nulls(0, &DataType::Utf8, rows);
            assert_eq!((array.len(), array.null_count()), (rows, rows));
        }
    }
}
