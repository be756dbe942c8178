//! Computes where a key belongs: its partition of a Kafka topic, or its slot in a Redis Cluster.
//!
//! Partitions use the hash of Kafka's own producers (murmur2), so that a key has the same partition whichever producer
//! sends it. Slots use the checksum that the Redis Cluster specification defines.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, Int32Array};
use arrow_schema::DataType;

use crate::error::{Error, ErrorKind, Result};

const SEED: u32 = 0x9747_b28c;
const FACTOR: u32 = 0x5bd1_e995;

const SLOTS: u16 = 16384;
const POLYNOMIAL: u16 = 0x1021;
const CRC16: [u16; 256] = crc16_table();

/// Returns the partition of each key, out of `count` partitions; null for a null key.
///
/// Raises `OptionInvalid` if `count` is 0, or if the keys are neither texts nor bytes.
pub fn partitions(keys: &ArrayRef, count: u32) -> Result<Int32Array> {
    let modulus = i32::try_from(count).ok().filter(|count| *count > 0);
    let modulus = modulus.ok_or_else(|| Error::new(ErrorKind::OptionInvalid, format!("{count} partitions")))?;
    map_keys(keys, |key| i32::from_ne_bytes((murmur2(key) & 0x7fff_ffff).to_ne_bytes()) % modulus)
}

/// Returns the slot of each key in a Redis Cluster; null for a null key.
///
/// If a key has a hash tag, which is a nonempty text in braces, only the tag determines its slot (cluster.c
/// `keyHashSlot`). Raises `OptionInvalid` if the keys are neither texts nor bytes.
pub fn slots(keys: &ArrayRef) -> Result<Int32Array> {
    map_keys(keys, |key| i32::from(crc16(hash_tag(key)) % SLOTS))
}

/// Returns a number for each key; null for a null key.
fn map_keys(keys: &ArrayRef, number: impl Fn(&[u8]) -> i32) -> Result<Int32Array> {
    let of_text = |key: Option<&str>| key.map(|key| number(key.as_bytes()));
    let of_bytes = |key: Option<&[u8]>| key.map(&number);
    Ok(match keys.data_type() {
        DataType::Utf8 => keys.as_string::<i32>().iter().map(of_text).collect(),
        DataType::LargeUtf8 => keys.as_string::<i64>().iter().map(of_text).collect(),
        DataType::Binary => keys.as_binary::<i32>().iter().map(of_bytes).collect(),
        DataType::LargeBinary => keys.as_binary::<i64>().iter().map(of_bytes).collect(),
        data_type => return Err(Error::new(ErrorKind::OptionInvalid, format!("keys of type {data_type}"))),
    })
}

/// Returns the part of a key that determines its slot: the bytes between the first opening brace and the next closing
/// brace, or the whole key if there are none.
fn hash_tag(key: &[u8]) -> &[u8] {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|brace| {
        let inside = key.get(brace + 1..)?;
        inside.get(..inside.iter().position(|byte| *byte == b'}')?)
    });
    tag.filter(|tag| !tag.is_empty()).unwrap_or(key)
}

/// Computes CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        let index = (crc >> 8 ^ u16::from(*byte)) & 0xff;
        crc << 8 ^ CRC16.get(usize::from(index)).copied().unwrap_or_default()
    })
}

const fn crc16_table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut byte: u16 = 0;
    while byte < 256 {
        let mut crc = byte << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ POLYNOMIAL };
            bit += 1;
        }
        table[byte as usize] = crc;
        byte += 1;
    }
    table
}

/// Computes Austin Appleby's murmur2 with Kafka's seed.
fn murmur2(key: &[u8]) -> u32 {
    let mut hash = SEED ^ u32::try_from(key.len()).unwrap_or(u32::MAX);
    let mut words = key.chunks_exact(4);
    for word in words.by_ref().filter_map(<[u8]>::first_chunk) {
        let word = u32::from_le_bytes(*word).wrapping_mul(FACTOR);
        let word = (word ^ word >> 24).wrapping_mul(FACTOR);
        hash = hash.wrapping_mul(FACTOR) ^ word;
    }
    let rest = words.remainder();
    if !rest.is_empty() {
        let tail = rest.iter().rev().fold(0, |tail, byte| tail << 8 | u32::from(*byte));
        hash = (hash ^ tail).wrapping_mul(FACTOR);
    }
    hash = (hash ^ hash >> 13).wrapping_mul(FACTOR);
    hash ^ hash >> 15
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{BinaryArray, Int8Array, StringArray};

    use super::*;

    #[test]
    fn hashes_are_those_of_kafkas_own_tests() {
        let cases: [(&[u8], i32); 6] = [
            (b"21", -973_932_308),
            (b"foobar", -790_332_482),
            (b"a-little-bit-long-string", -985_981_536),
            (b"a-little-bit-longer-string", -1_486_304_829),
            (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            (b"abc", 479_470_107),
        ];
        for (key, hash) in cases {
            assert_eq!(i32::from_ne_bytes(murmur2(key).to_ne_bytes()), hash);
        }
    }

    #[test]
    fn slots_are_those_of_the_cluster_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        let keys: ArrayRef = Arc::new(StringArray::from(vec![
            Some("foo"),
            Some("{foo}"),
            Some("a{foo}b{bar}"),
            Some("foo{}{bar}"),
            Some("foo{bar"),
            Some("foo{{bar}}zap"),
            Some(""),
            None,
        ]));
        let assigned = slots(&keys).unwrap();
        let whole = |key: &[u8]| i32::from(crc16(key) % SLOTS);
        assert_eq!(assigned.value(0), 12182);
        assert_eq!(assigned.value(1), 12182);
        assert_eq!(assigned.value(2), 12182);
        assert_eq!(assigned.value(3), whole(b"foo{}{bar}"));
        assert_eq!(assigned.value(4), whole(b"foo{bar"));
        assert_eq!(assigned.value(5), whole(b"{bar"));
        assert_eq!(assigned.value(6), 0);
        assert!(assigned.is_null(7));
        let numbers: ArrayRef = Arc::new(Int8Array::from(vec![1]));
        assert!(slots(&numbers).is_err());
    }

    #[test]
    fn texts_and_bytes_have_equal_partitions_and_nulls_have_none() {
        let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("foobar"), None, Some("")]));
        let bytes: ArrayRef = Arc::new(BinaryArray::from(vec![Some(&b"foobar"[..]), None, Some(b"")]));
        let assigned = partitions(&texts, 6).unwrap();
        assert_eq!(assigned, partitions(&bytes, 6).unwrap());
        assert!(assigned.is_null(1));
        assert_eq!(assigned.value(0), (0x7fff_ffff & -790_332_482) % 6);
        assert!(partitions(&texts, 0).is_err());
        let numbers: ArrayRef = Arc::new(Int8Array::from(vec![1]));
        assert!(partitions(&numbers, 6).is_err());
    }
}
