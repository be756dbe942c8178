//! Properties of a column apart from its type.

use super::handling::Handling;

/// The properties of a column that affect its format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ColumnTraits {
    /// Whether the column may be null, so that a date missing from the calendar can be null.
    pub nullable: bool,
    /// Whether it was declared as a POINT, whose values include the coordinates.
    pub is_point: bool,
    /// Whether it was declared as FLOAT(M,D), which the connector treats as a DOUBLE.
    pub has_digits: bool,
    /// The forms of values.
    pub handling: Handling,
}

/// Derives the properties from the declared type, the nullability and the handling modes.
pub(crate) fn column_traits(type_text: &str, nullable: bool, handling: Handling) -> ColumnTraits {
    let name = type_text.split(|letter: char| !letter.is_ascii_alphanumeric()).next().unwrap_or_default();
    let is = |word: &str| name.eq_ignore_ascii_case(word);
    let has_digits = is("float") && type_text.contains(',');
    ColumnTraits { nullable, is_point: is("point"), has_digits, handling }
}
