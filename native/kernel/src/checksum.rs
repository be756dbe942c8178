//! CRC32 of events (the zlib polynomial), by the processor's own instructions where it has them.

use std::sync::OnceLock;

/// A hasher that has found out which instructions there are, which takes as long as a short event's checksum.
static FRESH: OnceLock<crc32fast::Hasher> = OnceLock::new();

/// The CRC32 that the server puts at the end of an event.
#[inline]
pub fn crc32(bytes: &[u8]) -> u32 {
    let mut hasher = FRESH.get_or_init(crc32fast::Hasher::new).clone();
    hasher.update(bytes);
    hasher.finalize()
}

/// The CRC32 of `head` followed by `tail`, for an event of which a few bytes must be read differently.
pub fn crc32_of_two(head: &[u8], tail: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(tail);
    hasher.finalize()
}
