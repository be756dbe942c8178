//! How strings and moments are laid out in a row image.

/// How long a string column may be, as it was declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// CHAR or BINARY of that many bytes.
    Fixed(u16),
    /// VARCHAR or VARBINARY of at most that many bytes.
    Varying(u16),
    /// TEXT or BLOB, whose length prefix says which of the four it is.
    Large,
}

/// Which of the storage formats a temporal column uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Since MySQL 5.6: big-endian bit fields, then the fraction (types 17, 18 and 19).
    Packed,
    /// Before that: little-endian decimal numbers without a fraction (types 7, 11 and 12).
    Classic,
    /// MariaDB's own fractions with `mysql56_temporal_format=OFF`: one big-endian count (types 7, 11 and 12).
    Counted,
}

impl Form {
    /// The type in SQL, of its name for each form; `bytes_each` is the width of one character.
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
