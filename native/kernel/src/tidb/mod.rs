//! Reads the change payloads of TiDB's pump client, and transcodes them to the events of a MySQL binlog.
//!
//! Sources: the `binlog.proto` of pingcap/tipb before its removal in 2024, and payloads of TiDB 6.6 to 7.0.

pub mod binlog;
pub mod changes;
pub mod column;
pub mod datum;
pub mod json;

pub mod payload_events;
mod protobuf;
pub mod row;
pub mod table;
pub mod table_info;
pub mod transcoder;
pub mod value;
