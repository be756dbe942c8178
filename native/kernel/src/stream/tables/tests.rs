//! What a declaration and a table map together say of a column.

use super::*;
use crate::column::{Hints, Wire};

/// Sixteen bytes: MariaDB's UUID, INET6 and BINARY(16) all look so in a table map.
const FIXED_16: Wire = Wire { code: 254, metadata: 254 | 16 << 8 };

fn logged(name: &str) -> LogColumn {
    let hints = Hints { charset: Charset::from_name("binary"), mariadb: true, ..Hints::default() };
    LogColumn { wire: FIXED_16, name: Some(name.into()), hints, described: true, nullable: true, geometry: None }
}

fn declared(name: &str, type_text: &str) -> DeclaredColumn {
    DeclaredColumn { name: name.to_owned(), type_text: type_text.to_owned(), charset: None, nullable: true }
}

#[test]
fn a_declared_column_of_the_same_name_says_which_type_a_plain_string_has() {
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
    assert!(!is_told_only_by_declaration(kinds[0]), "{kinds:?}");
    assert!(matches!(kinds[1..], [Kind::Inet6, Kind::Uuid]), "{kinds:?}");
}

/// One table map column, and what a definition calls it.
fn proved(code: u8, metadata: u16, hints: Hints, type_text: &str, charset: Option<&str>) -> Result<Kind> {
    let wire = Wire { code, metadata };
    let logged = LogColumn { wire, name: None, hints, described: true, nullable: true, geometry: None };
    let charset = charset.map(str::to_owned);
    let declared = DeclaredColumn { name: "c".to_owned(), type_text: type_text.to_owned(), charset, nullable: true };
    prove_described(declared.kind(false)?.fit(logged.wire)?, &logged)
}

#[test]
fn another_sign_or_character_set_than_the_log_tells_is_a_mismatch() {
    let sign = |unsigned| Hints { unsigned, ..Hints::default() };
    let text = |name| Hints { charset: Charset::from_name(name), ..Hints::default() };
    assert!(proved(3, 0, sign(false), "int", None).is_ok());
    assert!(proved(3, 0, sign(true), "int unsigned", None).is_ok());
    assert!(proved(15, 40, text("latin1"), "varchar(40)", Some("latin1")).is_ok());
    assert!(proved(15, 40, text("binary"), "varbinary(40)", None).is_ok());
    for (code, metadata, hints, declared, charset) in [
        (3, 0, sign(true), "int", None),
        (3, 0, sign(false), "int unsigned", None),
        (15, 40, text("utf8mb4"), "varchar(40)", Some("latin1")),
        (15, 40, text("binary"), "varchar(40)", Some("latin1")),
        (15, 40, text("latin1"), "varbinary(40)", None),
        (252, 2, text("latin1"), "blob", None),
    ] {
        let error = proved(code, metadata, hints, declared, charset).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::SchemaMismatch, "{declared}: {error}");
    }
}
