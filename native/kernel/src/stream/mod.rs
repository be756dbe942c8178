//! Decodes the events of a byte range into batches.
//!
//! The decoder is a state machine that never calls back: `feed` consumes complete events from the start of a buffer and
//! stops early when the decoder needs something from the caller, as [`Decoder::state`] reports. A transaction belongs
//! to the range of its first event, so a file can be split at any byte into ranges that are read in parallel and then
//! joined. The first byte fed must be the start of an event: the decoder never searches for event headers inside an
//! event's bytes (`event::headers`).

mod decoder;
mod dispatch;
mod frame;
mod key_bytes;
mod message_tables;
mod moved;
mod open;
mod open_tables;
mod options;
mod payload;
mod payload_events;
mod prepared;
mod proof;
mod replay;
mod row_search;
mod sources;
mod statement;
mod tables;
mod transaction;
mod xa;

pub use decoder::{Counters, Decoder, State};
pub use moved::EventMover;
pub use open_tables::{Answer, TableRequest};
pub use options::{Emit, Options, Resume};
pub use prepared::PreparedLocation;
pub use replay::PreparedRequest;
pub use row_search::{RowSearch, SearchedRow};
pub use statement::Statement;
