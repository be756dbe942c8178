//! Compressed payloads, one piece at a time.

use std::io;

use zstd::stream::raw::{Decoder as Zstd, InBuffer, Operation, OutBuffer};

use crate::error::{malformed, Error, Result};

/// How much is decompressed at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// Decompresses one piece: how many bytes were taken, and how many, up to a bound, were added to `out`.
pub(crate) fn unpack(
    zstd: &mut Option<Zstd<'static>>,
    packed: &[u8],
    out: &mut Vec<u8>,
    bytes_max: usize,
) -> Result<(usize, usize)> {
    let held = out.len();
    let Some(zstd) = zstd else {
        let piece = packed.get(..packed.len().min(bytes_max)).unwrap_or_default();
        out.extend_from_slice(piece);
        return Ok((piece.len(), piece.len()));
    };
    out.resize(held + bytes_max, 0);
    let space = out.get_mut(held..).unwrap_or_default();
    let mut input = InBuffer::around(packed);
    let mut output = OutBuffer::around(space);
    zstd.run(&mut input, &mut output).map_err(broken)?;
    let (taken, written) = (input.pos(), output.pos());
    out.truncate(held + written);
    Ok((taken, written))
}

pub(crate) fn broken(error: io::Error) -> Error {
    malformed(format!("a transaction payload does not decompress: {error}"))
}
