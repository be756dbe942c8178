//! The input of emitters for rows events.

use std::sync::Arc;

use super::system::{EventView, Images};
use crate::column::Kind;
use crate::event::rows::RowsHead;
use crate::event::{Change, EventKind};

/// The images to emit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeFilter {
    /// Inserted rows.
    pub insert: bool,
    /// Rows before an update.
    pub before: bool,
    /// Rows after an update.
    pub after: bool,
    /// Deleted rows.
    pub delete: bool,
}

impl Default for ChangeFilter {
    fn default() -> ChangeFilter {
        ChangeFilter { insert: true, before: true, after: true, delete: true }
    }
}

impl ChangeFilter {
    /// Returns the images to emit for a change; None if no image is emitted.
    pub fn images(self, change: Change) -> Option<Images> {
        match (change, self.before, self.after) {
            (Change::Insert, ..) => self.insert.then_some(Images::Each(Change::Insert)),
            (Change::Delete, ..) => self.delete.then_some(Images::Each(Change::Delete)),
            (Change::Update, true, true) => Some(Images::Pairs),
            (Change::Update, true, false) => Some(Images::Before),
            (Change::Update, false, true) => Some(Images::After),
            (Change::Update, false, false) => None,
        }
    }
}

/// A column of a table as logged.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceColumn {
    /// Its name.
    pub name: Arc<str>,
    /// How to read the column's values.
    pub kind: Kind,
}

/// A rows event for emitters.
#[derive(Debug, Clone, Copy)]
pub struct RowsView<'a> {
    /// The event's type.
    pub kind: EventKind,
    /// The head of the event; `images` in it may be compressed.
    pub head: RowsHead<'a>,
    /// The images, decompressed.
    pub images: &'a [u8],
    /// The position of the event.
    pub event: EventView,
    /// Number of changes of the transaction before this event.
    pub row_first: u32,
    /// Number of the transaction's changes that were emitted before a reconnect and must be skipped.
    pub resume_rows: u32,
}

impl RowsView<'_> {
    /// Returns an empty event, for changes that do not come from an event.
    pub(crate) fn of_no_event() -> RowsView<'static> {
        let head = RowsHead { table_id: 0, width: 0, present: &[], present_after: &[], images: &[] };
        let event = EventView::default();
        RowsView { kind: EventKind::WriteRows, head, images: &[], event, row_first: 0, resume_rows: 0 }
    }
}
