//! Decompresses payloads piece by piece.

use std::io;

use zstd::stream::raw::{Decoder as Zstd, InBuffer, Operation, OutBuffer};

use crate::error::{malformed, Error, Result};

/// Number of bytes that are decompressed in one step.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// Decompresses a piece. Returns how many bytes were consumed, and how many (at most `bytes_max`) were added to
/// `out`.
pub(crate) fn unpack(
    zstd: &mut Option<Zstd<'static>>,
    packed: &[u8],
    out: &mut Vec<u8>,
    bytes_max: usize,
) -> Result<(usize, usize)> {
    let start = out.len();
    let Some(zstd) = zstd else {
        let piece = packed.get(..packed.len().min(bytes_max)).unwrap_or_default();
        out.extend_from_slice(piece);
        return Ok((piece.len(), piece.len()));
    };
    out.resize(start + bytes_max, 0);
    let space = out.get_mut(start..).unwrap_or_default();
    let mut input = InBuffer::around(packed);
    let mut output = OutBuffer::around(space);
    zstd.run(&mut input, &mut output).map_err(decompression_error)?;
    let (consumed, written) = (input.pos(), output.pos());
    out.truncate(start + written);
    Ok((consumed, written))
}

pub(crate) fn decompression_error(error: io::Error) -> Error {
    malformed(format!("a transaction payload does not decompress: {error}"))
}
