//! Rows events on their way into batches, whatever shape these have.

use std::sync::Arc;

use super::system::{EventView, Images};
use crate::column::Kind;
use crate::event::rows::RowsHead;
use crate::event::{Change, EventKind};

/// Which images a reader wants.
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
    /// The images to emit for a change, or None for none.
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

/// One column of a table as its rows arrive.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceColumn {
    /// Its name.
    pub name: Arc<str>,
    /// How to read it.
    pub kind: Kind,
}

/// One rows event on its way into batches.
#[derive(Debug, Clone, Copy)]
pub struct RowsView<'a> {
    /// The event's type.
    pub kind: EventKind,
    /// Its head; `images` in it may still be compressed.
    pub head: RowsHead<'a>,
    /// The images, plain.
    pub images: &'a [u8],
    /// Where it stands.
    pub event: EventView,
    /// The changes of the transaction before it.
    pub row_first: u32,
    /// How many changes of the transaction were handed out before and are to be passed over.
    pub resume_rows: u32,
}

impl RowsView<'_> {
    /// An event without images, for changes that come from elsewhere.
    pub(crate) fn of_no_event() -> RowsView<'static> {
        let head = RowsHead { table_id: 0, width: 0, present: &[], present_after: &[], images: &[] };
        let event = EventView::default();
        RowsView { kind: EventKind::WriteRows, head, images: &[], event, row_first: 0, resume_rows: 0 }
    }
}
