//! Changes as others write them: Canal's entries, Ptubes' events, and the JSON of Canal, Debezium and Maxwell.
//!
//! A dialect gets one transaction after the other: `begin` before its first message, `rows` for each rows event of a
//! table that is read, `statement` for each definition, `end` behind the last message. A transaction of which nothing is
//! selected is not told at all. Whatever a dialect writes goes to one growing buffer ([`Messages`]).

pub mod canal;
pub mod ddl;
pub mod debezium;
pub mod json;
mod json_object;
pub mod keys;
pub mod maxwell;
pub mod protobuf;
pub mod ptubes;
pub mod view;
pub mod walk;
pub mod writer;

use std::sync::Arc;

pub use crate::column::json::JsonStyle;
use crate::error::{Error, ErrorKind, Result};
pub use view::{At, DialectOptions, End, MessageColumn, StatementKind, StatementView, TableView};
pub use walk::{Image, Images, Row};
pub use writer::{Dialect, TableWriter};

/// The names of all dialects.
pub const NAMES: &[&str] = &["canal", "canal_flat", "ptubes", "debezium", "debezium_schema", "maxwell", "json"];

/// Makes the dialect of a name. Raises `OptionInvalid` for one that is not known.
pub fn of_options(options: &DialectOptions, instance: &Arc<str>) -> Result<Box<dyn Dialect>> {
    Ok(match options.name.as_str() {
        "canal" => Box::new(canal::Canal::new(options)),
        "canal_flat" => Box::new(canal::flat::CanalFlat::new(options)),
        "ptubes" => Box::new(ptubes::Ptubes::new(options)),
        "debezium" => Box::new(debezium::Debezium::new(instance, false)),
        "debezium_schema" => Box::new(debezium::Debezium::new(instance, true)),
        "maxwell" => Box::new(maxwell::Maxwell),
        "json" => Box::new(json::JsonRows),
        other => {
            let message = format!("`{other}` is no dialect");
            return Err(Error::new(ErrorKind::OptionInvalid, message).hint(format!("use one of {}", NAMES.join(", "))));
        }
    })
}
