//! The event bytes that wait to be taken.

/// Data below this part of the room leave by a copy.
const SMALL_PART: usize = 16;

/// No more than this is kept to be filled again.
const SPARE_BYTES_MAX: usize = 16 << 20;

/// What becomes of the event behind the whole ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is one of them now, and ends at this source offset.
    Whole(u64),
    /// It waits.
    Waits,
    /// It goes.
    Gone,
}

/// Whole events of one file, back to back, and behind them perhaps the front of one that is not whole yet.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    bytes: Vec<u8>,
    whole: usize,
    spare: Vec<u8>,
    /// The source offsets of the whole events.
    pub start: u64,
    pub end: u64,
}

impl Gathered {
    /// Goes on at another place. Nothing may be gathered.
    pub fn move_to(&mut self, offset: u64) {
        (self.start, self.end) = (offset, offset);
    }

    /// How many bytes of whole events wait.
    pub fn whole(&self) -> usize {
        self.whole
    }

    /// Makes room for what one call may bring, so that events are copied once.
    pub fn reserve(&mut self, bytes: usize) {
        self.bytes.reserve(bytes);
    }

    /// Adds one whole event that ends at a source offset.
    #[inline]
    pub fn add(&mut self, event: &[u8], end: u64) {
        self.bytes.extend_from_slice(event);
        self.whole += event.len();
        self.end = end;
    }

    /// Adds a piece of the event that is not whole yet.
    pub fn add_piece(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
    }

    /// The event that is not whole yet, as far as it is there.
    pub fn front(&self) -> &[u8] {
        self.bytes.get(self.whole..).unwrap_or_default()
    }

    /// Lends out all bytes, for an event in them to be looked at; `give_back` ends that.
    pub fn lend(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Takes the bytes back.
    pub fn give_back(&mut self, bytes: Vec<u8>, fate: Fate) {
        self.bytes = bytes;
        match fate {
            Fate::Whole(end) => {
                self.whole = self.bytes.len();
                self.end = end;
            }
            Fate::Waits => {}
            Fate::Gone => self.bytes.truncate(self.whole),
        }
    }

    /// Takes the whole events; the front of the next one stays.
    pub fn take(&mut self) -> Vec<u8> {
        if self.whole == 0 {
            return Vec::new();
        }
        let whole = std::mem::take(&mut self.whole);
        self.start = self.end;
        if whole < self.bytes.capacity() / SMALL_PART {
            // A few events are worth a copy: the room stays for those that follow.
            let taken = self.bytes.get(..whole).unwrap_or_default().to_vec();
            self.bytes.drain(..whole);
            return taken;
        }
        let mut next = std::mem::take(&mut self.spare);
        next.extend_from_slice(self.bytes.get(whole..).unwrap_or_default());
        let mut taken = std::mem::replace(&mut self.bytes, next);
        taken.truncate(whole);
        // Somebody keeps these bytes for long, so room that was not needed is given back.
        if taken.capacity() - whole > whole / 4 {
            taken.shrink_to_fit();
        }
        taken
    }

    /// Takes back memory that was handed out, to be filled again: fresh memory costs as much as what is put into it.
    pub fn recycle(&mut self, mut spare: Vec<u8>) {
        if spare.capacity() > self.spare.capacity() && spare.capacity() <= SPARE_BYTES_MAX {
            spare.clear();
            self.spare = spare;
        }
    }
}
