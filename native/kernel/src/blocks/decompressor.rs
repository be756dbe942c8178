//! Reusable memory for decompressing payloads.

use zstd::stream::raw::Decoder as Zstd;

/// The zstd decoder and its buffer. They are reused, because allocating them costs more than decompressing a small
/// payload.
#[derive(Default)]
pub(super) struct Decompressor {
    pub(super) zstd: Option<Zstd<'static>>,
    pub(super) buffer: Vec<u8>,
}
