//! The memory that payloads are decompressed with.

use zstd::stream::raw::Decoder as Zstd;

/// What decompresses payloads, kept from one to the next: making it anew costs more than a small payload.
#[derive(Default)]
pub(super) struct Unpacking {
    pub(super) zstd: Option<Zstd<'static>>,
    pub(super) buffer: Vec<u8>,
}
