//! CRC32 of events (the zlib polynomial), using the processor's instructions if available, and CRC-32C.

use std::sync::{LazyLock, OnceLock};

/// A hasher with its CPU features detected already: detection costs as much as the checksum of a short event.
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

/// The polynomial of CRC-32C (Castagnoli), lowest bit first.
const CASTAGNOLI: u32 = 0x82f6_3b78;

/// The CRC-32C of each byte.
static BYTE_CHECKSUMS: LazyLock<[u32; 256]> = LazyLock::new(|| {
    std::array::from_fn(|byte| {
        (0..8).fold(byte as u32, |crc, _| if crc & 1 == 1 { crc >> 1 ^ CASTAGNOLI } else { crc >> 1 })
    })
});

/// Computes the CRC-32C that follows each record in the files of TiDB-Binlog's Drainer.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let table = &*BYTE_CHECKSUMS;
    let step = |crc: u32, byte: &u8| {
        let index = usize::from(crc as u8 ^ byte);
        crc >> 8 ^ table.get(index).copied().unwrap_or_default()
    };
    !bytes.iter().fold(u32::MAX, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn castagnoli_checksums_are_those_of_rfc_3720() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(b""), 0);
    }
}
