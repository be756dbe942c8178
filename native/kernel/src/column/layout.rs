//! Storage formats of strings, and of dates and times, in row images.

/// The declared length of a string column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// CHAR or BINARY of this many bytes.
    Fixed(u16),
    /// VARCHAR or VARBINARY of at most this many bytes.
    Varying(u16),
    /// TEXT or BLOB; the length prefix determines which of the four.
    Large,
}

/// The storage format of a date or time column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Since MySQL 5.6: big-endian bit fields, then the fraction (types 17, 18 and 19).
    Packed,
    /// Before MySQL 5.6: little-endian decimal numbers without a fraction (types 7, 11 and 12).
    Classic,
    /// MariaDB's own fractions with `mysql56_temporal_format=OFF`: a big-endian count (types 7, 11 and 12).
    Counted,
}

impl Form {
    /// Returns the SQL type, given the type name for each form; `bytes_each` is the maximum width of a character.
    pub(super) fn type_text(self, [fixed, varying, large]: [&str; 3], prefix: u8, bytes_each: usize) -> String {
        match self {
            Form::Fixed(bytes) => format!("{fixed}({})", usize::from(bytes) / bytes_each),
            Form::Varying(bytes) => format!("{varying}({})", usize::from(bytes) / bytes_each),
            Form::Large => format!("{}{large}", large_name(prefix)),
        }
    }
}

fn large_name(prefix: u8) -> &'static str {
    match prefix {
        1 => "tiny",
        3 => "medium",
        4 => "long",
        _ => "",
    }
}

/// Returns the width in bytes of the length prefix of a TEXT or BLOB type, by its name.
pub(super) fn large_prefix(name: &str) -> u8 {
    (1..=4).find(|prefix| *prefix != 2 && name.starts_with(large_name(*prefix))).unwrap_or(2)
}

/// Returns the width in bytes of the length prefix of a string column of at most `bytes` bytes.
pub(super) fn prefix_of(bytes: u16) -> u8 {
    if bytes > 255 {
        2
    } else {
        1
    }
}
