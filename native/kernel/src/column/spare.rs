//! Vectors whose memory comes back when nobody reads the batch that was made of them.
//!
//! A batch is large enough that its memory is new to the process, and the first write to each new page costs more than
//! the decoding of what is written there. So a column that fills batch after batch fills the same memory in turns.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use arrow_buffer::{ArrowNativeType, Buffer, ToByteSlice};
use bytes::Bytes;

/// What is smaller is left to the allocator, which has as much at hand.
const BYTES_MIN: usize = 1 << 14;

type Shelf<T> = Mutex<Vec<Vec<T>>>;

/// Where vectors of one length, more or less, come back to.
#[derive(Debug)]
pub(crate) struct Spares<T> {
    shelf: Arc<Shelf<T>>,
    kept_max: usize,
    /// The length of the vector that was lent last, which the next will about have.
    length: usize,
}

/// A vector that is read as a buffer.
struct Lent<T: ArrowNativeType> {
    values: Vec<T>,
    shelf: Weak<Shelf<T>>,
    kept_max: usize,
}

fn open<T>(shelf: &Shelf<T>) -> MutexGuard<'_, Vec<Vec<T>>> {
    // A vector is pushed or popped whole, so a shelf is in order whatever happened to those that used it.
    shelf.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: ArrowNativeType> Spares<T> {
    /// Keeps at most `kept_max` vectors.
    pub(crate) fn new(kept_max: usize) -> Spares<T> {
        Spares { shelf: Arc::default(), kept_max, length: 0 }
    }

    /// An empty vector with room for as much as the last one held.
    pub(crate) fn take(&self) -> Vec<T> {
        open(&self.shelf).pop().unwrap_or_else(|| Vec::with_capacity(self.length))
    }

    /// Makes a buffer of a vector, without a copy; its memory comes back once nobody reads it any more.
    pub(crate) fn lend(&mut self, values: Vec<T>) -> Buffer {
        self.length = values.len();
        if std::mem::size_of_val(values.as_slice()) < BYTES_MIN {
            return Buffer::from_vec(values);
        }
        Bytes::from_owner(Lent { values, shelf: Arc::downgrade(&self.shelf), kept_max: self.kept_max }).into()
    }

    /// Lets go of what was kept, where nothing came for a while.
    pub(crate) fn clear(&mut self) {
        self.length = 0;
        open(&self.shelf).clear();
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
        let mut kept = open(&shelf);
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
    fn memory_comes_back_when_its_last_reader_lets_go() {
        let mut spares = Spares::<i64>::new(1);
        let values: Vec<i64> = (0..10_000).collect();
        let place = values.as_ptr();
        let buffer = spares.lend(values);
        let reader = buffer.clone();
        drop(buffer);
        assert_eq!(reader.typed_data::<i64>().last(), Some(&9_999));
        let other = spares.take();
        assert_ne!(other.as_ptr(), place);
        drop(reader);
        let again = spares.take();
        assert!(again.is_empty() && again.capacity() >= 10_000);
        assert_eq!(again.as_ptr(), place);
    }

    #[test]
    fn no_more_is_kept_than_was_said() {
        let mut spares = Spares::<u8>::new(1);
        let buffers = [(); 3].map(|()| spares.lend(vec![7; BYTES_MIN]));
        drop(buffers);
        assert_eq!(open(&spares.shelf).len(), 1);
        spares.clear();
        assert_eq!(spares.take().capacity(), 0);
    }
}
