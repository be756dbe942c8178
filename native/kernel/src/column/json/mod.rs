//! MySQL's JSON: a binary document in row images, the server's own text in the output.
//!
//! Source: the comment at the top of the server's `json_binary.h`. Offsets in a document are untrusted data, so each
//! is checked. Crafted offsets can point many entries at the same bytes, so the text of a document may not exceed the
//! maximum for valid documents of its size.

mod binary;
mod partial;
mod restyle;
mod style;
#[cfg(test)]
mod tests;
mod text;

use crate::cursor::Cursor;
use crate::error::Result;

use super::store::{Appended, Runs};

pub use partial::{apply_partial, apply_partial_in};
pub use restyle::{pick, prove, restyle, Step};
pub use style::JsonStyle;
pub use text::{write_text, write_text_in};

#[inline(always)]
pub(super) fn read<'a>(prefix: u8, cursor: &mut Cursor<'a>) -> Result<&'a [u8]> {
    cursor.prefixed(prefix)
}

pub(super) fn append(document: &[u8], runs: &mut Runs<u8>) -> Appended {
    if let Err(error) = write_text(document, &mut runs.items) {
        runs.take_back();
        return Err(error);
    }
    runs.close()?;
    Ok(None)
}
