//! The kernel's limits, and the reason for each.

/// Length of an event header since binlog version 4.
pub const EVENT_HEADER_BYTES: usize = 19;

/// Length of the CRC32 at the end of each event if checksums are enabled.
pub const CHECKSUM_BYTES: usize = 4;

/// The four bytes before the first event of a file.
pub const MAGIC_BYTES: usize = 4;

/// Maximum size of an event: the server's maximum for `max_allowed_packet` plus its allowance for headers.
pub const EVENT_BYTES_MAX: usize = (1 << 30) + 64 * 1024;

/// Maximum size of a decompressed transaction payload. Payloads are streamed, so this does not bound memory.
pub const PAYLOAD_BYTES_MAX: u64 = 1 << 40;

/// Maximum size of a decompressed MariaDB event or column, the same as for any event.
pub const DECOMPRESSED_BYTES_MAX: usize = EVENT_BYTES_MAX;

/// Maximum number of columns of a table: the server's limit (InnoDB's is 1017).
pub const COLUMNS_MAX: usize = 4096;

/// Maximum depth of a JSON document: the server's JSON_DOCUMENT_MAX_DEPTH.
pub const JSON_DEPTH_MAX: usize = 100;

/// Maximum number of open table maps. Transactions that change more tables are rejected, to bound memory.
pub const TABLES_OPEN_MAX: usize = 1 << 16;

/// Maximum number of savepoint positions that are recorded for a transaction.
pub const SAVEPOINTS_MAX: usize = 1 << 12;

/// Maximum number of prepared XA transactions that a decoder keeps track of. Servers have few. If there are more, a
/// transaction is searched for in the log when it commits.
pub const PREPARED_TRANSACTIONS_MAX: usize = 65_536;

/// Maximum total size of the events of prepared XA transactions that a decoder buffers. Events beyond this limit are
/// read again at commit.
pub const PREPARED_EVENTS_BYTES_MAX: usize = 16 << 20;

/// Maximum size of an event that a search assembles from pieces. A longer event contains a single row or statement, and
/// becomes a candidate without being searched.
pub const SEARCHED_EVENT_BYTES_MAX: usize = 16 << 20;

/// Maximum number of changes in a transaction of tables whose rows have conditions. Each takes a byte until the
/// transaction ends.
pub const VERDICT_ROWS_MAX: usize = 1 << 26;

/// Length of the prefix of each gRPC message: a compression flag and the message's length.
pub const GRPC_PREFIX_BYTES: usize = 5;

/// How many bytes a gRPC client may send for a call before the server reads them. All calls of a client together may
/// send four times as many. This window limits the throughput of a distant client.
pub const GRPC_WINDOW_BYTES: u32 = 4 << 20;

/// Maximum size of a gRPC call's headers, as in gRPC's own servers.
pub const GRPC_HEADERS_BYTES_MAX: u32 = 16 << 10;

const _: () = assert!(EVENT_BYTES_MAX < u32::MAX as usize, "an event's length is a 32-bit field");
const _: () = assert!(SEARCHED_EVENT_BYTES_MAX < EVENT_BYTES_MAX);
const _: () = assert!(EVENT_HEADER_BYTES + CHECKSUM_BYTES < EVENT_BYTES_MAX);
