//! Iterates over the rows of a rows event. Each image has a value for each column of the table. Changes in Arrow form
//! are iterated in the same way.

use crate::column::json::JsonStyle;
use crate::column::{json, write_unsigned_integer, Kind, Value};
use crate::cursor::Cursor;
use crate::emit::arrow_rows::{ArrowRows, Pair};
use crate::emit::dialect::TableView;
use crate::emit::rows::RowsView;
use crate::emit::verdicts::visible_change;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::rows::{self, bit, PartialHead};
use crate::event::{Change, EventKind};
use crate::shard::{self, TextKey};

/// An image: an entry for each column of the table. An entry is `None` if the image does not contain the column or the
/// column is not selected, and `Value::Null` for NULL.
pub type Image<'r, 'a> = &'r [Option<Value<'a>>];

/// A change.
#[derive(Debug)]
pub struct Row<'r, 'a> {
    /// The image before an update or a delete.
    pub before: Option<Image<'r, 'a>>,
    /// The image after an insert or an update.
    pub after: Option<Image<'r, 'a>>,
    /// The slot of the after image, or of a delete's before image.
    pub slot: i16,
    /// The slot of the before image, if that image is written separately; an error if it lacks a shard column.
    pub slot_before: Result<i16>,
    /// The number of the change in its transaction, counted from 0.
    pub index: u32,
}

impl Row<'_, '_> {
    /// Returns the kind of change. It differs from that of the event if a single image of an update is visible.
    pub fn change(&self) -> Change {
        match (self.before, self.after) {
            (None, _) => Change::Insert,
            (Some(_), None) => Change::Delete,
            (Some(_), Some(_)) => Change::Update,
        }
    }
}

/// The changes of a rows event.
pub struct Images<'a, 't> {
    table: &'t TableView,
    rows: RowsView<'a>,
    change: Change,
    style: JsonStyle,
    cursor: Cursor<'a>,
    first: Vec<Option<Value<'a>>>,
    second: Vec<Option<Value<'a>>>,
    /// Whether some columns are not selected.
    hidden: bool,
    changes: u32,
    scratch: Vec<u8>,
    /// The visible images of each change, if the rows have conditions: see [`visible_change`].
    visible: Option<&'t [u8]>,
    /// The remaining changes, if they are in Arrow form instead of an event.
    arrow: Option<(&'a ArrowRows<'a>, std::slice::Iter<'a, Pair>)>,
}

impl<'a, 't> Images<'a, 't> {
    /// Starts before the first change. Raises `EventMalformed` if the event does not have this table's number of
    /// columns.
    pub fn new(table: &'t TableView, rows: RowsView<'a>, style: JsonStyle) -> Result<Images<'a, 't>> {
        let change = rows.kind.change().ok_or_else(|| malformed("no rows event"))?;
        let width = table.columns.len();
        if rows.head.width != width {
            let message = format!("a rows event of {} columns for a table map of {width}", rows.head.width);
            return Err(malformed(message));
        }
        Ok(Images {
            table,
            rows,
            change,
            style,
            cursor: Cursor::new(rows.images),
            first: Vec::with_capacity(width),
            second: Vec::with_capacity(if change == Change::Update { width } else { 0 }),
            hidden: table.columns.iter().any(|column| !column.wanted),
            changes: 0,
            scratch: Vec::new(),
            visible: None,
            arrow: None,
        })
    }

    /// Returns only visible images; `codes` has the visible images of each change.
    #[must_use]
    pub fn visible(mut self, codes: &'t [u8]) -> Images<'a, 't> {
        self.visible = Some(codes);
        self
    }

    /// Starts before the first change in Arrow form. All changes are of the same kind, and `pairs` locates their
    /// images.
    pub fn of_arrow(
        table: &'t TableView,
        rows: &'a ArrowRows<'a>,
        pairs: &'a [Pair],
        change: Change,
    ) -> Images<'a, 't> {
        Images {
            table,
            rows: RowsView::of_no_event(),
            change,
            style: JsonStyle::Server,
            cursor: Cursor::new(&[]),
            first: Vec::new(),
            second: Vec::new(),
            hidden: false,
            changes: 0,
            scratch: Vec::new(),
            visible: None,
            arrow: Some((rows, pairs.iter())),
        }
    }

    /// The kind of change of the event.
    pub fn change(&self) -> Change {
        self.change
    }

    /// The table id in the event; 0 if there is no event.
    pub fn table_id(&self) -> u64 {
        self.rows.head.table_id
    }

    /// Number of changes read so far, including those emitted before a reconnect.
    pub fn changes(&self) -> u32 {
        self.changes
    }

    /// Returns the next change, or `None` after the last.
    ///
    /// Raises `EventMalformed` and `ValueMalformed` if the bytes are not an image of the table.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Row<'_, 'a>>> {
        if self.arrow.is_some() {
            return self.next_arrow();
        }
        loop {
            if self.cursor.is_empty() {
                return Ok(None);
            }
            let left = self.cursor.remaining();
            self.read_first()?;
            if self.change == Change::Update {
                self.read_second()?;
            }
            if self.cursor.remaining() == left {
                return Err(malformed("row images without bytes"));
            }
            let index = self.rows.row_first + self.changes;
            let change = self.visible_change()?;
            self.changes += 1;
            // Skip changes that were emitted before a reconnect.
            let is_new = index >= self.rows.resume_rows;
            if let (true, Some(change)) = (is_new, change) {
                return self.row(index, change).map(Some);
            }
        }
    }

    /// Returns the kind of the next change, given its visible images; None if no image is visible.
    #[inline]
    fn visible_change(&self) -> Result<Option<Change>> {
        let Some(codes) = self.visible else { return Ok(Some(self.change)) };
        let code = codes.get(self.changes as usize).ok_or_else(|| unjudged(self.table))?;
        visible_change(self.change, *code)
    }

    fn row(&mut self, index: u32, change: Change) -> Result<Row<'_, 'a>> {
        let slot = self.slot()?;
        let slot_before = self.slot_before(slot);
        if self.hidden {
            for (at, column) in self.table.columns.iter().enumerate().filter(|(_, column)| !column.wanted) {
                let _ = column;
                for image in [&mut self.first, &mut self.second] {
                    if let Some(cell) = image.get_mut(at) {
                        *cell = None;
                    }
                }
            }
        }
        Ok(self.shown(change, slot, slot_before, index))
    }

    fn shown(&self, change: Change, slot: i16, slot_before: Result<i16>, index: u32) -> Row<'_, 'a> {
        let last = if self.change == Change::Update { &self.second } else { &self.first };
        let (before, after) = match change {
            Change::Insert => (None, Some(last.as_slice())),
            Change::Delete => (Some(self.first.as_slice()), None),
            Change::Update => (Some(self.first.as_slice()), Some(last.as_slice())),
        };
        Row { before, after, slot, slot_before, index }
    }

    /// Changes in Arrow form are not sharded, so their slot has no meaning.
    fn next_arrow(&mut self) -> Result<Option<Row<'_, 'a>>> {
        let Some((rows, pairs)) = &mut self.arrow else { return Ok(None) };
        let Some(pair) = pairs.next() else { return Ok(None) };
        let (first, second) = match self.change {
            Change::Insert => (pair.after, None),
            Change::Delete => (pair.before, None),
            Change::Update => (pair.before, pair.after),
        };
        if let Some(row) = first {
            rows.image(row, &mut self.first)?;
        }
        if let Some(row) = second {
            rows.image(row, &mut self.second)?;
        }
        self.changes += 1;
        Ok(Some(self.shown(self.change, 0, Ok(0), pair.index)))
    }

    fn read_first(&mut self) -> Result<()> {
        self.first.clear();
        let present = self.rows.head.present;
        let nulls = self.cursor.take(rows::count(present, self.table.columns.len()).div_ceil(8))?;
        let mut at = 0;
        for (index, column) in self.table.columns.iter().enumerate() {
            let cell = if !bit(present, index) {
                None
            } else {
                let null = bit(nulls, at);
                at += 1;
                Some(if null { Value::Null } else { read(&column.kind, &mut self.cursor, &column.name)? })
            };
            self.first.push(cell);
        }
        Ok(())
    }

    fn read_second(&mut self) -> Result<()> {
        self.second.clear();
        let present = self.rows.head.present_after;
        let partial: &[u8] = match self.rows.kind {
            EventKind::PartialUpdateRows => PartialHead::read(&mut self.cursor, self.table.json_columns)?.partial,
            _ => &[],
        };
        let nulls = self.cursor.take(rows::count(present, self.table.columns.len()).div_ceil(8))?;
        let (mut at, mut json_index) = (0, 0);
        for (index, column) in self.table.columns.iter().enumerate() {
            let json_prefix = column.kind.json_prefix();
            let difference = json_prefix.filter(|_| bit(partial, json_index));
            json_index += usize::from(json_prefix.is_some());
            if !bit(present, index) {
                self.second.push(None);
                continue;
            }
            let null = bit(nulls, at);
            at += 1;
            let value = match difference {
                _ if null => Value::Null,
                None => read(&column.kind, &mut self.cursor, &column.name)?,
                Some(prefix) => {
                    let change = self.cursor.prefixed(prefix)?;
                    let Some(Some(Value::Json(document))) = self.first.get(index) else {
                        return Err(without_document(&column.name));
                    };
                    let text = json::apply_partial_in(document, change, self.style);
                    Value::JsonText(text.map_err(|error| in_column(error, &column.name))?)
                }
            };
            self.second.push(Some(value));
        }
        Ok(())
    }

    /// Returns the slot of the row after the change. If the after image is partial, the before image completes it.
    fn slot(&mut self) -> Result<i16> {
        slot_of(self.table, &self.second, &self.first, &mut self.scratch)
    }

    /// Returns the slot of the before image alone, because the after image may have different values.
    fn slot_before(&mut self, slot: i16) -> Result<i16> {
        let stays = |at: &usize| match (self.first.get(*at), self.second.get(*at)) {
            (Some(Some(before)), Some(Some(after))) => before == after,
            (Some(Some(_)), _) => true,
            _ => false,
        };
        match self.change == Change::Update && !self.table.shard_columns.iter().all(stays) {
            true => slot_of(self.table, &self.first, &[], &mut self.scratch),
            false => Ok(slot),
        }
    }
}

/// Whether the images show that an update changes the primary key.
#[inline]
pub(super) fn changes_key(table: &TableView, before: Image<'_, '_>, after: Image<'_, '_>) -> bool {
    let keys = table.columns.iter().zip(before.iter().zip(after)).filter(|(column, _)| column.is_key);
    keys.into_iter().any(|(_, (before, after))| before.is_some() && after.is_some() && before != after)
}

/// Returns the slot of a row with these values.
///
/// A shard column that is missing from the image is taken from `before`, the before image. Raises `EventUnsupported` if
/// the column is missing from both images. The shard is then unknown, because a missing value is not NULL.
fn slot_of(table: &TableView, image: Image<'_, '_>, before: Image<'_, '_>, scratch: &mut Vec<u8>) -> Result<i16> {
    let cell = |at: usize| {
        let value = image.get(at).and_then(Option::as_ref).or_else(|| before.get(at).and_then(Option::as_ref));
        value.ok_or_else(|| lacks_shard_column(table, at))
    };
    match table.shard_columns.as_slice() {
        [] => Ok(shard::slot_of_text(&table.name)),
        [at] => {
            let value = cell(*at)?;
            if let Some(number) = number(value) {
                return Ok(shard::slot_of_number(number));
            }
            let mut key = TextKey::default();
            let column = table.columns.get(*at).ok_or_else(|| malformed("a shard column"))?;
            add_text(value, &column.kind, scratch, &mut key)?;
            Ok(key.slot())
        }
        several => {
            let mut key = TextKey::default();
            for at in several {
                let column = table.columns.get(*at).ok_or_else(|| malformed("a shard column"))?;
                match cell(*at)? {
                    Value::Null => key.text("null"),
                    value => add_text(value, &column.kind, scratch, &mut key)?,
                }
            }
            Ok(key.slot())
        }
    }
}

#[cold]
fn unjudged(table: &TableView) -> Error {
    malformed(format!("a row of {} whose conditions were not evaluated", table.name))
}

#[cold]
fn lacks_shard_column(table: &TableView, at: usize) -> Error {
    let name = table.columns.get(at).map_or("", |column| &*column.name);
    let message = format!("a row image of {} lacks the shard column `{name}`, so nothing tells its shard", table.name);
    Error::new(ErrorKind::EventUnsupported, message)
        .hint("SET GLOBAL binlog_row_image = FULL on the server, or shard by the primary key")
}

#[inline]
fn read<'a>(kind: &Kind, cursor: &mut Cursor<'a>, name: &str) -> Result<Value<'a>> {
    kind.read(cursor).map_err(|error| in_column(error, name))
}

#[cold]
fn in_column(error: Error, name: &str) -> Error {
    error.within(&format!("column `{name}`"))
}

#[cold]
fn without_document(name: &str) -> Error {
    Error::new(ErrorKind::EventUnsupported, "a JSON difference without the document before")
        .within(&format!("column `{name}`"))
        .hint("SET GLOBAL binlog_row_value_options = '' or binlog_row_image = FULL on the server")
}

/// Returns the number of a single-column key; None if the key is text.
#[inline]
fn number(value: &Value<'_>) -> Option<i64> {
    match value {
        Value::Null => Some(0),
        Value::Int(value) => Some(*value),
        Value::UInt(value) | Value::Bit(value) => Some(i64::from_ne_bytes(value.to_ne_bytes())),
        Value::Year(value) => Some(i64::from(*value)),
        Value::Decimal(value) => value.as_u64_of_20_digits().map(|value| i64::from_ne_bytes(value.to_ne_bytes())),
        Value::Float(_)
        | Value::Double(_)
        | Value::Date(_)
        | Value::DateTime(_)
        | Value::Timestamp(_)
        | Value::Time(_)
        | Value::Text(_)
        | Value::Bytes(_)
        | Value::Compressed(_)
        | Value::Enumeration(_)
        | Value::Set(_)
        | Value::Json(_)
        | Value::JsonText(_)
        | Value::Geometry(_)
        | Value::Vector(_)
        | Value::Uuid(_)
        | Value::Inet4(_)
        | Value::Inet6(_) => None,
    }
}

/// Adds a value to a text key.
fn add_text(value: &Value<'_>, kind: &Kind, scratch: &mut Vec<u8>, key: &mut TextKey) -> Result<()> {
    scratch.clear();
    match (value, kind) {
        (Value::Bit(value), _) => write_unsigned_integer(*value, scratch),
        (Value::Year(value), _) => write_unsigned_integer((*value).into(), scratch),
        (value, kind) => value.write_text(kind, scratch)?,
    }
    let is_bytes = matches!(
        kind,
        Kind::Binary { .. } | Kind::CompressedBinary { .. } | Kind::Geometry { .. } | Kind::Vector { .. }
    );
    match std::str::from_utf8(scratch) {
        Ok(text) if !is_bytes => key.text(text),
        _ => key.latin1(scratch),
    }
    Ok(())
}
