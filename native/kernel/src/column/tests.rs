//! Properties that hold for every type, checked with random bytes.

use std::sync::Arc;

use arrow_array::Array;

use super::{ColumnBuilder, Form, Hints, Kind, Layout, Value, Wire};
use crate::charset::Charset;
use crate::cursor::Cursor;

const ROUNDS: usize = 3_000;
const BYTES_MAX: usize = 48;

/// Marsaglia's xorshift, so that a failure is reproducible by its seed.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() >> 33).unwrap() % bound
    }

    fn byte(&mut self) -> u8 {
        // Small and extreme bytes reach deeper into the readers than uniformly distributed bytes.
        match self.below(4) {
            0 => u8::try_from(self.below(4)).unwrap(),
            1 => *[0x7f, 0x80, 0x8a, 0xff].get(self.below(4)).unwrap(),
            _ => u8::try_from(self.below(256)).unwrap(),
        }
    }

    fn bytes(&mut self) -> Vec<u8> {
        (0..self.below(BYTES_MAX)).map(|_| self.byte()).collect()
    }
}

fn kinds() -> Vec<Kind> {
    let texts = [
        "tinyint",
        "smallint unsigned",
        "mediumint",
        "int unsigned",
        "bigint",
        "bigint unsigned",
        "float",
        "double",
        "decimal(1,0)",
        "decimal(18,9)",
        "decimal(38,38)",
        "decimal(65,30)",
        "bit(1)",
        "bit(33)",
        "bit(64)",
        "year",
        "date",
        "time",
        "time(2)",
        "time(4)",
        "time(6)",
        "datetime",
        "datetime(2)",
        "datetime(6)",
        "timestamp",
        "timestamp(1)",
        "timestamp(5)",
        "char(10)",
        "varchar(300)",
        "tinytext",
        "text",
        "longtext",
        "binary(5)",
        "varbinary(10)",
        "blob",
        "enum('a','b')",
        "set('a','b','c')",
        "geometry",
        "vector(3)",
        "uuid",
        "inet4",
        "inet6",
        "varchar(10) /*M!100301 COMPRESSED*/",
        "blob /*M!100301 COMPRESSED*/",
    ];
    let mut kinds: Vec<Kind> =
        texts.iter().map(|text| Kind::declared(text, Some(Charset::Utf8mb4), true).unwrap()).collect();
    for layout in [Layout::Classic, Layout::Counted] {
        for fsp in [0, 3, 6] {
            kinds.push(Kind::Time { fsp, layout });
            kinds.push(Kind::DateTime { fsp, layout });
            kinds.push(Kind::Timestamp { fsp, layout });
        }
    }
    let values: Arc<[Arc<str>]> = (0..300).map(|slot| slot.to_string().into()).collect();
    kinds.push(Kind::Enumeration { bytes: 2, values });
    kinds.extend([Kind::Json { prefix: 1 }, Kind::Null, Kind::Vector { prefix: 1, dimensions: None }]);
    kinds.push(Kind::Text { prefix: 1, form: Form::Large, charset: Charset::Sjis });
    kinds
}

#[test]
fn any_bytes_read_the_same_in_every_way_or_are_an_error() {
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    for kind in kinds() {
        let (mut fused, mut stepwise) = (ColumnBuilder::new(&kind), ColumnBuilder::new(&kind));
        for _ in 0..ROUNDS {
            let bytes = chance.bytes();
            let (mut reading, mut appending, mut skipping) =
                (Cursor::new(&bytes), Cursor::new(&bytes), Cursor::new(&bytes));
            let value = kind.read(&mut reading);
            let appended = fused.append_from(&kind, &mut appending);
            let Ok(value) = value else {
                assert!(appended.is_err(), "{kind:?} {bytes:?}");
                continue;
            };
            kind.skip(&mut skipping).unwrap();
            assert_eq!(reading.remaining(), skipping.remaining(), "{kind:?} {bytes:?}");
            let mut text = Vec::new();
            let written = value.write_text(&kind, &mut text);
            let stepped = stepwise.append(&kind, value);
            assert_eq!(appended, stepped, "{kind:?} {bytes:?}");
            assert_eq!(written.is_ok(), stepped.is_ok(), "{kind:?} {bytes:?}");
            if let Ok(Some(refused)) = stepped {
                assert_eq!(refused.as_bytes(), text, "{kind:?} {bytes:?}");
            }
        }
        assert_eq!(fused.len(), stepwise.len());
        let (fused, stepwise) = (fused.finish(), stepwise.finish());
        assert_eq!(fused.data_type(), &kind.arrow_type());
        assert_eq!(&fused, &stepwise);
        fused.to_data().validate_full().unwrap();
    }
}

#[test]
fn json_bytes_changed_at_random_never_panic() {
    let sample = b"\x00\x03\x00\x2b\x00\x19\x00\x01\x00\x1a\x00\x01\x00\x1b\x00\x02\x00\x05\x01\x00\x02\x1d\x00\x0c\x29\x00abcc\x02\x00\x0a\x00\x05\x01\x00\x05\x02\x00\x01x";
    let diffs = b"\x00\x03$.a\x02\x04\x01\x01\x06$.b[1]\x03\x05\x07\x00\x02\x04$.cc";
    let mut chance = Chance(0x1234_5678_9abc_def1);
    for _ in 0..ROUNDS * 10 {
        let (mut document, mut change) = (sample.to_vec(), diffs.to_vec());
        for bytes in [&mut document, &mut change] {
            for _ in 0..chance.below(4) {
                let (slot, byte) = (chance.below(bytes.len()), chance.byte());
                *bytes.get_mut(slot).unwrap() = byte;
            }
            bytes.truncate(bytes.len() - chance.below(2) * chance.below(bytes.len()));
        }
        let mut out = Vec::new();
        if super::json::write_text(&document, &mut out).is_ok() {
            assert!(String::from_utf8(out).is_ok());
        }
        let _ = super::json::apply_partial(&document, &change);
    }
}

#[test]
fn every_type_number_gives_a_kind_or_an_error() {
    let mut chance = Chance(0xdead_beef_cafe_f00d);
    let values: Arc<[Arc<str>]> = [Arc::from("a")].into();
    for code in 0..=u8::MAX {
        for _ in 0..200 {
            let wire = Wire { code, metadata: u16::from_le_bytes([chance.byte(), chance.byte()]) };
            let charset =
                [None, Some(Charset::Binary), Some(Charset::Utf8mb4)].into_iter().nth(chance.below(3)).unwrap();
            let hints =
                Hints { charset, values: Some(values.clone()), mariadb: chance.below(2) == 0, ..Hints::default() };
            let Ok(kind) = Kind::from_wire(wire, &hints) else { continue };
            assert_eq!(kind.fit(wire).unwrap(), kind, "{wire:?}");
            // SQL cannot express every type: a table map may have any length, even if it is not a whole number of
            // characters.
            let Ok(declared) = Kind::declared(&kind.type_text(), charset, false) else { continue };
            assert_eq!(declared.arrow_type(), kind.arrow_type(), "{wire:?}");
        }
    }
}

#[test]
fn a_value_of_another_type_is_refused() {
    let number = Kind::Integer { bytes: 1, unsigned: false };
    let mut builder = ColumnBuilder::new(&number);
    assert!(builder.append(&number, Value::Text(b"a")).is_err());
    assert!(builder.append(&number, Value::Int(128)).is_err());
    let text = Kind::Text { prefix: 1, form: Form::Large, charset: Charset::Utf8mb4 };
    let mut builder = ColumnBuilder::new(&text);
    let bytes = Kind::CompressedBinary { prefix: 1, form: Form::Large };
    assert!(builder.append(&bytes, Value::Compressed(b"\0\xff")).is_err());
    assert!(builder.append(&Kind::Binary { prefix: 1, form: Form::Large }, Value::Bytes(b"\xff")).is_err());
    assert_eq!(builder.len(), 0);
}
