//! Events: the common header and the table of event types. Each body has its own file.
//!
//! The type codes are those of `mysql::binlog::event::Log_event_type` (MySQL, `binlog_event.h`) and of
//! `Log_event_type` in MariaDB's `log_event.h` (160 and up). Penstock's own types, 120 and up, are flagged ignorable.

pub mod compressed;
pub mod format_description;
pub mod gtid;
pub mod headers;
pub mod heartbeat;
pub mod image_lengths;
pub mod incident;
pub mod mariadb_gtid;
pub mod previous_gtids;
pub mod query;
pub mod rotate;
pub mod rows;
pub mod session;
pub mod table_map;
pub mod tagged_gtid;
pub mod tidb_commit;
pub mod tidb_payload;
pub mod transaction_payload;
pub mod xa;

use crate::cursor::Cursor;
use crate::error::Result;
use crate::limits::EVENT_HEADER_BYTES;

/// Set while a file is being written. When the server clears the flag, it does not update the checksum. A crash leaves
/// the flag set.
pub const FLAG_IN_USE: u16 = 0x0001;
/// The server generated the event for the stream; it is not in any file.
pub const FLAG_ARTIFICIAL: u16 = 0x0020;
/// Readers that do not know the type may skip the event.
pub const FLAG_IGNORABLE: u16 = 0x0080;

/// The header of every event: 19 bytes.
///
/// ```text
/// 0         4      5            9       13         17      19
/// ┌─────────┬──────┬────────────┬───────┬──────────┬───────┐
/// │timestamp│ type │ server id  │ size  │ end pos  │ flags │
/// └─────────┴──────┴────────────┴───────┴──────────┴───────┘
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// When the statement began, in seconds since 1970.
    pub timestamp: u32,
    /// The type byte, which `EventKind::from_code` decodes.
    pub code: u8,
    /// The server on which the change was first made.
    pub server_id: u32,
    /// Size in bytes of the whole event: header, body and checksum.
    pub size: u32,
    /// Where the next event starts, modulo 2^32; 0 if the server does not set it.
    pub end_position: u32,
    /// The `FLAG_` bits.
    pub flags: u16,
}

impl Header {
    /// Reads a header from 19 bytes.
    #[inline(always)]
    pub fn read(cursor: &mut Cursor<'_>) -> Result<Header> {
        let mut header = Cursor::new(cursor.take(EVENT_HEADER_BYTES)?);
        Ok(Header {
            timestamp: header.u32()?,
            code: header.u8()?,
            server_id: header.u32()?,
            size: header.u32()?,
            end_position: header.u32()?,
            flags: header.u16()?,
        })
    }

    /// Returns the type of the event, or None if it is unknown.
    ///
    /// Penstock's own types are recognized only if the event is flagged as ignorable. A server that used the same code
    /// for another type would not set the flag.
    #[inline(always)]
    pub fn kind(&self) -> Option<EventKind> {
        match EventKind::from_code(self.code) {
            Some(EventKind::TidbPayload | EventKind::TidbCommit) if self.flags & FLAG_IGNORABLE == 0 => None,
            kind => kind,
        }
    }

    /// Appends the header in the format that `read` expects.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.timestamp.to_le_bytes());
        out.push(self.code);
        for field in [self.server_id, self.size, self.end_position] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        out.extend_from_slice(&self.flags.to_le_bytes());
    }
}

macro_rules! event_kinds {
    ($($(#[$doc:meta])* $kind:ident = $code:literal, $name:literal;)+) => {
        /// The supported event types.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum EventKind { $($(#[$doc])* $kind),+ }

        impl EventKind {
            /// Every type, in code order.
            pub const ALL: &'static [EventKind] = &[$(EventKind::$kind),+];

            /// Returns the type with a code, or None if the code is not supported.
            #[inline(always)]
            pub fn from_code(code: u8) -> Option<EventKind> {
                match code { $($code => Some(EventKind::$kind),)+ _ => None }
            }

            /// Returns the code of the type.
            pub const fn code(self) -> u8 {
                match self { $(EventKind::$kind => $code),+ }
            }

            /// Returns the name that SHOW BINLOG EVENTS prints.
            pub fn name(self) -> &'static str {
                match self { $(EventKind::$kind => $name),+ }
            }
        }
    };
}

event_kinds! {
    /// A statement, or BEGIN and COMMIT.
    Query = 2, "Query";
    /// The server stopped.
    Stop = 3, "Stop";
    /// The log continues in another file.
    Rotate = 4, "Rotate";
    /// LAST_INSERT_ID or INSERT_ID for the statement that follows.
    IntVar = 5, "Intvar";
    /// A block of a file for LOAD DATA.
    AppendBlock = 9, "Append_block";
    /// The file of a LOAD DATA was removed.
    DeleteFile = 11, "Delete_file";
    /// The seed of RAND for the statement that follows.
    Rand = 13, "RAND";
    /// A user variable for the statement that follows.
    UserVar = 14, "User var";
    /// The first event: version, header lengths, checksum algorithm.
    FormatDescription = 15, "Format_desc";
    /// The commit of a transaction.
    Xid = 16, "Xid";
    /// The first block of a file for LOAD DATA.
    BeginLoadQuery = 17, "Begin_load_query";
    /// LOAD DATA as a statement.
    ExecuteLoadQuery = 18, "Execute_load_query";
    /// The columns of the row images that follow.
    TableMap = 19, "Table_map";
    /// Inserted rows, version 1.
    WriteRowsV1 = 23, "Write_rows_v1";
    /// Updated rows, version 1.
    UpdateRowsV1 = 24, "Update_rows_v1";
    /// Deleted rows, version 1.
    DeleteRowsV1 = 25, "Delete_rows_v1";
    /// Changes may have been lost.
    Incident = 26, "Incident";
    /// The server is idle.
    Heartbeat = 27, "Heartbeat";
    /// Readers may skip the event.
    Ignorable = 28, "Ignorable";
    /// The text of the statement whose row changes follow.
    RowsQuery = 29, "Rows_query";
    /// Inserted rows.
    WriteRows = 30, "Write_rows";
    /// Updated rows.
    UpdateRows = 31, "Update_rows";
    /// Deleted rows.
    DeleteRows = 32, "Delete_rows";
    /// The GTID of the transaction that follows.
    Gtid = 33, "Gtid";
    /// A transaction without a GTID follows.
    AnonymousGtid = 34, "Anonymous_Gtid";
    /// The GTIDs of all earlier files.
    PreviousGtids = 35, "Previous_gtids";
    /// Group replication: the data that the transaction was certified against.
    TransactionContext = 36, "Transaction_context";
    /// Group replication: the group changed.
    ViewChange = 37, "View_change";
    /// First phase of a two-phase commit: the transaction is prepared.
    XaPrepare = 38, "XA_prepare";
    /// Updated rows whose JSON columns may hold partial updates.
    PartialUpdateRows = 39, "Update_rows_partial";
    /// A whole transaction, compressed.
    TransactionPayload = 40, "Transaction_payload";
    /// The server is idle; includes a 64-bit position.
    HeartbeatV2 = 41, "Heartbeat";
    /// The GTID, with a tag, of the transaction that follows.
    TaggedGtid = 42, "Gtid";
    /// Penstock: a payload of TiDB's pump client, as received.
    TidbPayload = 120, "Tidb_payload";
    /// Penstock: the commit timestamp of the TiDB transaction that contains the event.
    TidbCommit = 121, "Tidb_commit";
    /// MariaDB: the text of the statement whose row changes follow.
    AnnotateRows = 160, "Annotate_rows";
    /// MariaDB: the oldest file that crash recovery needs.
    BinlogCheckpoint = 161, "Binlog_checkpoint";
    /// MariaDB: the GTID of the transaction that follows.
    MariadbGtid = 162, "Gtid";
    /// MariaDB: the last GTID of each domain in all earlier files.
    MariadbGtidList = 163, "Gtid_list";
    /// MariaDB: the rest of the file is encrypted.
    StartEncryption = 164, "Start_encryption";
    /// MariaDB: a statement, compressed.
    QueryCompressed = 165, "Query_compressed";
    /// MariaDB: inserted rows, in version 1 and compressed.
    WriteRowsCompressedV1 = 166, "Write_rows_compressed_v1";
    /// MariaDB: updated rows, version 1, compressed.
    UpdateRowsCompressedV1 = 167, "Update_rows_compressed_v1";
    /// MariaDB: deleted rows, version 1, compressed.
    DeleteRowsCompressedV1 = 168, "Delete_rows_compressed_v1";
    /// MariaDB: inserted rows, compressed.
    WriteRowsCompressed = 169, "Write_rows_compressed";
    /// MariaDB: updated rows, compressed.
    UpdateRowsCompressed = 170, "Update_rows_compressed";
    /// MariaDB: deleted rows, compressed.
    DeleteRowsCompressed = 171, "Delete_rows_compressed";
}

/// The kind of change that a rows event logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Change {
    /// One image: the new row.
    Insert,
    /// Two images: the old row and the new row.
    Update,
    /// One image: the old row.
    Delete,
}

impl EventKind {
    /// Returns the kind of change of a rows event; None for any other event.
    #[inline]
    pub fn change(self) -> Option<Change> {
        use EventKind::*;
        match self {
            WriteRows | WriteRowsV1 | WriteRowsCompressed | WriteRowsCompressedV1 => Some(Change::Insert),
            UpdateRows | UpdateRowsV1 | UpdateRowsCompressed | UpdateRowsCompressedV1 | PartialUpdateRows => {
                Some(Change::Update)
            }
            DeleteRows | DeleteRowsV1 | DeleteRowsCompressed | DeleteRowsCompressedV1 => Some(Change::Delete),
            _ => None,
        }
    }

    /// Whether a rows event carries the extra header of version 2.
    #[inline]
    pub fn has_extra_header(self) -> bool {
        use EventKind::*;
        matches!(
            self,
            WriteRows
                | UpdateRows
                | DeleteRows
                | PartialUpdateRows
                | WriteRowsCompressed
                | UpdateRowsCompressed
                | DeleteRowsCompressed
        )
    }

    /// Whether MariaDB compressed the row images.
    #[inline]
    pub fn has_compressed_rows(self) -> bool {
        use EventKind::*;
        matches!(
            self,
            WriteRowsCompressed
                | UpdateRowsCompressed
                | DeleteRowsCompressed
                | WriteRowsCompressedV1
                | UpdateRowsCompressedV1
                | DeleteRowsCompressedV1
        )
    }

    /// Whether the event starts a transaction and holds its GTID.
    #[inline]
    pub fn is_gtid(self) -> bool {
        matches!(self, EventKind::Gtid | EventKind::AnonymousGtid | EventKind::TaggedGtid | EventKind::MariadbGtid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_maps_to_one_type() {
        let known = (0..=255).filter_map(EventKind::from_code).count();
        assert_eq!(known, EventKind::ALL.len());
    }

    #[test]
    fn a_header_survives_a_round_trip() {
        let bytes = [1, 0, 0, 0, 30, 7, 0, 0, 0, 40, 0, 0, 0, 200, 0, 0, 0, 0x80, 0];
        let header = Header::read(&mut Cursor::new(&bytes)).unwrap();
        assert_eq!((header.timestamp, header.code, header.server_id), (1, 30, 7));
        assert_eq!((header.size, header.end_position, header.flags), (40, 200, FLAG_IGNORABLE));
        let mut written = Vec::new();
        header.write(&mut written);
        assert_eq!(written, bytes);
    }

    #[test]
    fn own_types_are_unknown_without_the_ignorable_flag() {
        let header = |code, flags| Header { timestamp: 0, code, server_id: 1, size: 23, end_position: 0, flags };
        for kind in [EventKind::TidbPayload, EventKind::TidbCommit] {
            assert_eq!(header(kind.code(), FLAG_IGNORABLE).kind(), Some(kind));
            assert_eq!(header(kind.code(), 0).kind(), None);
        }
        assert_eq!(header(EventKind::Xid.code(), 0).kind(), Some(EventKind::Xid));
    }
}
