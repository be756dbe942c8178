//! The column types of MySQL and MariaDB, with one file per type. The file of a type contains the code that reads
//! values from a row image, converts them to Arrow, and writes them as the server's own client shows them.
//!
//! A [`Kind`] is the type of a column. It comes from the table map ([`Kind::from_wire`]), or from a declared SQL type
//! ([`Kind::declared`]) that is checked against the table map ([`Kind::fit`]). [`Kind::read`] returns a [`Value`], a
//! view of the row image. [`ColumnBuilder`] collects values in an Arrow array; its `append_from` reads and appends in
//! one step.
//!
//! The storage formats are those of the server's `Field::pack` family and of the manual's "Data Type Storage
//! Requirements".

pub(crate) mod base64;
pub(crate) mod binary;
pub(crate) mod bit;
mod builder;
mod cells;
mod client;
pub(crate) mod client_text;
pub(crate) mod compressed;
pub(crate) mod date;
pub(crate) mod datetime;
pub(crate) mod decimal;
mod declared;
pub(crate) mod enumeration;
pub(crate) mod float;
mod fraction;
pub(crate) mod geometry;
mod hex;
pub(crate) mod inet;
pub(crate) mod integer;
pub mod json;
mod kind;
mod layout;
mod members;
mod noted;
mod null_rows;
mod parsed;
pub(crate) mod quoted;
mod sent;
pub(crate) mod set;
mod shown;
pub(crate) mod spare;
mod store;
#[cfg(test)]
mod tests;
pub(crate) mod text;
pub(crate) mod time;
pub(crate) mod timestamp;
pub(crate) mod typed;
pub(crate) mod uuid;
mod value;
pub(crate) mod vector;
mod wire;
mod year;

pub use builder::ColumnBuilder;
pub use cells::CellColumn;
pub use date::Date;
pub use datetime::DateTime;
pub use decimal::Decimal;
pub use declared::DeclaredColumn;
pub(crate) use integer::write_signed as write_integer;
pub(crate) use integer::write_unsigned as write_unsigned_integer;
pub use kind::Kind;
pub(crate) use kind::Width;
pub use layout::{Form, Layout};
pub use noted::{noted, Noted};
pub(crate) use sent::value as value_of_text;
pub use time::Time;
pub use timestamp::Timestamp;
pub use value::Value;
pub use wire::{Hints, Special, Wire};
