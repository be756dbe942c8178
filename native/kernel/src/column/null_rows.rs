//! The null rows of a column.

use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};

/// The null rows of the current batch. A value that is not null costs nothing here.
#[derive(Debug, Default)]
pub(super) struct NullRows {
    /// The validity bits up to the byte of the last null row, 0 for null rows.
    bits: Vec<u8>,
}

impl NullRows {
    /// Marks a row as null. Rows are marked in ascending order.
    #[inline]
    pub(super) fn push(&mut self, row: usize) {
        if self.bits.len() <= row / 8 {
            self.bits.resize(row / 8 + 1, u8::MAX);
        }
        if let Some(last) = self.bits.last_mut() {
            *last &= !(1 << (row % 8));
        }
    }

    /// Memory size in bytes.
    #[inline]
    pub(super) fn bytes(&self) -> usize {
        self.bits.len()
    }

    /// Returns the validity of the first `rows` rows, None if no row is null. Afterwards no row is marked.
    pub(super) fn finish(&mut self, rows: usize) -> Option<NullBuffer> {
        if self.bits.is_empty() {
            return None;
        }
        let mut bits = std::mem::take(&mut self.bits);
        bits.resize(rows.div_ceil(8), u8::MAX);
        Some(NullBuffer::new(BooleanBuffer::new(Buffer::from_vec(bits), 0, rows)))
    }
}

#[cfg(test)]
mod tests {
    use arrow_buffer::NullBufferBuilder;

    use super::*;

    #[test]
    fn validity_equals_that_of_arrows_builder() {
        let mut state = 1u64;
        let mut null_rows = NullRows::default();
        for round in 0..2_000 {
            let mut expected = NullBufferBuilder::new(0);
            for row in 0..round % 70 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let is_null = (state >> 33) % 5 < round % 6;
                expected.append(!is_null);
                if is_null {
                    null_rows.push(row as usize);
                }
            }
            assert_eq!(null_rows.finish((round % 70) as usize), expected.finish());
            assert_eq!(null_rows.bytes(), 0);
        }
    }
}
