//! Writes events as a MySQL 8.0 server does, for sources without a binlog.
//!
//! Every reader of MySQL's binlog can read the result: events have checksums, transactions begin with a GTID event, and
//! table maps have the metadata of `binlog_row_metadata=FULL`. The output depends only on the arguments.

pub mod events;
pub mod file;
pub mod json;
pub mod row_events;
pub mod table;
pub mod text;
pub mod transaction;
pub mod value;
