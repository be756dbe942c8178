//! A prepared XA transaction of which the events are read now.

use std::sync::Arc;

use super::payload::Payload;
use super::prepared::PreparedPlace;
use crate::emit::system::EventView;
use crate::event::format_description::Format;
use crate::event::xa::XaId;
use crate::frame::events::Span;

/// How an XA transaction ends.
#[derive(Debug, Clone)]
pub(super) enum Ending {
    /// It commits in its own group of events (ONE PHASE, or a log without prepared transactions).
    CommitAtOnce,
    /// It was prepared, and this statement commits it.
    CommitPrepared(Box<str>),
    /// It is rolled back in its own group: the log has it because other tables than transactional ones were changed.
    RollBack,
}

/// Where the events come from.
pub(super) enum Origin {
    Memory {
        events: Arc<[u8]>,
        at: usize,
        place: PreparedPlace,
        format: Option<Format>,
    },
    /// The caller has to say where they lie.
    Unknown,
    /// The caller has to read them again.
    Asked(PreparedPlace),
    /// The caller reads them; `begun` once their first event came.
    Read {
        place: PreparedPlace,
        begun: bool,
    },
}

/// What the decoder goes on with after the transaction's events.
pub(super) struct Frame {
    pub(super) file: Arc<str>,
    pub(super) file_number: u32,
    pub(super) offset: u64,
    pub(super) format: Option<Format>,
    pub(super) relay: bool,
    pub(super) format_end: u64,
    pub(super) payload: Option<Box<Payload>>,
}

/// An XA transaction whose events are read.
pub(super) struct Replay {
    pub(super) id: XaId,
    pub(super) ending: Ending,
    pub(super) origin: Origin,
    /// The event that ends it.
    pub(super) end_event: EventView,
    pub(super) end_span: Span,
    pub(super) frame: Option<Frame>,
    /// Its last event came.
    pub(super) ended: bool,
}

/// A prepared transaction whose bytes the decoder needs.
#[derive(Debug, Clone)]
pub struct PreparedRequest {
    /// Its id, as statements have it.
    pub id: String,
    /// The file and the offset of the event group that commits it: it lies before.
    pub commit: (Arc<str>, u64),
    /// Where it lies, if that is known.
    pub place: Option<PreparedPlace>,
}

impl Replay {
    /// Whether the caller has to do something before the decoder can go on.
    pub fn needs_bytes(&self) -> bool {
        !matches!(self.origin, Origin::Memory { .. }) && !self.ended
    }
}
