//! The data for writing the rows of a table in every message format: JSON, Avro and protobuf.

use std::sync::Arc;

use super::column_traits::ColumnTraits;
use super::handling::{Flat, FlatField, RegisteredSchemas};
use crate::column::Kind;
use crate::emit::dialect::{json_object, At, Image, TableView};
use crate::emit::messages::TransactionCounts;

/// The connector version in messages: the version of this kernel.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The connector name in messages, for MariaDB as well.
pub(super) const CONNECTOR: &str = "mysql";

/// A column of the messages, with its name as a key of JSON.
pub(super) struct Field {
    pub(super) key: Box<[u8]>,
    pub(super) kind: Kind,
    pub(super) traits: ColumnTraits,
    pub(super) name: Arc<str>,
}

/// The fields of flat rows, with their names as keys of JSON.
pub(super) struct FlatKeys {
    pub(super) fields: Vec<(Box<[u8]>, FlatField)>,
    pub(super) deleted: Option<Box<[u8]>>,
}

impl FlatKeys {
    pub(super) fn new(flat: &Flat) -> FlatKeys {
        FlatKeys {
            fields: flat.fields.iter().map(|(name, field)| (json_object::key(name), *field)).collect(),
            deleted: flat.deleted.then(|| json_object::key("__deleted")),
        }
    }
}

/// Writes the rows of a table.
pub struct Writer {
    pub(super) table: Arc<TableView>,
    pub(super) fields: Vec<Field>,
    /// Indexes of the primary key's columns.
    pub(super) keys: Vec<usize>,
    /// The text before the payload; empty if messages have no schema.
    pub(super) head: Vec<u8>,
    /// The additional fields of flat rows; None for messages with an envelope.
    pub(super) flat: Option<FlatKeys>,
    /// The schemas of messages in a binary format; None for JSON.
    pub(super) registered: Option<RegisteredSchemas>,
}

/// A change with its operation code and images.
#[derive(Clone, Copy)]
pub(super) struct ChangeView<'r, 'a> {
    pub(super) operation: &'r [u8],
    pub(super) before: Option<Image<'r, 'a>>,
    pub(super) after: Option<Image<'r, 'a>>,
    /// Number of messages of the transaction up to this one, in total and for this table; None without transactions.
    pub(super) counts: Option<TransactionCounts>,
}

/// The base name of the files of a log that is written for a TiDB cluster.
const TIDB_LOG: &str = "tidb-binlog.";

/// Returns the id of a transaction. It is the GTID, or without one, it is derived from the commit version. A commit
/// version contains the start of the transaction in units of 16 bytes. For TiDB, it is the commit timestamp instead.
pub(super) fn transaction_id(at: &At<'_>) -> String {
    let (file, version) = (&at.transaction.file, at.transaction.commit_version);
    if !at.gtid.is_empty() {
        return at.gtid.to_owned();
    }
    if file.starts_with(TIDB_LOG) {
        return format!("commit_ts={version}");
    }
    format!("file={file},pos={}", (version & 0xffff_ffff) << 4)
}
