//! The styles of a document's text.

/// The style of the text of a JSON document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JsonStyle {
    /// As MySQL's own client shows it.
    Server,
    /// As Canal writes it.
    Canal,
}
