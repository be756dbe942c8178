//! A bounds-checked reader, the only code that reads raw bytes.
//!
//! MySQL writes integers little-endian, except inside DECIMAL and the temporal types, which are big-endian so that they
//! sort as bytes. The cursor therefore reads both byte orders.

use crate::error::{malformed, Error, Result};

/// A view of the unread bytes.
#[derive(Debug, Clone, Copy)]
pub struct Cursor<'a> {
    rest: &'a [u8],
}

#[cold]
fn too_short(expected: usize, available: usize) -> Error {
    malformed(format!("{expected} bytes expected, {available} left"))
}

macro_rules! fixed {
    ($($(#[$doc:meta])* $name:ident -> $type:ty, $bytes:literal, $convert:path;)+) => {
        $($(#[$doc])*
        #[inline(always)]
        pub fn $name(&mut self) -> Result<$type> {
            match self.rest.split_first_chunk::<$bytes>() {
                Some((head, rest)) => {
                    self.rest = rest;
                    Ok($convert(*head))
                }
                None => Err(too_short($bytes, self.rest.len())),
            }
        })+
    };
}

#[inline(always)]
fn u24_le(bytes: [u8; 3]) -> u32 {
    let [a, b, c] = bytes;
    u32::from_le_bytes([a, b, c, 0])
}

#[inline(always)]
fn u48_le(bytes: [u8; 6]) -> u64 {
    let [a, b, c, d, e, f] = bytes;
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}

#[inline(always)]
fn u24_be(bytes: [u8; 3]) -> u32 {
    let [a, b, c] = bytes;
    u32::from_be_bytes([0, a, b, c])
}

#[inline(always)]
fn u40_be(bytes: [u8; 5]) -> u64 {
    let [a, b, c, d, e] = bytes;
    u64::from_be_bytes([0, 0, 0, a, b, c, d, e])
}

#[inline(always)]
fn u48_be(bytes: [u8; 6]) -> u64 {
    let [a, b, c, d, e, f] = bytes;
    u64::from_be_bytes([0, 0, a, b, c, d, e, f])
}

impl<'a> Cursor<'a> {
    /// Starts at the first byte of `bytes`.
    #[inline(always)]
    pub fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { rest: bytes }
    }

    fixed! {
        /// One byte.
        u8 -> u8, 1, u8::from_le_bytes;
        /// Reads two bytes, little-endian.
        u16 -> u16, 2, u16::from_le_bytes;
        /// Reads three bytes, little-endian.
        u24 -> u32, 3, u24_le;
        /// Reads four bytes, little-endian.
        u32 -> u32, 4, u32::from_le_bytes;
        /// Reads six bytes, little-endian.
        u48 -> u64, 6, u48_le;
        /// Reads eight bytes, little-endian.
        u64 -> u64, 8, u64::from_le_bytes;
        /// Reads two bytes, big-endian.
        u16_be -> u16, 2, u16::from_be_bytes;
        /// Reads three bytes, big-endian.
        u24_be -> u32, 3, u24_be;
        /// Reads four bytes, big-endian.
        u32_be -> u32, 4, u32::from_be_bytes;
        /// Reads five bytes, big-endian.
        u40_be -> u64, 5, u40_be;
        /// Reads six bytes, big-endian.
        u48_be -> u64, 6, u48_be;
        /// Reads eight bytes, big-endian.
        u64_be -> u64, 8, u64::from_be_bytes;
    }

    /// Reads the next `count` bytes.
    #[inline(always)]
    pub fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        match self.rest.split_at_checked(count) {
            Some((head, rest)) => {
                self.rest = rest;
                Ok(head)
            }
            None => Err(too_short(count, self.rest.len())),
        }
    }

    /// Skips `count` bytes.
    #[inline(always)]
    pub fn skip(&mut self, count: usize) -> Result<()> {
        self.take(count).map(|_| ())
    }

    /// Reads an unsigned integer of `bytes` (0 to 8) bytes, little-endian.
    #[inline(always)]
    pub fn uint(&mut self, bytes: usize) -> Result<u64> {
        // A read wider than the preceding write stalls the processor, so the common widths are read directly.
        match bytes {
            1 => return self.u8().map(u64::from),
            2 => return self.u16().map(u64::from),
            3 => return self.u24().map(u64::from),
            4 => return self.u32().map(u64::from),
            6 => return self.u48(),
            8 => return self.u64(),
            _ => {}
        }
        let head = self.take(bytes)?;
        let mut wide = [0u8; 8];
        match wide.get_mut(..bytes) {
            Some(low) => low.copy_from_slice(head),
            None => return Err(malformed(format!("an integer of {bytes} bytes"))),
        }
        Ok(u64::from_le_bytes(wide))
    }

    /// Reads an unsigned integer of `bytes` (0 to 8) bytes, big-endian.
    #[inline(always)]
    pub fn uint_be(&mut self, bytes: usize) -> Result<u64> {
        match bytes {
            1 => return self.u8().map(u64::from),
            2 => return self.u16_be().map(u64::from),
            3 => return self.u24_be().map(u64::from),
            4 => return self.u32_be().map(u64::from),
            5 => return self.u40_be(),
            6 => return self.u48_be(),
            8 => return self.u64_be(),
            _ => {}
        }
        let head = self.take(bytes)?;
        if bytes > 8 {
            return Err(malformed(format!("an integer of {bytes} bytes")));
        }
        Ok(head.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    /// Reads a length-encoded integer (MySQL internals, "Protocol::LengthEncodedInteger").
    #[inline]
    pub fn length_encoded(&mut self) -> Result<u64> {
        match self.u8()? {
            low @ 0..=250 => Ok(u64::from(low)),
            252 => self.u16().map(u64::from),
            253 => self.u24().map(u64::from),
            254 => self.u64(),
            first => Err(malformed(format!("a length-encoded integer starts with {first:#04x}"))),
        }
    }

    /// Reads a length-encoded length, then that many bytes.
    #[inline]
    pub fn length_encoded_bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.length_encoded()?;
        self.take(usize::try_from(length).map_err(|_| malformed("a length over the address space"))?)
    }

    /// Reads a little-endian length of `prefix` bytes.
    #[inline(always)]
    fn prefix(&mut self, prefix: u8) -> Result<usize> {
        Ok(match prefix {
            1 => usize::from(self.u8()?),
            2 => usize::from(self.u16()?),
            _ => self.uint(usize::from(prefix))? as usize,
        })
    }

    /// Reads a little-endian length of `prefix` bytes, then that many bytes.
    #[inline(always)]
    pub fn prefixed(&mut self, prefix: u8) -> Result<&'a [u8]> {
        let length = self.prefix(prefix)?;
        self.take(length)
    }

    /// Reads like `prefixed`. Also returns a block of constant size that starts with the value, if there are as many
    /// bytes.
    #[inline(always)]
    pub fn prefixed_block<const BYTES: usize>(&mut self, prefix: u8) -> Result<(&'a [u8], Option<&'a [u8; BYTES]>)> {
        let length = self.prefix(prefix)?;
        let block = self.rest.first_chunk();
        Ok((self.take(length)?, block))
    }

    /// Reads all remaining bytes.
    #[inline(always)]
    pub fn take_rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    /// Returns all remaining bytes without moving the cursor.
    #[inline(always)]
    pub fn peek(&self) -> &'a [u8] {
        self.rest
    }

    /// Returns the number of remaining bytes.
    #[inline(always)]
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Whether all bytes were read.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_any_width_equal_their_bytes_one_by_one() {
        let bytes = [0x81, 0x02, 0xf3, 0x04, 0x95, 0x06, 0xe7, 0x08];
        for width in 0..=8 {
            let head = &bytes[..width];
            let big = head.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
            let little = head.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
            let (mut first, mut second) = (Cursor::new(&bytes), Cursor::new(&bytes));
            assert_eq!((first.uint_be(width).unwrap(), second.uint(width).unwrap()), (big, little));
            assert_eq!((first.remaining(), second.remaining()), (8 - width, 8 - width));
            assert!(width == 0 || Cursor::new(&head[1..]).uint_be(width).is_err());
        }
        assert!(Cursor::new(&[0; 16]).uint_be(9).is_err() && Cursor::new(&[0; 16]).uint(9).is_err());
    }
}
