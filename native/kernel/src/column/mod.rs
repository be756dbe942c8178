//! Every column type of MySQL and MariaDB, one file each: how its bytes lie in a row image, how they become an Arrow
//! value, and how the server's own client shows them.
//!
//! A [`Kind`] is what one column holds. It comes from the table map ([`Kind::from_wire`]), or from a declared SQL type
//! ([`Kind::declared`]) that the table map has to prove ([`Kind::fit`]). [`Kind::read`] gives a [`Value`], a view of the
//! row image; [`ColumnBuilder`] gathers values into an Arrow array, and its `append_from` does both at once.
//!
//! Layouts are those of the server's `Field::pack` family and of the manual's "Data Type Storage Requirements".

mod base64;
mod binary;
mod bit;
mod builder;
mod canal;
mod cells;
mod client;
pub(crate) mod client_text;
mod compressed;
mod date;
mod datetime;
mod debezium;
mod decimal;
mod declared;
mod enumeration;
mod float;
mod fraction;
mod geometry;
mod hex;
mod inet;
mod integer;
pub mod json;
mod kind;
mod layout;
mod maxwell;
mod noted;
mod ptubes;
pub(crate) mod quoted;
mod sent;
mod set;
mod shown;
pub(crate) mod spare;
mod store;
#[cfg(test)]
mod tests;
mod text;
mod time;
mod timestamp;
mod uuid;
mod value;
mod vector;
mod wire;
mod year;

pub use builder::ColumnBuilder;
pub use cells::CellColumn;
pub use date::Date;
pub use datetime::DateTime;
pub use debezium::Place;
pub use decimal::Decimal;
pub use declared::DeclaredColumn;
pub(crate) use integer::write_signed as write_integer;
pub(crate) use integer::write_unsigned as write_unsigned_integer;
pub use kind::Kind;
pub use layout::{Form, Layout};
pub use noted::{noted, Noted};
pub use time::Time;
pub use timestamp::Timestamp;
pub use value::Value;
pub use wire::{Hints, Special, Wire};
