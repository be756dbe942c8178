//! The XA transaction whose events are being read.

use std::sync::Arc;

use super::payload::Payload;
use super::prepared::PreparedLocation;
use crate::emit::system::EventView;
use crate::event::format_description::Format;
use crate::event::xa::XaId;
use crate::frame::events::Span;

/// How an XA transaction ends.
#[derive(Debug, Clone)]
pub(super) enum Ending {
    /// The transaction commits in its own event group (ONE PHASE, or a log without prepared transactions).
    CommitAtOnce,
    /// The transaction was prepared earlier, and this statement commits it.
    CommitPrepared(Box<str>),
    /// The transaction is rolled back in its own event group. The group was logged only because it changed
    /// non-transactional tables.
    RollBack,
}

/// Where the events come from.
pub(super) enum Origin {
    Memory {
        events: Arc<[u8]>,
        at: usize,
        location: PreparedLocation,
        format: Option<Format>,
    },
    /// The caller must locate the events.
    Unknown,
    /// The caller must read the events again.
    Requested(PreparedLocation),
    /// The caller is reading the events; `begun` is set after the first event.
    Read {
        location: PreparedLocation,
        begun: bool,
    },
}

/// The state that the decoder restores after the transaction's events.
pub(super) struct Frame {
    pub(super) file: Arc<str>,
    pub(super) file_number: u32,
    pub(super) offset: u64,
    pub(super) format: Option<Format>,
    pub(super) relay: bool,
    pub(super) format_end: u64,
    pub(super) payload: Option<Box<Payload>>,
}

/// An XA transaction whose events are being read.
pub(super) struct Replay {
    pub(super) id: XaId,
    pub(super) ending: Ending,
    pub(super) origin: Origin,
    /// The event that ends the transaction.
    pub(super) end_event: EventView,
    pub(super) end_span: Span,
    pub(super) frame: Option<Frame>,
    /// Whether the transaction's last event was read.
    pub(super) ended: bool,
}

/// A prepared transaction whose bytes the decoder needs.
#[derive(Debug, Clone)]
pub struct PreparedRequest {
    /// The id in the syntax of XA statements.
    pub id: String,
    /// File and offset of the event group that commits the transaction; the transaction was prepared before that
    /// position.
    pub commit: (Arc<str>, u64),
    /// The location of the events, if it is known.
    pub location: Option<PreparedLocation>,
}

impl Replay {
    /// Whether the caller must act before the decoder can continue.
    pub fn needs_bytes(&self) -> bool {
        !matches!(self.origin, Origin::Memory { .. }) && !self.ended
    }
}
