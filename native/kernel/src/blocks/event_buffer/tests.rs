//! Compares the buffer with a vector, and checks which memory it uses again.

use super::*;

/// Pseudo-random numbers below a bound (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    /// A small size, or one that may not fit into an arena.
    fn size(&mut self) -> usize {
        match self.below(8) {
            0 => self.below(ARENA_BYTES + ARENA_BYTES / 2),
            1..3 => self.below(ARENA_BYTES / 3),
            _ => self.below(COPY_BYTES_MAX * 2),
        }
    }
}

#[test]
fn taken_bytes_equal_those_of_a_vector_after_random_steps() {
    for seed in 1..=4u64 {
        let mut random = Random(seed);
        let mut buffer = EventBuffer::default();
        let (mut complete, mut front) = (Vec::new(), Vec::new());
        let mut held: VecDeque<(Bytes, Vec<u8>)> = VecDeque::new();
        for step in 0..120u32 {
            let events = vec![step as u8; random.size()];
            buffer.reserve(events.len());
            match random.below(4) {
                0 if front.is_empty() => {
                    buffer.add(&events, u64::from(step));
                    complete.extend(events);
                }
                0 | 1 => {
                    buffer.add_piece(&events);
                    front.extend(events);
                }
                2 => {
                    let bytes = buffer.lend();
                    assert_eq!(bytes.len(), complete.len() + front.len());
                    if random.below(2) == 0 {
                        buffer.give_back(bytes, PendingEvent::Dropped);
                        front.clear();
                    } else {
                        buffer.give_back(bytes, PendingEvent::Complete(u64::from(step)));
                        complete.append(&mut front);
                    }
                }
                _ => {
                    held.push_back((buffer.take(), std::mem::take(&mut complete)));
                    assert_eq!(buffer.start, buffer.end);
                    while held.len() > random.below(12) {
                        let (taken, expected) = held.pop_front().unwrap();
                        assert!(taken == expected, "step {step} of seed {seed}");
                    }
                }
            }
            assert_eq!(buffer.complete_bytes(), complete.len());
            assert!(buffer.front() == front, "step {step} of seed {seed}");
        }
        assert!(held.iter().all(|(taken, expected)| taken == expected), "seed {seed}");
    }
}

#[test]
fn memory_of_dropped_events_is_used_again() {
    let mut buffer = EventBuffer::default();
    let event = vec![7; 1 << 20];
    let mut held = VecDeque::new();
    let mut arenas = std::collections::BTreeSet::new();
    for _ in 0..200 {
        buffer.reserve(event.len());
        buffer.add(&event, 0);
        let events = buffer.take();
        arenas.insert(events.as_ptr() as usize);
        held.push_back(events);
        if held.len() > 20 {
            held.pop_front();
        }
    }
    // 21 held mebibytes occupy at most four arenas of up to eight places; one more is being filled.
    assert!(arenas.len() <= 5 * ARENA_BYTES / event.len(), "{} places", arenas.len());
}

#[test]
fn few_events_are_copied_so_that_they_hold_no_arena() {
    let mut buffer = EventBuffer::default();
    let event = vec![7; COPY_BYTES_MAX];
    let mut held = Vec::new();
    for _ in 0..2 * ARENA_BYTES / COPY_BYTES_MAX {
        buffer.reserve(event.len());
        buffer.add(&event, 0);
        held.push(buffer.take());
    }
    assert!(buffer.retired.is_empty(), "one arena is enough");
    assert!(held.iter().all(|events| events == &event));
}

#[test]
fn events_that_are_held_for_long_do_not_prevent_the_reuse_of_later_memory() {
    let mut buffer = EventBuffer::default();
    let event = vec![7; 1 << 20];
    let mut first = None;
    for _ in 0..10 * ARENA_BYTES / event.len() {
        buffer.reserve(event.len());
        buffer.add(&event, 0);
        let events = buffer.take();
        first.get_or_insert(events);
    }
    assert!(buffer.retired.len() <= 2, "{} arenas are kept", buffer.retired.len());
    assert!(first.is_some_and(|events| events == event));
}
