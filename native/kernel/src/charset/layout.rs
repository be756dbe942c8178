//! How the pages of a character set with codes of several bytes hang together.

/// Page numbers of a character set with codes of several bytes.
#[derive(Clone, Copy)]
pub(super) struct MultibytePages {
    /// The page of characters of one byte.
    pub(super) single: usize,
    /// The page that maps the first byte of a longer code to the page of its second byte.
    pub(super) second: usize,
    /// What codes are longer than two bytes.
    pub(super) longer: Longer,
}

/// Codes longer than two bytes.
#[derive(Clone, Copy)]
pub(super) enum Longer {
    None,
    /// They begin with 0x8F; this page maps the second byte to the page of the third.
    Three(usize),
    /// They alternate letter and digit bytes: the four-byte codes of gb18030.
    Four,
}
