//! Groups rows that must keep their order: rows that share a key value, directly or through other rows.

use std::collections::hash_map::{DefaultHasher, Entry};
use std::collections::HashMap;
use std::hash::Hasher;

use arrow_array::{Int32Array, RecordBatch};

use super::cell::{Cell, Cells};
use super::{find_cells, fold};
use crate::error::{Error, ErrorKind, Result};

/// Returns the group of each row.
///
/// Rows that share a value of any key, directly or through other rows, form a group. Groups are numbered from 0 in the
/// order of their first rows. A key that contains a null never groups rows. Texts are compared as the most permissive
/// collation compares them, so groups may be larger than necessary but never smaller. Raises `OptionInvalid` if a
/// column is missing from the batch.
pub fn key_groups(batch: &RecordBatch, keys: &[Vec<String>]) -> Result<Int32Array> {
    let rows = batch.num_rows();
    if i32::try_from(rows).is_err() {
        return Err(Error::new(ErrorKind::OptionInvalid, "more rows than a group's number can tell apart"));
    }
    let mut forest = Forest::new(rows);
    for key in keys {
        let cells = find_cells(batch, key)?;
        let mut seen = HashMap::with_capacity(rows);
        let mut text = Vec::new();
        for row in 0..rows {
            text.clear();
            match write_key(&cells, row, &mut text) {
                KeyValue::Value => match seen.entry(hash(&text)) {
                    Entry::Occupied(first) => forest.join(*first.get(), row),
                    Entry::Vacant(vacant) => {
                        vacant.insert(row);
                    }
                },
                KeyValue::Null => {}
                KeyValue::Ambiguous => {
                    // The value may equal any other value, so keep all rows together.
                    (1..rows).for_each(|row| forest.join(0, row));
                    break;
                }
            }
        }
    }
    Ok(forest.group_numbers())
}

enum KeyValue {
    Value,
    Null,
    Ambiguous,
}

fn hash(text: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(text);
    hasher.finish()
}

/// Appends the bytes that identify a key value.
fn write_key(cells: &[Cells<'_>], row: usize, out: &mut Vec<u8>) -> KeyValue {
    for cells in cells {
        match cells.get(row) {
            Cell::Null => return KeyValue::Null,
            Cell::Unrepresentable(text) => out.extend_from_slice(text.as_bytes()),
            Cell::Int(value) => out.extend_from_slice(&value.to_le_bytes()),
            Cell::Decimal(value, _) => out.extend_from_slice(&value.to_le_bytes()),
            // 0.0 and -0.0 must give the same key.
            Cell::Single(value) => out.extend_from_slice(&(value + 0.0).to_le_bytes()),
            Cell::Double(value) => out.extend_from_slice(&(value + 0.0).to_le_bytes()),
            Cell::Date(value) => out.extend_from_slice(&value.to_le_bytes()),
            Cell::Span(value) | Cell::Timestamp(value, _) => out.extend_from_slice(&value.to_le_bytes()),
            Cell::Bytes(bytes) => out.extend_from_slice(bytes),
            Cell::Vector(values) => values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes())),
            Cell::Text(text) => {
                if !fold::fold(text, out) {
                    return KeyValue::Ambiguous;
                }
            }
        }
        // Separate the parts of a key, so that keys with the same bytes but different parts differ.
        out.push(0xff);
    }
    KeyValue::Value
}

/// A union-find forest of rows.
struct Forest {
    parents: Vec<usize>,
}

impl Forest {
    fn new(rows: usize) -> Forest {
        Forest { parents: (0..rows).collect() }
    }

    fn root(&mut self, mut row: usize) -> usize {
        while let Some(parents) = self.parents.get(row).copied().filter(|parents| *parents != row) {
            let next = self.parents.get(parents).copied().unwrap_or(parents);
            if let Some(parent) = self.parents.get_mut(row) {
                *parent = next;
            }
            row = next;
        }
        row
    }

    /// Joins two sets. The lower of their roots becomes the root, so the root of a set is its first row.
    fn join(&mut self, left: usize, right: usize) {
        let (left, right) = (self.root(left), self.root(right));
        if let Some(parent) = self.parents.get_mut(left.max(right)) {
            *parent = left.min(right);
        }
    }

    fn group_numbers(mut self) -> Int32Array {
        let mut group_numbers: Vec<i32> = Vec::with_capacity(self.parents.len());
        let mut next = 0;
        for row in 0..self.parents.len() {
            let root = self.root(row);
            match group_numbers.get(root) {
                Some(number) => group_numbers.push(*number),
                None => {
                    group_numbers.push(next);
                    next += 1;
                }
            }
        }
        Int32Array::from(group_numbers)
    }
}
