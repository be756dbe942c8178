//! Partitions of Kafka topics, by the hash of Kafka's own producers (murmur2), so that a key has the same partition
//! whichever producer sends it.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, Int32Array};
use arrow_schema::DataType;

use crate::error::{Error, ErrorKind, Result};

const SEED: u32 = 0x9747_b28c;
const FACTOR: u32 = 0x5bd1_e995;

/// Returns the partition of each key among `count`; null for a null key.
///
/// Raises `OptionInvalid` if `count` is 0, or if the keys are neither texts nor bytes.
pub fn partitions(keys: &ArrayRef, count: u32) -> Result<Int32Array> {
    let modulus = i32::try_from(count).ok().filter(|count| *count > 0);
    let modulus = modulus.ok_or_else(|| Error::new(ErrorKind::OptionInvalid, format!("{count} partitions")))?;
    let partition = |key: &[u8]| i32::from_ne_bytes((murmur2(key) & 0x7fff_ffff).to_ne_bytes()) % modulus;
    Ok(match keys.data_type() {
        DataType::Utf8 => keys.as_string::<i32>().iter().map(|key| key.map(|key| partition(key.as_bytes()))).collect(),
        DataType::LargeUtf8 => {
            keys.as_string::<i64>().iter().map(|key| key.map(|key| partition(key.as_bytes()))).collect()
        }
        DataType::Binary => keys.as_binary::<i32>().iter().map(|key| key.map(partition)).collect(),
        DataType::LargeBinary => keys.as_binary::<i64>().iter().map(|key| key.map(partition)).collect(),
        data_type => return Err(Error::new(ErrorKind::OptionInvalid, format!("keys of type {data_type}"))),
    })
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
