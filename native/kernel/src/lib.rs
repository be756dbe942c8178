//! The Penstock kernel: decodes binlog bytes into Arrow columns.
//!
//! The kernel is pure: no Python, files, sockets, clock or threads. Bytes become columns in these steps:
//!
//! 1. `frame::packet` strips the framing of the replication protocol, if the bytes come from a live server.
//! 2. `stream` splits the bytes into events, verifies checksums, and tracks positions and transactions.
//! 3. `event` parses event bodies; `event::table_map` describes the row images.
//! 4. `column` decodes each value to a [`column::Value`], a view of the bytes.
//! 5. `emit` writes the output: typed Arrow columns, raw images, messages, or a row per event or transaction.
//!
//! In addition, `blocks` cuts the same bytes into blocks for a durable, indexed log. `write` writes events as a MySQL
//! server does, and `tidb` transcodes TiDB's change payloads to them. `grpc` reads and answers gRPC calls.

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
pub mod grpc;
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
pub mod tidb;
pub mod write;
