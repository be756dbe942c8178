//! Character sets defined by tables: single-byte sets, and multi-byte sets with two to four bytes per character.
//!
//! A page maps a byte to 16 bits: a character, the number of the page for the next byte, or 0 for an invalid byte.
//! The compiler expands `pages.bin` (see `tools/charsets.py` for its layout), so nothing is loaded at run time.

use super::layout::{Longer, MultibytePages};
use super::sets::InvalidText;
use super::tables::{GB18030_RANGES, PAGE_COUNT};
use super::writer::Writer;

type Page = [u16; 256];

const THREE_BYTE_LEAD: u8 = 0x8F;
const LETTERS: std::ops::RangeInclusive<u8> = 0x81..=0xFE;
const DIGITS: std::ops::RangeInclusive<u8> = 0x30..=0x39;
/// Text is processed in blocks of this size; blocks of pure ASCII are copied.
const BLOCK_BYTES: usize = 16;
const LETTER_COUNT: u32 = 126;
const DIGIT_COUNT: u32 = 10;

static PAGES: [Page; PAGE_COUNT] = expand_pages(include_bytes!("pages.bin"));
static KEEPS_ASCII: [bool; PAGE_COUNT] = find_ascii_pages(&PAGES);

/// Expand the stored pages to 256 entries each. Runs at compile time, so a truncated file does not compile.
const fn expand_pages(stored: &[u8]) -> [Page; PAGE_COUNT] {
    let mut pages = [[0; 256]; PAGE_COUNT];
    let (mut number, mut at) = (0, 0);
    while number < PAGE_COUNT {
        let (mut byte, last) = (stored[at] as usize, stored[at + 1] as usize);
        at += 2;
        while byte <= last {
            let value = u16::from_le_bytes([stored[at], stored[at + 1]]);
            assert!(value < 0xD800 || value > 0xDFFF, "a surrogate is no character");
            pages[number][byte] = value;
            byte += 1;
            at += 2;
        }
        number += 1;
    }
    assert!(at == stored.len(), "pages.bin and tables.rs are of two makings");
    pages
}

/// Find the pages that map all ASCII bytes to themselves, so that runs of ASCII can be copied.
const fn find_ascii_pages(pages: &[Page; PAGE_COUNT]) -> [bool; PAGE_COUNT] {
    let mut keeps = [false; PAGE_COUNT];
    let mut number = 0;
    while number < PAGE_COUNT {
        let mut byte = 0;
        while byte < 0x80 && pages[number][byte] as usize == byte {
            byte += 1;
        }
        keeps[number] = byte == 0x80;
        number += 1;
    }
    keeps
}

/// Look up `byte` in a page; 0 if it is invalid.
#[inline]
fn look_up(page: u16, byte: u8) -> u16 {
    PAGES.get(usize::from(page)).map_or(0, |page| page[usize::from(byte)])
}

/// Whether the page maps all ASCII bytes to themselves.
fn keeps_ascii(page: usize) -> bool {
    KEEPS_ASCII.get(page).copied().unwrap_or(false)
}

/// Append `bytes` of the single-byte character set with the page `single`.
pub(super) fn decode_single_byte(single: usize, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), InvalidText> {
    let Some(page) = PAGES.get(single) else {
        return Err(InvalidText { offset: 0 });
    };
    let keeps_ascii = keeps_ascii(single);
    if keeps_ascii && bytes.is_ascii() {
        out.extend_from_slice(bytes);
        return Ok(());
    }
    let mut writer = Writer::new(out);
    for (number, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
        if keeps_ascii && block.is_ascii() {
            writer.copy(block);
            continue;
        }
        for (index, &byte) in block.iter().enumerate() {
            let character = page[usize::from(byte)];
            if character == 0 && byte != 0 {
                return Err(InvalidText { offset: number * BLOCK_BYTES + index });
            }
            writer.push(u32::from(character));
        }
    }
    writer.finish();
    Ok(())
}

/// Append `bytes` of the multi-byte character set with these pages.
pub(super) fn decode_multibyte(pages: MultibytePages, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), InvalidText> {
    let Some((single, second)) = PAGES.get(pages.single).zip(PAGES.get(pages.second)) else {
        return Err(InvalidText { offset: 0 });
    };
    let keeps_ascii = keeps_ascii(pages.single);
    if keeps_ascii && bytes.is_ascii() {
        out.extend_from_slice(bytes);
        return Ok(());
    }
    let mut writer = Writer::new(out);
    let mut rest = bytes;
    while let [first, after @ ..] = rest {
        let character = single[usize::from(*first)];
        if character != 0 || *first == 0 {
            match rest.split_first_chunk::<BLOCK_BYTES>() {
                Some((block, after)) if keeps_ascii && block.is_ascii() => {
                    writer.copy(block);
                    rest = after;
                }
                _ => {
                    writer.push(u32::from(character));
                    rest = after;
                }
            }
            continue;
        }
        let [next, after @ ..] = after else { break };
        let character = look_up(second[usize::from(*first)], *next);
        if character != 0 {
            writer.push(u32::from(character));
            rest = after;
            continue;
        }
        let (character, length) = longer_code(pages.longer, rest);
        if character == 0 {
            break;
        }
        writer.push(character);
        rest = rest.get(length..).unwrap_or(&[]);
    }
    writer.finish();
    match rest {
        [] => Ok(()),
        _ => Err(InvalidText { offset: bytes.len() - rest.len() }),
    }
}

/// Read the code of three or four bytes at the start of `rest`; return its character (0 if it is invalid) and length.
fn longer_code(longer: Longer, rest: &[u8]) -> (u32, usize) {
    match (longer, rest) {
        (Longer::Three(third), [THREE_BYTE_LEAD, second, last, ..]) => {
            let page = PAGES.get(third).map_or(0, |page| page[usize::from(*second)]);
            (u32::from(look_up(page, *last)), 3)
        }
        (Longer::Four, [first, second, third, last, ..]) => (four_byte_character([*first, *second, *third, *last]), 4),
        _ => (0, 0),
    }
}

/// Find the character of a four-byte code of gb18030, 0 if it is invalid.
fn four_byte_character(code: [u8; 4]) -> u32 {
    let [first, second, third, last] = code;
    let has_valid_letters = LETTERS.contains(&first) && LETTERS.contains(&third);
    if !has_valid_letters || !DIGITS.contains(&second) || !DIGITS.contains(&last) {
        return 0;
    }
    let letter = |byte: u8| u32::from(byte) - u32::from(*LETTERS.start());
    let digit = |byte: u8| u32::from(byte) - u32::from(*DIGITS.start());
    let upper = letter(first) * DIGIT_COUNT + digit(second);
    let linear = (upper * LETTER_COUNT + letter(third)) * DIGIT_COUNT + digit(last);
    let after = GB18030_RANGES.partition_point(|&(start, _, _)| start <= linear);
    match after.checked_sub(1).and_then(|number| GB18030_RANGES.get(number)) {
        Some(&(start, character, count)) if linear - start < count => character + (linear - start),
        _ => 0,
    }
}
