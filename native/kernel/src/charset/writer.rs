//! UTF-8 output that is staged in a small block before it is appended.

/// Large enough to make appends rare, but small enough to stay in the L1 cache and to be cheap for short values.
const STAGED_BYTES_MAX: usize = 96;
const CHARACTER_BYTES_MAX: usize = 4;

/// Appends characters and runs of ASCII to `out`; `finish` appends the staged bytes.
pub(super) struct Writer<'a> {
    out: &'a mut Vec<u8>,
    staged: [u8; STAGED_BYTES_MAX],
    staged_bytes: usize,
}

impl<'a> Writer<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>) -> Self {
        Writer { out, staged: [0; STAGED_BYTES_MAX], staged_bytes: 0 }
    }

    /// Append a character, which must be at most U+10FFFF and not a surrogate.
    #[inline]
    pub(super) fn push(&mut self, character: u32) {
        if self.staged_bytes > STAGED_BYTES_MAX - CHARACTER_BYTES_MAX {
            self.finish();
        }
        let (encoded, bytes) = encode(character);
        if let Some(slot) = self.staged.get_mut(self.staged_bytes..self.staged_bytes + CHARACTER_BYTES_MAX) {
            slot.copy_from_slice(&encoded);
            self.staged_bytes += bytes;
        }
    }

    /// Append bytes that are already UTF-8.
    #[inline]
    pub(super) fn copy(&mut self, text: &[u8]) {
        self.finish();
        self.out.extend_from_slice(text);
    }

    /// Append the staged bytes.
    #[inline]
    pub(super) fn finish(&mut self) {
        self.out.extend_from_slice(self.staged.get(..self.staged_bytes).unwrap_or(&[]));
        self.staged_bytes = 0;
    }
}

/// Encode a character (RFC 3629, section 3). Return its bytes, and how many of these bytes are used.
///
/// For characters of up to three bytes, the code selects one of three precomputed numbers, which avoids branch
/// mispredictions when lengths alternate.
#[inline]
fn encode(character: u32) -> ([u8; CHARACTER_BYTES_MAX], usize) {
    let tail = |shift: u32| 0x80 | (character >> shift & 0x3F);
    if character > 0xFFFF {
        let four = 0xF0 | character >> 18 | tail(12) << 8 | tail(6) << 16 | tail(0) << 24;
        return (four.to_le_bytes(), 4);
    }
    let two = 0xC0 | character >> 6 | tail(0) << 8;
    let three = 0xE0 | character >> 12 | tail(6) << 8 | tail(0) << 16;
    let long = if character < 0x800 { two } else { three };
    let bytes = if character < 0x80 { character } else { long };
    let length = 1 + usize::from(character >= 0x80) + usize::from(character >= 0x800);
    (bytes.to_le_bytes(), length)
}
