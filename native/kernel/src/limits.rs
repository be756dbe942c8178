//! Every bound of the kernel, with the reason beside it.

/// Length of the header every event carries since binlog version 4.
pub const EVENT_HEADER_BYTES: usize = 19;

/// Length of the CRC32 at an event's end, where checksums are on.
pub const CHECKSUM_BYTES: usize = 4;

/// The four bytes before the first event of a file.
pub const MAGIC_BYTES: usize = 4;

/// The largest event: the server's ceiling for `max_allowed_packet` plus its own allowance for headers.
pub const EVENT_BYTES_MAX: usize = (1 << 30) + 64 * 1024;

/// The largest transaction payload after decompression that is still followed; it streams, so this is no memory bound.
pub const PAYLOAD_BYTES_MAX: u64 = 1 << 40;

/// A decompressed MariaDB event or column may not pass the ceiling of one event.
pub const DECOMPRESSED_BYTES_MAX: usize = EVENT_BYTES_MAX;

/// Columns of one table: the server allows 4096 (InnoDB 1017).
pub const COLUMNS_MAX: usize = 4096;

/// Depth of a JSON document: the server's own JSON_DOCUMENT_MAX_DEPTH.
pub const JSON_DEPTH_MAX: usize = 100;

/// Table maps kept at once; a transaction that touches more tables than this is refused rather than let grow.
pub const TABLES_OPEN_MAX: usize = 1 << 16;

/// Savepoints of one transaction whose place is remembered.
pub const SAVEPOINTS_MAX: usize = 1 << 12;

/// Prepared XA transactions that one decoder remembers; a server holds a few. One that is not remembered is looked for in the
/// log when it commits.
pub const PREPARED_TRANSACTIONS_MAX: usize = 65_536;

/// Events of prepared XA transactions that one decoder keeps; what is over is read again when the transaction commits.
pub const PREPARED_EVENTS_BYTES_MAX: usize = 16 << 20;

const _: () = assert!(EVENT_BYTES_MAX < u32::MAX as usize, "an event's length is a 32-bit field");
const _: () = assert!(EVENT_HEADER_BYTES + CHECKSUM_BYTES < EVENT_BYTES_MAX);
