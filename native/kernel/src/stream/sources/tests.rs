//! Types of columns that only a declaration can supply.

use super::*;
use crate::charset::Charset;
use crate::column::{Hints, Wire};

/// Sixteen bytes: MariaDB's UUID, INET6 and BINARY(16) all look like this in a table map.
const FIXED_16: Wire = Wire { code: 254, metadata: 254 | 16 << 8 };

fn logged(name: &str) -> LogColumn {
    let hints = Hints { charset: Charset::from_name("binary"), mariadb: true, ..Hints::default() };
    LogColumn {
        wire: FIXED_16,
        name: Some(name.into()),
        hints,
        described: true,
        nullable: true,
        geometry: None,
        visible: None,
    }
}

fn declared(name: &str, type_text: &str) -> DeclaredColumn {
    DeclaredColumn { name: name.to_owned(), type_text: type_text.to_owned(), charset: None, nullable: true }
}

#[test]
fn declared_columns_of_the_same_name_supply_the_type() {
    let map = TableMap {
        table_id: 1,
        database: "db".into(),
        table: "t".into(),
        columns: ["plain", "address", "id"].map(logged).to_vec(),
        primary_key: Vec::new(),
    };
    let declared = [declared("id", "uuid"), declared("plain", "binary(16)"), declared("address", "inet6")];
    let sources = logged_sources(&map, &declared, true).unwrap();
    let kinds: Vec<&Kind> = sources.iter().map(|source| &source.kind).collect();
    assert!(!needs_declaration(kinds[0]), "{kinds:?}");
    assert!(matches!(kinds[1..], [Kind::Inet6, Kind::Uuid]), "{kinds:?}");
}
