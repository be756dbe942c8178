//! Cuts the bytes of a log into blocks, the unit that a durable log stores and indexes.
//!
//! Events pass through unchanged. The cutter verifies each event and reads only enough to determine where transactions
//! begin and end, which tables they change and how many changes they have; it does not decode values. Events whose
//! checksum is valid are kept even if their contents cannot be read: the bytes are the source of truth and can be read
//! again later.

mod counts;
mod cutter;
mod decompressor;
mod event_buffer;
mod head;
mod intake;
mod open;
mod payload;
mod record;
mod tables;
mod walk;

pub use counts::Counts;
pub use cutter::{BlockCutter, Counters, Settings, State, Statement};
pub use head::{read_segment_head, segment_head, HeadParts, SegmentHead};
pub use record::{
    FLAG_BEGINS, FLAG_CONSECUTIVE, FLAG_ENDS, FLAG_STATEMENT, FLAG_UNCOUNTED, FLAG_XA_COMMITS, RECORD_BYTES,
};
