//! The decoder: event bytes of one byte range in, batches out.
//!
//! It is a machine that is fed and asked, and never calls back: `feed` takes whole events from the front of a buffer
//! and stops early when it has something to say, which [`Decoder::state`] names. A transaction belongs to the range
//! in which its first event lies, so ranges can be cut at any byte, read in parallel, and put together again. The first
//! byte fed is always that of an event: nothing in the middle of one is taken for an event (`event::headers`).

mod decoder;
mod dispatch;
mod frame;
mod message_tables;
mod open;
mod open_tables;
mod options;
mod payload;
mod payload_events;
mod prepared;
mod proof;
mod replay;
mod sources;
mod statement;
mod tables;
mod transaction;
mod xa;

pub use decoder::{Counters, Decoder, State};
pub use open_tables::{Answer, TableRequest};
pub use options::{Emit, Options, Resume};
pub use prepared::PreparedPlace;
pub use replay::PreparedRequest;
pub use statement::Statement;
