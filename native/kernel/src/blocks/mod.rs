//! Cuts the bytes of a log into blocks: what a durable log stores, and what it finds a place by.
//!
//! Events pass through unchanged. Each is verified, and looked at no further than is needed to tell where transactions
//! begin and end, which tables they concern and how many changes they hold; no value is decoded. Bytes whose checksum
//! holds are kept even where what is in them cannot be read: they are the truth, and can be read again.

mod cutter;
mod gathered;
mod head;
mod intake;
mod open;
mod payload;
mod record;
mod tables;
mod unpacking;
mod walk;

pub use cutter::{BlockCutter, Counters, Settings, State, Statement};
pub use head::{read_segment_head, segment_head, HeadParts, SegmentHead};
pub use record::{FLAG_BEGINS, FLAG_CONSECUTIVE, FLAG_ENDS, FLAG_STATEMENT, FLAG_UNCOUNTED, RECORD_BYTES};
