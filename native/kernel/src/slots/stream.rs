//! Small batches as Arrow streams for subscribers, with the rows of some shards.
//!
//! A piece at the head of a log has a few rows, and passing their columns to another Arrow library takes longer than
//! everything that is done with them.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, Int16Array, RecordBatch, UInt32Array};
use arrow_ipc::writer::{IpcWriteOptions, StreamWriter};
use arrow_ipc::MetadataVersion;
use arrow_schema::{ArrowError, DataType, Field, Schema};
use arrow_select::take::{take, take_record_batch};

use crate::emit::system;
use crate::error::{Error, ErrorKind, Result};

/// The column with the slot of each row.
pub const SLOT: &str = "_shard_slot";

const PREIMAGE: &str = "update_preimage";
const POSTIMAGE: &str = "update_postimage";
/// Where a reader requires buffers to start.
const ALIGNMENT: usize = 8;

/// The rows of some of `count` shards. Shards are numbers below `count`.
#[derive(Debug, Clone, Copy)]
pub struct Shards<'a> {
    /// The columns that determine the shard of a row; without columns, the name of its table does.
    pub columns: &'a [String],
    /// The number of shards.
    pub count: i16,
    /// The requested shards, in ascending order.
    pub of: &'a [i16],
    /// Whether the rows of each shard are adjacent, ordered by shard. Otherwise the rows keep their order.
    pub grouped: bool,
}

/// Returns the rows of a batch as an Arrow stream, and their number. With `shards`, these are the rows of the shards,
/// and the column [`SLOT`] has the slot of each; the stream is empty if there are none. Returns None if an update moves
/// a row to another shard, or if images lack columns.
///
/// Raises `OptionInvalid` as [`super::slots`] does.
pub fn stream(batch: &RecordBatch, table: &str, shards: Option<Shards<'_>>) -> Result<Option<(Vec<u8>, usize)>> {
    let Some(shards) = shards else {
        return Ok(Some((encode(batch)?, batch.num_rows())));
    };
    if shards.count < 1 || has_absent(batch) {
        return Ok(None);
    }
    let slots = super::slots(batch, shards.columns, table)?;
    if has_move(batch, &slots, shards.count) {
        return Ok(None);
    }
    let chosen = chosen(&slots, shards);
    if chosen.is_empty() {
        return Ok(Some((Vec::new(), 0)));
    }
    let is_whole = chosen.len() == batch.num_rows() && chosen.is_sorted();
    let (rows, slots) = if is_whole {
        (batch.clone(), Arc::new(slots) as ArrayRef)
    } else {
        let indexes = UInt32Array::from(chosen);
        let rows = take_record_batch(batch, &indexes).map_err(|error| failed(&error))?;
        (rows, take(&slots, &indexes, None).map_err(|error| failed(&error))?)
    };
    let mut fields: Vec<Arc<Field>> = rows.schema().fields().iter().cloned().collect();
    fields.push(Arc::new(Field::new(SLOT, DataType::Int16, true)));
    let mut columns = rows.columns().to_vec();
    columns.push(slots);
    let rows = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).map_err(|error| failed(&error))?;
    Ok(Some((encode(&rows)?, rows.num_rows())))
}

/// Returns the rows of the requested shards, by their index.
fn chosen(slots: &Int16Array, shards: Shards<'_>) -> Vec<u32> {
    let mut chosen: Vec<(i16, u32)> = (0u32..)
        .zip(slots.values())
        .map(|(row, slot)| (slot.rem_euclid(shards.count), row))
        .filter(|(shard, _)| shards.of.binary_search(shard).is_ok())
        .collect();
    if shards.grouped {
        // The sort is stable, so the rows of a shard keep their order.
        chosen.sort_by_key(|(shard, _)| *shard);
    }
    chosen.into_iter().map(|(_, row)| row).collect()
}

/// Whether any image lacks columns.
fn has_absent(batch: &RecordBatch) -> bool {
    let metadata = batch.column_by_name(system::METADATA).and_then(|metadata| metadata.as_struct_opt());
    let absent = metadata.and_then(|metadata| metadata.column_by_name("absent"));
    absent.is_some_and(|absent| absent.null_count() < absent.len())
}

/// Whether the two images of an update belong to different shards, or the kinds of changes are not known.
fn has_move(batch: &RecordBatch, slots: &Int16Array, count: i16) -> bool {
    let kinds = batch.column_by_name(system::CHANGE_TYPE).and_then(|kinds| kinds.as_string_opt::<i32>());
    let Some(kinds) = kinds else { return true };
    (1..batch.num_rows()).any(|row| {
        kinds.value(row) == POSTIMAGE
            && kinds.value(row - 1) == PREIMAGE
            && slots.value(row).rem_euclid(count) != slots.value(row - 1).rem_euclid(count)
    })
}

fn encode(rows: &RecordBatch) -> Result<Vec<u8>> {
    let write = || -> std::result::Result<Vec<u8>, ArrowError> {
        let options = IpcWriteOptions::try_new(ALIGNMENT, false, MetadataVersion::V5)?;
        let buffer = Vec::with_capacity(2048 + rows.get_array_memory_size());
        let mut writer = StreamWriter::try_new_with_options(buffer, rows.schema().as_ref(), options)?;
        writer.write(rows)?;
        writer.into_inner()
    };
    write().map_err(|error| failed(&error))
}

#[cold]
fn failed(error: &ArrowError) -> Error {
    Error::new(ErrorKind::ValueMalformed, format!("rows that are no Arrow stream: {error}"))
}

#[cfg(test)]
mod tests {
    use arrow_array::types::Int32Type;
    use arrow_array::{Int64Array, ListArray, StringArray, StructArray};
    use arrow_ipc::reader::StreamReader;

    use super::*;

    /// Rows of a table with the given ids and kinds of changes. `lacks` says that an image lacks columns.
    fn rows(changes: &[(i64, &str)], lacks: bool) -> RecordBatch {
        let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(changes.iter().map(|(id, _)| *id)));
        let kinds: ArrayRef = Arc::new(StringArray::from_iter_values(changes.iter().map(|(_, kind)| *kind)));
        let lists = changes.iter().map(|_| lacks.then(|| vec![Some(1)]));
        let absent: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists));
        let metadata =
            StructArray::from(vec![(Arc::new(Field::new("absent", absent.data_type().clone(), true)), absent)]);
        let columns = [("id", ids), (system::CHANGE_TYPE, kinds), (system::METADATA, Arc::new(metadata) as ArrayRef)];
        RecordBatch::try_from_iter(columns).unwrap()
    }

    /// Returns the ids and slots in the stream of some shards, in order; None if there is no stream.
    fn ids(batch: &RecordBatch, count: i16, of: &[i16], grouped: bool) -> Option<Vec<(i64, i16)>> {
        let columns = ["id".to_owned()];
        let shards = Shards { columns: &columns, count, of, grouped };
        let (content, rows) = stream(batch, "shop.orders", Some(shards)).unwrap()?;
        if rows == 0 {
            assert!(content.is_empty());
            return Some(vec![]);
        }
        let read = StreamReader::try_new(content.as_slice(), None).unwrap().next().unwrap().unwrap();
        assert_eq!(read.num_rows(), rows);
        let ids = read.column_by_name("id").unwrap().as_primitive::<arrow_array::types::Int64Type>();
        let slots = read.column_by_name(SLOT).unwrap().as_primitive::<arrow_array::types::Int16Type>();
        Some(ids.values().iter().copied().zip(slots.values().iter().copied()).collect())
    }

    fn slot(id: i64) -> i16 {
        crate::shard::slot_of_number(id)
    }

    #[test]
    fn rows_are_selected_by_shard_and_grouped_on_request() {
        let all: Vec<(i64, &str)> = (0..20).map(|id| (id, "insert")).collect();
        let batch = rows(&all, false);
        let expected: Vec<(i64, i16)> = (0..20).map(|id| (id, slot(id))).collect();
        assert_eq!(ids(&batch, 4, &[0, 1, 2, 3], false).unwrap(), expected);
        let some: Vec<(i64, i16)> = expected.iter().copied().filter(|(_, slot)| [1, 3].contains(&(slot % 4))).collect();
        assert_eq!(ids(&batch, 4, &[1, 3], false).unwrap(), some);
        let mut grouped = some;
        grouped.sort_by_key(|(_, slot)| slot % 4);
        assert_eq!(ids(&batch, 4, &[1, 3], true).unwrap(), grouped);
        assert_eq!(ids(&rows(&all[..1], false), 2, &[1 - slot(0) % 2], true).unwrap(), []);
    }

    #[test]
    fn moves_and_missing_columns_are_left_to_the_caller() {
        let (first, other) = (0..).zip(1..).find(|(id, next)| slot(*id) % 2 != slot(*next) % 2).unwrap();
        let moved = [(first, PREIMAGE), (other, POSTIMAGE)];
        assert_eq!(ids(&rows(&moved, false), 2, &[0, 1], true), None);
        let stays = [(first, PREIMAGE), (first, POSTIMAGE), (other, "insert")];
        assert_eq!(ids(&rows(&stays, false), 2, &[0, 1], false).unwrap().len(), 3);
        assert_eq!(ids(&rows(&stays, true), 2, &[0, 1], false), None);
        assert_eq!(ids(&rows(&stays, false), 0, &[], false), None);
    }

    #[test]
    fn without_shards_all_rows_are_encoded_without_slots() {
        let batch = rows(&[(1, "insert"), (2, "delete")], true);
        let (content, rows) = stream(&batch, "shop.orders", None).unwrap().unwrap();
        assert_eq!(rows, 2);
        let read = StreamReader::try_new(content.as_slice(), None).unwrap().next().unwrap().unwrap();
        assert_eq!(read, batch);
    }
}
