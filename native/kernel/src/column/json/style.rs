//! In whose spelling a document is written.

/// How the text of a JSON document looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JsonStyle {
    /// As MySQL's own client shows it.
    Server,
    /// As Canal writes it.
    Canal,
}
