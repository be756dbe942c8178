//! The limits of the kernel, with their reasons.

/// Length of an event's header since binlog version 4.
pub const EVENT_HEADER_BYTES: usize = 19;

/// Length of the CRC32 at the end of each event if checksums are enabled.
pub const CHECKSUM_BYTES: usize = 4;

/// The four bytes before the first event of a file.
pub const MAGIC_BYTES: usize = 4;

/// The largest event: the server's maximum of `max_allowed_packet` plus its allowance for headers.
pub const EVENT_BYTES_MAX: usize = (1 << 30) + 64 * 1024;

/// The largest decompressed transaction payload. Payloads are streamed, so this does not bound memory.
pub const PAYLOAD_BYTES_MAX: u64 = 1 << 40;

/// The largest decompressed MariaDB event or column: the same as an event.
pub const DECOMPRESSED_BYTES_MAX: usize = EVENT_BYTES_MAX;

/// Columns of a table: the server's maximum (InnoDB's is 1017).
pub const COLUMNS_MAX: usize = 4096;

/// Depth of a JSON document: the server's JSON_DOCUMENT_MAX_DEPTH.
pub const JSON_DEPTH_MAX: usize = 100;

/// Number of open table maps. Transactions that change more tables are rejected, to bound memory.
pub const TABLES_OPEN_MAX: usize = 1 << 16;

/// Number of savepoints of a transaction whose positions are recorded.
pub const SAVEPOINTS_MAX: usize = 1 << 12;

/// The number of prepared XA transactions that a decoder records; servers have few. Others are searched for in the log
/// when they commit.
pub const PREPARED_TRANSACTIONS_MAX: usize = 65_536;

/// Buffered events of prepared XA transactions in one decoder. Events beyond this are read again at commit.
pub const PREPARED_EVENTS_BYTES_MAX: usize = 16 << 20;

/// An event that a search buffers whole if it arrives in pieces. Longer ones, which have a single row or statement,
/// are candidates without being searched.
pub const SEARCHED_EVENT_BYTES_MAX: usize = 16 << 20;

/// The bytes before each gRPC message: whether it is compressed, and its length.
pub const GRPC_PREFIX_BYTES: usize = 5;

/// The amount that a gRPC client may send for one call before it is read; for all of its calls, four times as much. It
/// bounds the throughput of a distant client.
pub const GRPC_WINDOW_BYTES: u32 = 4 << 20;

/// The headers of a gRPC call, as with gRPC's own servers.
pub const GRPC_HEADERS_BYTES_MAX: u32 = 16 << 10;

const _: () = assert!(EVENT_BYTES_MAX < u32::MAX as usize, "an event's length is a 32-bit field");
const _: () = assert!(SEARCHED_EVENT_BYTES_MAX < EVENT_BYTES_MAX);
const _: () = assert!(EVENT_HEADER_BYTES + CHECKSUM_BYTES < EVENT_BYTES_MAX);
