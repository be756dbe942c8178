//! A pool of vectors for the columns of batches. The memory of a vector returns to the pool when the last reader of its
//! batch drops the batch.
//!
//! The allocator would obtain new pages from the operating system for every large batch, and the first write to each
//! new page costs more than decoding the data. Columns therefore reuse the memory of earlier batches.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use arrow_buffer::{ArrowNativeType, Buffer, ToByteSlice};
use bytes::Bytes;

/// Smaller buffers are left to the allocator, which reuses them anyway.
const BYTES_MIN: usize = 1 << 14;

type Shelf<T> = Mutex<Vec<Vec<T>>>;

/// The pool to which lent vectors return. Its vectors have about the same length.
#[derive(Debug)]
pub(crate) struct Spares<T> {
    shelf: Arc<Shelf<T>>,
    kept_max: usize,
    /// Length of the last vector that was lent, which is the estimate for the next vector.
    length: usize,
}

/// A vector that is read as a buffer.
struct Lent<T: ArrowNativeType> {
    values: Vec<T>,
    shelf: Weak<Shelf<T>>,
    kept_max: usize,
}

fn lock<T>(shelf: &Shelf<T>) -> MutexGuard<'_, Vec<Vec<T>>> {
    // Vectors are pushed and popped as a whole, so the pool is consistent even after a panic.
    shelf.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: ArrowNativeType> Spares<T> {
    /// Creates a pool that keeps at most `kept_max` vectors.
    pub(crate) fn new(kept_max: usize) -> Spares<T> {
        Spares { shelf: Arc::default(), kept_max, length: 0 }
    }

    /// Returns an empty vector with capacity for as many values as the last one.
    pub(crate) fn take(&self) -> Vec<T> {
        lock(&self.shelf).pop().unwrap_or_else(|| Vec::with_capacity(self.length))
    }

    /// Turns a vector into a buffer without a copy; its memory returns once the last reader drops the buffer.
    pub(crate) fn lend(&mut self, values: Vec<T>) -> Buffer {
        self.length = values.len();
        if std::mem::size_of_val(values.as_slice()) < BYTES_MIN {
            return Buffer::from_vec(values);
        }
        Bytes::from_owner(Lent { values, shelf: Arc::downgrade(&self.shelf), kept_max: self.kept_max }).into()
    }

    /// Frees the pooled memory, for a column that is not in use.
    pub(crate) fn clear(&mut self) {
        self.length = 0;
        lock(&self.shelf).clear();
    }
}

impl<T: ArrowNativeType> AsRef<[u8]> for Lent<T> {
    fn as_ref(&self) -> &[u8] {
        self.values.as_slice().to_byte_slice()
    }
}

impl<T: ArrowNativeType> Drop for Lent<T> {
    fn drop(&mut self) {
        let Some(shelf) = self.shelf.upgrade() else { return };
        let mut kept = lock(&shelf);
        if kept.len() < self.kept_max {
            self.values.clear();
            kept.push(std::mem::take(&mut self.values));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_returns_when_the_last_reader_drops_it() {
        let mut spares = Spares::<i64>::new(1);
        let values: Vec<i64> = (0..10_000).collect();
        let address = values.as_ptr();
        let buffer = spares.lend(values);
        let reader = buffer.clone();
        drop(buffer);
        assert_eq!(reader.typed_data::<i64>().last(), Some(&9_999));
        let second = spares.take();
        assert_ne!(second.as_ptr(), address);
        drop(reader);
        let third = spares.take();
        assert!(third.is_empty() && third.capacity() >= 10_000);
        assert_eq!(third.as_ptr(), address);
    }

    #[test]
    fn the_pool_has_a_maximum_size() {
        let mut spares = Spares::<u8>::new(1);
        let buffers = [(); 3].map(|()| spares.lend(vec![7; BYTES_MIN]));
        drop(buffers);
        assert_eq!(lock(&spares.shelf).len(), 1);
        spares.clear();
        assert_eq!(spares.take().capacity(), 0);
    }
}
