//! The buffer of event bytes that the caller has not taken yet.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};

/// Size of the memory blocks in which events are gathered, unless a single event is larger.
const ARENA_BYTES: usize = 8 << 20;

/// At most this many bytes are copied out, because a caller may hold them for a long time, and their arena with them.
const COPY_BYTES_MAX: usize = 64 << 10;

/// At most this many arenas are kept for reuse while the caller holds parts of them.
const RETIRED_ARENAS_MAX: usize = 16;

/// What the buffer does with the incomplete event after it was processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PendingEvent {
    /// The event is complete, kept, and ends at this source offset.
    Complete(u64),
    /// The event stays buffered until the caller takes the hole that precedes it.
    Held,
    /// The event is dropped.
    Dropped,
}

/// Complete events of one file, optionally followed by the start of an incomplete event.
///
/// Taken events share the memory of their arena. An arena is used again once the caller has dropped everything that was
/// taken from it: the pages of fresh memory cost as much as filling them.
#[derive(Debug, Default)]
pub(super) struct EventBuffer {
    /// The unused part of the current arena, and the events in it that have not been taken.
    bytes: BytesMut,
    complete_bytes: usize,
    /// Whether the current arena has the usual size.
    reusable: bool,
    /// Full arenas, oldest first.
    retired: VecDeque<BytesMut>,
    /// The source offsets of the complete events.
    pub start: u64,
    pub end: u64,
}

impl EventBuffer {
    /// Continues at another offset. The buffer must be empty.
    pub fn move_to(&mut self, offset: u64) {
        (self.start, self.end) = (offset, offset);
    }

    /// Size of the complete events in bytes.
    pub fn complete_bytes(&self) -> usize {
        self.complete_bytes
    }

    /// Reserves capacity for the events of one call, so that they are copied only once.
    pub fn reserve(&mut self, bytes: usize) {
        if self.bytes.capacity() - self.bytes.len() < bytes && !self.bytes.try_reclaim(bytes) {
            self.change_arena(bytes);
        }
    }

    /// Appends a complete event that ends at source offset `end`.
    #[inline]
    pub fn add(&mut self, event: &[u8], end: u64) {
        self.bytes.extend_from_slice(event);
        self.complete_bytes += event.len();
        self.end = end;
    }

    /// Appends a piece of an incomplete event.
    pub fn add_piece(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
    }

    /// The bytes of the incomplete event so far.
    pub fn front(&self) -> &[u8] {
        self.bytes.get(self.complete_bytes..).unwrap_or_default()
    }

    /// Lends all bytes, so that the caller can process the incomplete event at the end. `give_back` returns the bytes.
    pub fn lend(&mut self) -> BytesMut {
        std::mem::take(&mut self.bytes)
    }

    /// Takes back the bytes that `lend` returned.
    pub fn give_back(&mut self, bytes: BytesMut, pending_event: PendingEvent) {
        self.bytes = bytes;
        match pending_event {
            PendingEvent::Complete(end) => {
                self.complete_bytes = self.bytes.len();
                self.end = end;
            }
            PendingEvent::Held => {}
            PendingEvent::Dropped => self.bytes.truncate(self.complete_bytes),
        }
    }

    /// Takes the complete events; the incomplete event stays.
    pub fn take(&mut self) -> Bytes {
        let complete_bytes = std::mem::take(&mut self.complete_bytes);
        self.start = self.end;
        if complete_bytes == self.bytes.len() && complete_bytes <= COPY_BYTES_MAX {
            let events = Bytes::copy_from_slice(&self.bytes);
            self.bytes.clear();
            return events;
        }
        if complete_bytes <= COPY_BYTES_MAX {
            let events = Bytes::copy_from_slice(self.bytes.get(..complete_bytes).unwrap_or_default());
            self.bytes.advance(complete_bytes);
            return events;
        }
        let events = self.bytes.split_to(complete_bytes).freeze();
        // The next events are probably as large as these. Change the arena before they would have to be copied.
        let next_bytes = ARENA_BYTES.min(complete_bytes + complete_bytes / 4);
        if !self.reusable || self.bytes.capacity() < next_bytes {
            self.change_arena(0);
        }
        events
    }

    /// Continues in another arena with room for some more bytes.
    fn change_arena(&mut self, bytes: usize) {
        // Doubling bounds how often the bytes of a long event are copied.
        let capacity = ARENA_BYTES.max(self.bytes.len() * 2 + bytes);
        // A slow caller may hold parts of the oldest arena for long, so look at all of them.
        let reusable = self.retired.iter_mut().position(|arena| arena.try_reclaim(capacity));
        let spare = reusable.and_then(|number| self.retired.remove(number));
        let mut arena = spare.unwrap_or_else(|| BytesMut::with_capacity(capacity));
        arena.extend_from_slice(&self.bytes);
        let mut full = std::mem::replace(&mut self.bytes, arena);
        if self.reusable && self.retired.len() < RETIRED_ARENAS_MAX {
            full.clear();
            self.retired.push_back(full);
        }
        self.reusable = capacity == ARENA_BYTES;
    }
}

#[cfg(test)]
mod tests;
