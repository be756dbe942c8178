//! Properties of a column other than its type.

use super::handling::Handling;

/// The properties of a column that affect its format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ColumnTraits {
    /// Whether the column is nullable. If so, a date that does not exist in the calendar becomes null.
    pub nullable: bool,
    /// Whether the column was declared as a POINT, whose values include the coordinates.
    pub is_point: bool,
    /// Whether the column was declared as FLOAT(M,D), which the connector treats as a DOUBLE.
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
