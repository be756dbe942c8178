//! The slot of a row: a hash of its shard columns that divides a subscription among shards. Shard = slot % shard
//! count.
//!
//! A key is a number or a text. The key of a single integer column is a number, and the key of a single NULL is the
//! number 0. YEAR and BIT count as integers, as does a DECIMAL(20,0) within 64 bits, which Arrow cannot distinguish
//! from BIGINT UNSIGNED. All other keys are texts in UTF-16: the value as the client shows it, bytes as ISO-8859-1, and
//! several columns concatenated, with NULL as `null`. The hash is Java's `31 * h + x` in 32 bits.

/// Slots are below this number.
pub const SLOTS: i32 = 32_767;

/// The slot of messages that all shards receive.
pub const SLOT_ALL: i16 = -1;

const KIND_NUMBER: i32 = 0;
const KIND_TEXT: i32 = 1;

/// Returns the slot of a number.
#[inline]
pub fn slot_of_number(value: i64) -> i16 {
    let folded = (value ^ logical_shift(value)) as i32;
    slot(seed(KIND_NUMBER).wrapping_mul(31).wrapping_add(folded))
}

#[inline]
fn logical_shift(value: i64) -> i64 {
    (value as u64 >> 32) as i64
}

#[inline]
const fn seed(kind: i32) -> i32 {
    31 + kind
}

#[inline]
fn slot(hash: i32) -> i16 {
    // The absolute value is below 32767, so the cast is exact.
    (hash % SLOTS).unsigned_abs() as i16
}

/// Builds a text key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextKey {
    hash: i32,
}

impl TextKey {
    /// Appends text.
    #[inline]
    pub fn text(&mut self, text: &str) {
        if text.is_ascii() {
            return self.latin1(text.as_bytes());
        }
        for unit in text.encode_utf16() {
            self.unit(unit);
        }
    }

    /// Appends bytes as ISO-8859-1 characters.
    #[inline]
    pub fn latin1(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.unit(u16::from(*byte));
        }
    }

    #[inline]
    fn unit(&mut self, unit: u16) {
        self.hash = self.hash.wrapping_mul(31).wrapping_add(i32::from(unit));
    }

    /// Returns the slot of the key.
    #[inline]
    pub fn slot(self) -> i16 {
        slot(seed(KIND_TEXT).wrapping_mul(31).wrapping_add(self.hash))
    }
}

/// Returns the slot of a key that is a single text.
pub fn slot_of_text(text: &str) -> i16 {
    let mut key = TextKey::default();
    key.text(text);
    key.slot()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_known_slots() {
        for (value, slot) in [
            (0, 961),
            (1, 962),
            (42, 1003),
            (1001, 1962),
            (-1, 961),
            (2_147_483_648, 31808),
            (1_099_511_627_783, 1224),
            (1_000_000_000_000_000, 9528),
        ] {
            assert_eq!(slot_of_number(value), slot, "{value}");
        }
    }

    #[test]
    fn texts_have_known_slots() {
        for (text, slot) in [
            ("", 992),
            ("abc", 31812),
            ("1", 1041),
            ("order-10001", 12646),
            ("10.50", 3644),
            ("\u{7528}\u{6237}", 5644),
            ("12ab", 4624),
        ] {
            assert_eq!(slot_of_text(text), slot, "{text}");
        }
    }

    #[test]
    fn parts_of_a_key_are_concatenated() {
        let mut key = TextKey::default();
        key.text("12");
        key.latin1(b"ab");
        assert_eq!(key.slot(), slot_of_text("12ab"));
        let mut latin = TextKey::default();
        latin.latin1(&[0xe4]);
        assert_eq!(latin.slot(), slot_of_text("\u{e4}"));
    }
}
