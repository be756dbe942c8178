//! The buffer of event bytes that the caller has not taken yet.

/// Data smaller than this fraction of the buffer's capacity is copied out.
const SMALL_PART: usize = 16;

/// Spare memory larger than this is not kept for reuse.
const SPARE_BYTES_MAX: usize = 16 << 20;

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
#[derive(Debug, Default)]
pub(super) struct EventBuffer {
    bytes: Vec<u8>,
    complete_bytes: usize,
    spare: Vec<u8>,
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
        self.bytes.reserve(bytes);
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
    pub fn lend(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Takes back the bytes that `lend` returned.
    pub fn give_back(&mut self, bytes: Vec<u8>, pending_event: PendingEvent) {
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
    pub fn take(&mut self) -> Vec<u8> {
        if self.complete_bytes == 0 {
            return Vec::new();
        }
        let complete_bytes = std::mem::take(&mut self.complete_bytes);
        self.start = self.end;
        if complete_bytes < self.bytes.capacity() / SMALL_PART {
            // Copy a few events and keep the capacity for the events that follow.
            let events = self.bytes.get(..complete_bytes).unwrap_or_default().to_vec();
            self.bytes.drain(..complete_bytes);
            return events;
        }
        let mut next = std::mem::take(&mut self.spare);
        next.extend_from_slice(self.bytes.get(complete_bytes..).unwrap_or_default());
        let mut events = std::mem::replace(&mut self.bytes, next);
        events.truncate(complete_bytes);
        // The caller may hold these bytes for a long time, so free their unused capacity.
        if events.capacity() - complete_bytes > complete_bytes / 4 {
            events.shrink_to_fit();
        }
        events
    }

    /// Takes back memory for reuse: allocating fresh memory costs as much as filling it.
    pub fn recycle(&mut self, mut spare: Vec<u8>) {
        if spare.capacity() > self.spare.capacity() && spare.capacity() <= SPARE_BYTES_MAX {
            spare.clear();
            self.spare = spare;
        }
    }
}
