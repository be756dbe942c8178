//! The buffer of event bytes that the caller has not taken yet.

/// Data smaller than this fraction of the buffer's capacity is copied out.
const SMALL_PART: usize = 16;

/// Spare memory larger than this is not kept for reuse.
const SPARE_BYTES_MAX: usize = 16 << 20;

/// The largest block in which disks and file systems write. Bytes that have the same offset in a block of memory as in
/// a block of their file can be written without a copy.
const DISK_BLOCK_BYTES: usize = 4096;

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

/// Complete events of one file, after padding that aligns them.
#[derive(Debug, Default)]
pub struct EventBytes {
    memory: Vec<u8>,
    padding: usize,
}

impl EventBytes {
    /// The bytes of the events.
    pub fn as_slice(&self) -> &[u8] {
        self.memory.get(self.padding..).unwrap_or_default()
    }

    /// Returns the memory for reuse.
    pub fn into_memory(self) -> Vec<u8> {
        self.memory
    }
}

impl From<Vec<u8>> for EventBytes {
    fn from(memory: Vec<u8>) -> EventBytes {
        EventBytes { memory, padding: 0 }
    }
}

/// Complete events of one file, optionally followed by the start of an incomplete event.
#[derive(Debug, Default)]
pub(super) struct EventBuffer {
    /// Padding, complete events, and the incomplete event.
    bytes: Vec<u8>,
    padding: usize,
    complete_bytes: usize,
    spare: Vec<u8>,
    /// The byte at source offset `o` is written to offset `o + file_shift` of a file, modulo the size of a block.
    file_shift: usize,
    /// The source offsets of the complete events.
    pub start: u64,
    pub end: u64,
}

impl EventBuffer {
    /// Continues at another offset. The buffer must be empty.
    pub fn move_to(&mut self, offset: u64) {
        (self.start, self.end) = (offset, offset);
    }

    /// Aligns the events that follow for a file in which source offset 0 has the offset `file_shift`.
    pub fn set_file_shift(&mut self, file_shift: u64) {
        self.file_shift = (file_shift % DISK_BLOCK_BYTES as u64) as usize;
    }

    /// Size of the complete events in bytes.
    pub fn complete_bytes(&self) -> usize {
        self.complete_bytes
    }

    /// Reserves capacity for the events of one call, so that they are copied only once.
    pub fn reserve(&mut self, bytes: usize) {
        if self.bytes.capacity() - self.bytes.len() >= bytes {
            return;
        }
        if self.bytes.len() > SPARE_BYTES_MAX {
            // The allocator grows large memory without a copy.
            self.bytes.reserve(bytes);
            return;
        }
        let capacity = self.bytes.len() + bytes.max(self.bytes.len() / 8) + DISK_BLOCK_BYTES;
        let memory = std::mem::take(&mut self.bytes);
        let padding = self.padding;
        self.restart(Vec::with_capacity(capacity), memory.get(padding..).unwrap_or_default());
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
        self.bytes.get(self.front_offset()..).unwrap_or_default()
    }

    /// Where the incomplete event starts in the bytes that `lend` returns.
    pub fn front_offset(&self) -> usize {
        self.padding + self.complete_bytes
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
                self.complete_bytes = self.bytes.len() - self.padding;
                self.end = end;
            }
            PendingEvent::Held => {}
            PendingEvent::Dropped => self.bytes.truncate(self.front_offset()),
        }
    }

    /// Takes the complete events; the incomplete event stays.
    pub fn take(&mut self) -> EventBytes {
        if self.complete_bytes == 0 {
            return EventBytes::default();
        }
        let front_offset = self.front_offset();
        let complete_bytes = std::mem::take(&mut self.complete_bytes);
        self.start = self.end;
        if complete_bytes < self.bytes.capacity() / SMALL_PART {
            // Copy a few events and keep the memory for the events that follow.
            let events = self.bytes.get(self.padding..front_offset).unwrap_or_default().to_vec();
            let front = self.bytes.split_off(front_offset);
            let memory = std::mem::take(&mut self.bytes);
            self.restart(memory, &front);
            return EventBytes { memory: events, padding: 0 };
        }
        let mut memory = std::mem::take(&mut self.bytes);
        let mut next = std::mem::take(&mut self.spare);
        if next.capacity() == 0 {
            next.reserve(memory.capacity().min(SPARE_BYTES_MAX));
        }
        let padding = self.padding;
        self.restart(next, memory.get(front_offset..).unwrap_or_default());
        memory.truncate(front_offset);
        // The caller may hold these bytes for a long time, so free their unused capacity.
        if memory.capacity() - complete_bytes > complete_bytes / 3 {
            memory.shrink_to_fit();
        }
        EventBytes { memory, padding }
    }

    /// Takes back memory for reuse: allocating fresh memory costs as much as filling it.
    pub fn recycle(&mut self, mut spare: Vec<u8>) {
        if spare.capacity() > self.spare.capacity() && spare.capacity() <= SPARE_BYTES_MAX {
            spare.clear();
            self.spare = spare;
        }
    }

    /// Continues in other memory with the given bytes. The first of them gets the offset in a block that it has in the
    /// file.
    fn restart(&mut self, mut memory: Vec<u8>, bytes: &[u8]) {
        memory.clear();
        memory.reserve(DISK_BLOCK_BYTES + bytes.len());
        let file_offset = (self.start as usize).wrapping_add(self.file_shift);
        self.padding = file_offset.wrapping_sub(memory.as_ptr() as usize) % DISK_BLOCK_BYTES;
        memory.resize(self.padding, 0);
        memory.extend_from_slice(bytes);
        self.bytes = memory;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_offset(events: &EventBytes) -> u64 {
        events.as_slice().as_ptr() as u64 % DISK_BLOCK_BYTES as u64
    }

    #[test]
    fn events_lie_in_blocks_of_memory_as_in_blocks_of_their_file() {
        let event: Vec<u8> = (0..=255).cycle().take(3000).collect();
        let mut buffer = EventBuffer::default();
        buffer.move_to(157);
        buffer.set_file_shift(300);
        let mut spare = Vec::new();
        let mut aligned = 0;
        for round in 0..40_u64 {
            buffer.recycle(std::mem::take(&mut spare));
            let (start, mut end) = (buffer.end, buffer.end);
            for number in 0..1 + round % 7 * 50 {
                end += event.len() as u64;
                buffer.reserve(event.len());
                if number % 2 == 0 {
                    buffer.add(&event, end);
                    continue;
                }
                buffer.add_piece(&event);
                let bytes = buffer.lend();
                buffer.give_back(bytes, PendingEvent::Complete(end));
            }
            buffer.add_piece(b"next");
            let events = buffer.take();
            assert_eq!(events.as_slice().len() as u64, end - start);
            assert!(events.as_slice().chunks(event.len()).all(|part| part == event));
            aligned += u32::from(block_offset(&events) == (start + 300) % DISK_BLOCK_BYTES as u64);
            assert_eq!(buffer.front(), b"next");
            let bytes = buffer.lend();
            buffer.give_back(bytes, PendingEvent::Dropped);
            assert_eq!((buffer.start, buffer.end, buffer.front().len()), (end, end, 0));
            spare = events.into_memory();
        }
        // A few events are copied out, and memory may move when its unused part is freed.
        assert!(aligned > 20, "{aligned} of 40");
    }
}
