//! Definitions that contradict the log.

use super::*;
use crate::column::{Hints, Wire};

/// Checks a definition against a table map with a single column.
fn prove_definition(code: u8, metadata: u16, hints: Hints, type_text: &str, charset: Option<&str>) -> Result<Kind> {
    let wire = Wire { code, metadata };
    let logged = LogColumn { wire, name: None, hints, described: true, nullable: true, geometry: None, visible: None };
    let charset = charset.map(str::to_owned);
    let declared = DeclaredColumn { name: "c".to_owned(), type_text: type_text.to_owned(), charset, nullable: true };
    prove_column(&declared, &logged, false)
}

#[test]
fn a_wrong_sign_or_character_set_is_a_mismatch() {
    let sign = |unsigned| Hints { unsigned, ..Hints::default() };
    let text = |name| Hints { charset: Charset::from_name(name), ..Hints::default() };
    assert!(prove_definition(3, 0, sign(false), "int", None).is_ok());
    assert!(prove_definition(3, 0, sign(true), "int unsigned", None).is_ok());
    assert!(prove_definition(15, 40, text("latin1"), "varchar(40)", Some("latin1")).is_ok());
    assert!(prove_definition(15, 40, text("binary"), "varbinary(40)", None).is_ok());
    for (code, metadata, hints, declared, charset) in [
        (3, 0, sign(true), "int", None),
        (3, 0, sign(false), "int unsigned", None),
        (15, 40, text("utf8mb4"), "varchar(40)", Some("latin1")),
        (15, 40, text("binary"), "varchar(40)", Some("latin1")),
        (15, 40, text("latin1"), "varbinary(40)", None),
        (252, 2, text("latin1"), "blob", None),
    ] {
        let error = prove_definition(code, metadata, hints, declared, charset).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::SchemaMismatch, "{declared}: {error}");
    }
}
