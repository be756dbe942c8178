//! What a table says of a column beside its type.

/// See the fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Whether it may be null, so that a date that the calendar lacks can be.
    pub nullable: bool,
    /// Whether it was declared as a POINT, which has its coordinates beside the geometry.
    pub is_point: bool,
    /// Whether it was declared as FLOAT with digits, FLOAT(M,D), which the connector takes for a DOUBLE.
    pub has_digits: bool,
}

/// What a type as it was declared, and whether it may be null, say of a column's values.
pub(crate) fn place(type_text: &str, nullable: bool) -> Place {
    let name = type_text.split(|letter: char| !letter.is_ascii_alphanumeric()).next().unwrap_or_default();
    let is = |word: &str| name.eq_ignore_ascii_case(word);
    Place { nullable, is_point: is("point"), has_digits: is("float") && type_text.contains(',') }
}
