//! CRC32 of events (the zlib polynomial), using the processor's instructions if available.

use std::sync::OnceLock;

/// A hasher after CPU feature detection, which costs as much as the checksum of a short event.
static FRESH: OnceLock<crc32fast::Hasher> = OnceLock::new();

/// Computes the CRC32 that the server writes at the end of an event.
#[inline]
pub fn crc32(bytes: &[u8]) -> u32 {
    let mut hasher = FRESH.get_or_init(crc32fast::Hasher::new).clone();
    hasher.update(bytes);
    hasher.finalize()
}

/// Computes the CRC32 of `head` followed by `tail`, for an event with a few replaced bytes.
pub fn crc32_of_two(head: &[u8], tail: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(tail);
    hasher.finalize()
}
