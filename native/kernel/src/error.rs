//! Errors, by name.
//!
//! The names match the classes in `penstock/errors.py`; a test compares the two lists.

use std::fmt;

macro_rules! error_kinds {
    ($($kind:ident),+ $(,)?) => {
        /// The class of an error, which callers match on.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum ErrorKind { $(#[allow(missing_docs)] $kind),+ }

        impl ErrorKind {
            /// All kinds, so that tests can compare them with the Python classes.
            pub const ALL: &'static [ErrorKind] = &[$(ErrorKind::$kind),+];

            /// The name of the Python class.
            pub fn name(self) -> &'static str {
                match self { $(ErrorKind::$kind => stringify!($kind)),+ }
            }
        }
    };
}

error_kinds! {
    OptionInvalid,
    SchemaInvalid,
    PositionInvalid,
    ConnectionLost,
    MagicInvalid,
    FileTruncated,
    ChecksumMismatch,
    EventMalformed,
    EventUnknown,
    EventUnsupported,
    SequenceGap,
    RangesDisagree,
    LogEncrypted,
    IncidentLogged,
    TableMapMissing,
    SchemaUnknown,
    SchemaMismatch,
    SchemaChanged,
    StatementLogged,
    TransactionRolledBack,
    ValueMalformed,
    LimitExceeded,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Inner {
    kind: ErrorKind,
    message: String,
    position: Option<(String, u64)>,
    hint: Option<String>,
}

/// An error with a position and a hint. The type is one pointer wide, so that results stay cheap on the hot path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error(Box<Inner>);

/// The return type of every fallible function of the kernel.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates an error without a position; callers that know the position add it with `at`.
    #[cold]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error(Box::new(Inner { kind, message: message.into(), position: None, hint: None }))
    }

    /// Adds the file and offset, unless the error already has a position.
    #[must_use]
    #[cold]
    pub fn at(mut self, file: &str, offset: u64) -> Error {
        if self.0.position.is_none() {
            self.0.position = Some((file.to_owned(), offset));
        }
        self
    }

    /// Adds a hint that names the command or setting that helps, unless the error already has a hint.
    #[must_use]
    #[cold]
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        if self.0.hint.is_none() {
            self.0.hint = Some(hint.into());
        }
        self
    }

    /// Prefixes the message with its context, such as the column or event.
    #[must_use]
    #[cold]
    pub fn within(mut self, context: &str) -> Error {
        self.0.message = format!("{context}: {}", self.0.message);
        self
    }

    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The message, without position and hint.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// File and byte offset, if known.
    pub fn position(&self) -> Option<(&str, u64)> {
        self.0.position.as_ref().map(|(file, offset)| (file.as_str(), *offset))
    }

    /// The command or setting that helps, if any.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.kind.name(), self.0.message)?;
        if let Some((file, offset)) = &self.0.position {
            write!(f, " (at {file}:{offset})")?;
        }
        if let Some(hint) = &self.0.hint {
            write!(f, ". {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// Shorthand for the most common error of event bodies.
#[cold]
pub fn malformed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::EventMalformed, message)
}

/// Shorthand for the most common error of column values.
#[cold]
pub fn value_malformed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::ValueMalformed, message)
}
