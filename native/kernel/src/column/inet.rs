//! MariaDB's INET4 and INET6: network order; row images omit trailing zero bytes.

use super::binary::read_fixed;
use super::integer::write_unsigned;
use super::store::{Appended, Runs};
use crate::cursor::Cursor;
use crate::error::Result;

#[inline(always)]
pub(super) fn read4(cursor: &mut Cursor<'_>) -> Result<[u8; 4]> {
    read_fixed(cursor)
}

#[inline(always)]
pub(super) fn read6(cursor: &mut Cursor<'_>) -> Result<[u8; 16]> {
    read_fixed(cursor)
}

pub(super) fn append4(bytes: &[u8; 4], runs: &mut Runs<u8>) -> Appended {
    write_text4(bytes, &mut runs.items);
    runs.close()?;
    Ok(None)
}

pub(super) fn append6(bytes: &[u8; 16], runs: &mut Runs<u8>) -> Appended {
    write_text6(bytes, &mut runs.items);
    runs.close()?;
    Ok(None)
}

pub(crate) fn write_text4(bytes: &[u8; 4], out: &mut Vec<u8>) {
    for (slot, byte) in bytes.iter().enumerate() {
        if slot > 0 {
            out.push(b'.');
        }
        write_unsigned(u64::from(*byte), out);
    }
}

/// Finds the longest run of zero words as (start, length), the first if several are equally long.
fn gap(words: &[u16; 8]) -> (usize, usize) {
    let (mut best, mut run) = ((8, 0), (0, 0));
    for (slot, word) in words.iter().enumerate() {
        run = match (word, run.1) {
            (0, 0) => (slot, 1),
            (0, length) => (run.0, length + 1),
            _ => (0, 0),
        };
        if run.1 > best.1 {
            best = run;
        }
    }
    best
}

/// Writes the text as MariaDB's `Inet6::to_string` does: a run of zero words as `::`, and dotted notation for addresses
/// that contain an IPv4 address.
pub(crate) fn write_text6(bytes: &[u8; 16], out: &mut Vec<u8>) {
    let mut words = [0u16; 8];
    let mut cursor = Cursor::new(bytes);
    for word in &mut words {
        *word = cursor.u16_be().unwrap_or(0);
    }
    let (start, length) = gap(&words);
    let [.., a, b, c, d] = *bytes;
    let [.., mapped, _, _] = words;
    let dotted = start == 0 && (length == 6 || length == 5 && mapped == 0xffff);
    let mut slot = 0;
    while slot < words.len() {
        if slot == start && length > 0 {
            out.extend_from_slice(if slot == 0 { b"::" } else { b":" });
            slot += length;
            continue;
        }
        if dotted && slot == 6 {
            return write_text4(&[a, b, c, d], out);
        }
        out.extend_from_slice(format!("{:x}", words.get(slot).copied().unwrap_or(0)).as_bytes());
        slot += 1;
        if slot < words.len() {
            out.push(b':');
        }
    }
}

/// Parses the text of an INET4; None if it is invalid.
pub(super) fn parse4(text: &str) -> Option<[u8; 4]> {
    text.parse::<std::net::Ipv4Addr>().ok().map(|address| address.octets())
}

/// Parses the text of an INET6; None if it is invalid.
pub(super) fn parse6(text: &str) -> Option<[u8; 16]> {
    text.parse::<std::net::Ipv6Addr>().ok().map(|address| address.octets())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    #[test]
    fn addresses_show_as_mariadb_does() {
        let texts = [
            "::",
            "::1",
            "1::",
            "::ffff:1.2.3.4",
            "::1.2.3.4",
            "2001:db8::1",
            "2001:0:0:1::1",
            "1::2:0:0:3:4",
            "1:2:3:4:5:6:7:8",
            "1::3:4:5:6:7:8",
            "1:2:3:4:5:6:7::",
            "::2:3:4:5:6:7:8",
            "::fffe:102:304",
        ];
        for text in texts {
            let address: Ipv6Addr = text.parse().unwrap();
            let mut out = Vec::new();
            write_text6(&address.octets(), &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), text);
        }
    }

    #[test]
    fn trailing_zero_bytes_are_restored() {
        assert_eq!(read4(&mut Cursor::new(&[2, 10, 1])).unwrap(), [10, 1, 0, 0]);
        let mut out = Vec::new();
        write_text4(&[10, 1, 0, 255], &mut out);
        assert_eq!(out, b"10.1.0.255");
    }
}
