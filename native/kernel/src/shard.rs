//! The slot of a row: a hash of its shard columns, by which shards share a subscription. Shard = slot % shard count.
//!
//! A key is a number or a text. One column that is an integer (YEAR and BIT too, and DECIMAL(20,0) within 64 bits, which
//! Arrow cannot tell from BIGINT UNSIGNED) is a number, as is a single NULL: 0. Everything else is text as UTF-16: the
//! client's own text of a value, bytes as ISO-8859-1, several columns one behind the other, NULL among them as `null`.
//! The hash is that of Java's `31 * h + x` in 32 bits.

/// Slots lie below this.
pub const SLOTS: i32 = 32_767;

/// The slot of messages that every shard has to see.
pub const SLOT_ALL: i16 = -1;

const KIND_NUMBER: i32 = 0;
const KIND_TEXT: i32 = 1;

/// The slot of a key that is a number.
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
    // Below 32767 in size, so the cast is exact.
    (hash % SLOTS).unsigned_abs() as i16
}

/// A key that is text, in the making.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextKey {
    hash: i32,
}

impl TextKey {
    /// Adds text.
    #[inline]
    pub fn text(&mut self, text: &str) {
        if text.is_ascii() {
            return self.latin1(text.as_bytes());
        }
        for unit in text.encode_utf16() {
            self.unit(unit);
        }
    }

    /// Adds bytes, each as the character of its number.
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

    /// The slot of the key.
    #[inline]
    pub fn slot(self) -> i16 {
        slot(seed(KIND_TEXT).wrapping_mul(31).wrapping_add(self.hash))
    }
}

/// The slot of a key that is one text.
pub fn slot_of_text(text: &str) -> i16 {
    let mut key = TextKey::default();
    key.text(text);
    key.slot()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fall_into_their_slots() {
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
    fn texts_fall_into_their_slots() {
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
    fn parts_of_a_key_stand_one_behind_the_other() {
        let mut key = TextKey::default();
        key.text("12");
        key.latin1(b"ab");
        assert_eq!(key.slot(), slot_of_text("12ab"));
        let mut latin = TextKey::default();
        latin.latin1(&[0xe4]);
        assert_eq!(latin.slot(), slot_of_text("\u{e4}"));
    }
}
