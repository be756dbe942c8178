//! The styles of a document's text.

/// The style of the text of a JSON document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JsonStyle {
    /// The style in which MySQL's own client shows a document.
    Server,
    /// The style in which Canal writes a document.
    Canal,
}
