//! The layout of the pages of multi-byte character sets.

/// Page numbers of a multi-byte character set.
#[derive(Clone, Copy)]
pub(super) struct MultibytePages {
    /// The page of single-byte characters.
    pub(super) single: usize,
    /// The page that maps the first byte of a multi-byte code to the page for its second byte.
    pub(super) second: usize,
    /// The codes longer than two bytes.
    pub(super) longer: Longer,
}

/// Codes longer than two bytes.
#[derive(Clone, Copy)]
pub(super) enum Longer {
    None,
    /// Three-byte codes, which start with 0x8F. The page maps the second byte to the page of the third byte.
    Three(usize),
    /// Four-byte codes that alternate letter and digit bytes, like those of gb18030.
    Four,
}
