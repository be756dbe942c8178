//! The Penstock kernel: binlog bytes in, Arrow columns out.
//!
//! Pure: no Python, no files, no sockets, no clock, no threads. How a byte becomes a column:
//!
//! 1. `frame::packet` strips the replication protocol's frames, where the bytes come from a live server.
//! 2. `stream` cuts the bytes into events, checks each checksum, tracks positions and transactions.
//! 3. `event` takes an event body apart; `event::table_map` says what the row images hold.
//! 4. `column` reads one value of one type as a [`column::Value`], a view of the bytes.
//! 5. `emit` is the visitor: typed Arrow columns, raw images, or one row per event or transaction.
//!
//! Beside these, `blocks` cuts the same bytes into blocks, for a log that stores them and finds them again.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod blocks;
pub mod bson;
pub mod charset;
pub mod checksum;
pub mod column;
pub mod cursor;
pub mod emit;
pub mod error;
pub mod event;
pub mod frame;
pub mod gtid;
pub mod limits;
pub mod objects;
pub mod partition;
pub mod resultset;
pub mod row_hash;
pub mod shard;
pub mod slots;
pub mod sql;
pub mod stream;
