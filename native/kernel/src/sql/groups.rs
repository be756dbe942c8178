//! Rows that must keep their order: those that share a value of a key, with one another and so on.

use std::collections::hash_map::{DefaultHasher, Entry};
use std::collections::HashMap;
use std::hash::Hasher;

use arrow_array::{Int32Array, RecordBatch};

use super::cell::{Cell, Cells};
use super::{cells_of, fold};
use crate::error::{Error, ErrorKind, Result};

/// The group of each row: the connected components of rows over the values of every key, numbered from 0 in the order
/// of their first rows.
///
/// A key with a null in it is shared with nobody. Texts are compared as the most generous collation does, so groups may
/// be larger than they need to be, and never smaller. Raises `OptionInvalid` for a column that the batch lacks.
pub fn key_groups(batch: &RecordBatch, keys: &[Vec<String>]) -> Result<Int32Array> {
    let rows = batch.num_rows();
    if i32::try_from(rows).is_err() {
        return Err(Error::new(ErrorKind::OptionInvalid, "more rows than a group's number can tell apart"));
    }
    let mut forest = Forest::new(rows);
    for key in keys {
        let cells = cells_of(batch, key)?;
        let mut seen = HashMap::with_capacity(rows);
        let mut text = Vec::new();
        for row in 0..rows {
            text.clear();
            match value(&cells, row, &mut text) {
                Found::Value => match seen.entry(hash(&text)) {
                    Entry::Occupied(first) => forest.join(*first.get(), row),
                    Entry::Vacant(place) => {
                        place.insert(row);
                    }
                },
                Found::Null => {}
                Found::Doubt => {
                    // It may be the same as any other, so all of them stay together.
                    (1..rows).for_each(|row| forest.join(0, row));
                    break;
                }
            }
        }
    }
    Ok(forest.numbers())
}

enum Found {
    Value,
    Null,
    Doubt,
}

fn hash(text: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(text);
    hasher.finish()
}

/// Adds the bytes by which a key is the same as another one.
fn value(cells: &[Cells<'_>], row: usize, out: &mut Vec<u8>) -> Found {
    for cells in cells {
        match cells.at(row) {
            Cell::Null => return Found::Null,
            Cell::Spare(text) => out.extend_from_slice(text.as_bytes()),
            Cell::Int(value) => out.extend_from_slice(&value.to_le_bytes()),
            Cell::Decimal(value, _) => out.extend_from_slice(&value.to_le_bytes()),
            // The two zeros are one key.
            Cell::Single(value) => out.extend_from_slice(&(value + 0.0).to_le_bytes()),
            Cell::Double(value) => out.extend_from_slice(&(value + 0.0).to_le_bytes()),
            Cell::Date(value) => out.extend_from_slice(&value.to_le_bytes()),
            Cell::Span(value) | Cell::Moment(value, _) => out.extend_from_slice(&value.to_le_bytes()),
            Cell::Bytes(bytes) => out.extend_from_slice(bytes),
            Cell::Vector(values) => values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes())),
            Cell::Text(text) => {
                if !fold::fold(text, out) {
                    return Found::Doubt;
                }
            }
        }
        // What ends here must not be taken for the beginning of the next.
        out.push(0xff);
    }
    Found::Value
}

/// Sets of rows that are joined.
struct Forest {
    above: Vec<usize>,
}

impl Forest {
    fn new(rows: usize) -> Forest {
        Forest { above: (0..rows).collect() }
    }

    fn root(&mut self, mut row: usize) -> usize {
        while let Some(above) = self.above.get(row).copied().filter(|above| *above != row) {
            let next = self.above.get(above).copied().unwrap_or(above);
            if let Some(place) = self.above.get_mut(row) {
                *place = next;
            }
            row = next;
        }
        row
    }

    /// The lower of two roots stays one, so a set's root is its first row.
    fn join(&mut self, one: usize, other: usize) {
        let (one, other) = (self.root(one), self.root(other));
        if let Some(place) = self.above.get_mut(one.max(other)) {
            *place = one.min(other);
        }
    }

    fn numbers(mut self) -> Int32Array {
        let mut numbers: Vec<i32> = Vec::with_capacity(self.above.len());
        let mut next = 0;
        for row in 0..self.above.len() {
            let root = self.root(row);
            match numbers.get(root) {
                Some(number) => numbers.push(*number),
                None => {
                    numbers.push(next);
                    next += 1;
                }
            }
        }
        Int32Array::from(numbers)
    }
}
