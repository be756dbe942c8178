//! Converts datums to values of MySQL's column types.

use super::datum::Datum;
use super::json;
use crate::column::{Date, DateTime, Kind, Time, Timestamp, Value};
use crate::error::{malformed, value_malformed, Error, Result};
use crate::write::value::pack;

/// Appends a datum in the format of a row image.
///
/// If the datum is NULL, appends nothing and returns true. Raises `ValueMalformed` for a datum that the column cannot
/// store.
#[inline]
pub fn write(kind: &Kind, datum: Datum<'_>, out: &mut Vec<u8>) -> Result<bool> {
    let value = match (kind, datum) {
        (_, Datum::Null) => return Ok(true),
        (Kind::Integer { unsigned: false, .. }, Datum::Int(value)) => Value::Int(value),
        (Kind::Integer { unsigned: true, .. }, Datum::Uint(value)) => Value::UInt(value),
        // An unsigned handle is stored as the signed integer with the same bits.
        (Kind::Integer { unsigned: true, .. }, Datum::Int(value)) => {
            Value::UInt(u64::from_ne_bytes(value.to_ne_bytes()))
        }
        (Kind::Text { .. }, Datum::Bytes(bytes)) => Value::Text(bytes),
        (Kind::Binary { .. }, Datum::Bytes(bytes)) => Value::Bytes(bytes),
        (Kind::Decimal { .. }, Datum::Decimal(value)) => Value::Decimal(value),
        (Kind::DateTime { .. }, Datum::Uint(packed)) => Value::DateTime(unpacked(packed)?),
        (Kind::Timestamp { .. }, Datum::Uint(packed)) => Value::Timestamp(timestamp(packed)?),
        (Kind::Json { prefix }, Datum::Json(document)) => {
            write_json(*prefix, document, out)?;
            return Ok(false);
        }
        (kind, datum) => rare(kind, datum)?,
    };
    pack(kind, &value, out)?;
    Ok(false)
}

#[inline(never)]
fn rare<'a>(kind: &Kind, datum: Datum<'a>) -> Result<Value<'a>> {
    Ok(match (kind, datum) {
        (Kind::Float, Datum::Float(value)) => Value::Float(value as f32),
        (Kind::Double, Datum::Float(value)) => Value::Double(value),
        (Kind::Date, Datum::Uint(packed)) => Value::Date(date(packed)?),
        (Kind::Time { .. }, Datum::Int(nanos) | Datum::Duration(nanos)) => Value::Time(time(nanos)?),
        (Kind::Year, Datum::Int(year)) => Value::Year(u16::try_from(year).map_err(|_| mismatch(kind, &datum))?),
        (Kind::Year, Datum::Uint(year)) => Value::Year(u16::try_from(year).map_err(|_| mismatch(kind, &datum))?),
        (Kind::Bit { .. }, Datum::Uint(bits)) => Value::Bit(bits),
        (Kind::Enumeration { .. }, Datum::Uint(index)) => {
            Value::Enumeration(u16::try_from(index).map_err(|_| mismatch(kind, &datum))?)
        }
        (Kind::Set { .. }, Datum::Uint(members)) => Value::Set(members),
        (kind, datum) => return Err(mismatch(kind, &datum)),
    })
}

#[cold]
fn mismatch(kind: &Kind, datum: &Datum<'_>) -> Error {
    value_malformed(format!("{} in a column of {}", datum.name(), kind.type_text()))
}

/// Appends a document's length, then the document.
fn write_json(prefix: u8, document: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let start = out.len();
    let prefix = usize::from(prefix);
    out.extend(std::iter::repeat_n(0, prefix));
    json::write(document, out)?;
    let length = (out.len() - start - prefix).to_le_bytes();
    if let (Some(space), Some(length)) = (out.get_mut(start..start + prefix), length.get(..prefix)) {
        space.copy_from_slice(length);
    }
    Ok(())
}

/// Unpacks MySQL's packed date and time without its sign. The low 24 bits are the microseconds.
fn unpacked(packed: u64) -> Result<DateTime> {
    let part = |start: u32, bits: u32| packed >> start & ((1 << bits) - 1);
    let months = packed >> 46;
    let year = u16::try_from(months / 13).ok().filter(|year| *year <= 9999);
    let moment = DateTime {
        date: Date { year: year.unwrap_or(0), month: (months % 13) as u8, day: part(41, 5) as u8 },
        hour: part(36, 5) as u8,
        minute: part(30, 6) as u8,
        second: part(24, 6) as u8,
        micros: part(0, 24) as u32,
    };
    if year.is_none() || moment.hour > 23 || moment.minute > 59 || moment.second > 59 || moment.micros > 999_999 {
        return Err(malformed(format!("{packed:#x} is no date and time of TiDB")));
    }
    Ok(moment)
}

fn date(packed: u64) -> Result<Date> {
    let moment = unpacked(packed)?;
    match (moment.hour, moment.minute, moment.second, moment.micros) {
        (0, 0, 0, 0) => Ok(moment.date),
        _ => Err(value_malformed(format!("the DATE {packed:#x} has a time"))),
    }
}

/// Converts a packed date and time in UTC. TiDB's TIMESTAMP has MySQL's range: 1970 to January 2038.
fn timestamp(packed: u64) -> Result<Timestamp> {
    if packed == 0 {
        return Ok(Timestamp { seconds: 0, micros: 0 });
    }
    let moment = unpacked(packed)?;
    let seconds = moment.micros().map(|micros| micros.div_euclid(1_000_000));
    match seconds.and_then(|seconds| u32::try_from(seconds).ok()) {
        Some(seconds @ 1..) => Ok(Timestamp { seconds, micros: moment.micros }),
        _ => Err(value_malformed(format!("the TIMESTAMP {packed:#x} is outside 1970 to 2106"))),
    }
}

fn time(nanos: i64) -> Result<Time> {
    if nanos % 1_000 != 0 {
        return Err(value_malformed(format!("a TIME of {nanos} nanoseconds, which is no microsecond")));
    }
    let micros = nanos.unsigned_abs() / 1_000;
    let (seconds, micros) = (micros / 1_000_000, (micros % 1_000_000) as u32);
    let hours = u16::try_from(seconds / 3_600).ok().filter(|hours| *hours <= 838);
    let hours = hours.ok_or_else(|| value_malformed(format!("a TIME of {nanos} nanoseconds")))?;
    let [minutes, seconds] = [seconds / 60 % 60, seconds % 60].map(|value| value as u8);
    Ok(Time { negative: nanos < 0, hours, minutes, seconds, micros })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::charset::Charset;
    use crate::cursor::Cursor;

    fn shown(type_text: &str, bytes: &[u8]) -> Result<String> {
        let kind = Kind::declared(type_text, Some(Charset::Utf8mb4), false).unwrap();
        let mut image = Vec::new();
        if write(&kind, Datum::read(&mut Cursor::new(bytes))?, &mut image)? {
            return Ok("NULL".to_owned());
        }
        let mut text = Vec::new();
        kind.read(&mut Cursor::new(&image))?.write_text(&kind, &mut text)?;
        Ok(String::from_utf8(text).unwrap())
    }

    #[test]
    fn datums_that_tidb_wrote_are_shown_as_its_client_shows_them() {
        for (type_text, bytes, expected) in [
            ("bigint unsigned", &b"\x08\xfd\xff\xff\xff\xff\xff\xff\xff\xff\x01"[..], "9223372036854775809"),
            ("tinyint", b"\x08\x09", "-5"),
            ("int unsigned", b"\x09\x80\xd0\xac\xf3\x0e", "4000000000"),
            ("float", b"\x05\xbf\xf8\0\0\0\0\0\0", "1.5"),
            ("double", b"\x05\x3f\xfd\xff\xff\xff\xff\xff\xff", "-2.25"),
            ("decimal(20,5)", b"\x06\x14\x05\x7f\xff\xff\xff\xff\xcf\xc6\xfe\xf6\xcd", "-12345.67890"),
            ("year", b"\x08\xd4\x1f", "2026"),
            ("datetime(6)", b"\x09\xc0\xc4\x87\x80\xbc\x96\xdb\xdd\x19", "2026-11-22 11:15:00.123456"),
            ("timestamp(3)", b"\x09\xf8\xc0\x87\x80\xbc\x96\xdb\xdd\x19", "2026-11-22 11:15:00.123"),
            ("timestamp", b"\x09\0", "0000-00-00 00:00:00"),
            ("date", b"\x09\x80\x80\x80\x80\x80\x80\xdb\xdd\x19", "2026-11-22"),
            ("time(6)", b"\x08\xff\xbc\xa4\xb0\xcf\xcc\x14", "-12:34:56.789000"),
            ("time(3)", b"\x07\x80\0\0\0\x3b\x9a\xca\0", "00:00:01.000"),
            ("varchar(50)", b"\x02\x0ch\xc3\xa9llo", "h\u{e9}llo"),
            ("enum('x','y','z')", b"\x09\x02", "y"),
            ("set('p','q','r')", b"\x09\x05", "p,r"),
            ("json", b"\x0a\x04\x01", "true"),
            ("int", b"\0", "NULL"),
        ] {
            assert_eq!(shown(type_text, bytes).as_deref(), Ok(expected), "{type_text}");
        }
    }

    #[test]
    fn datums_that_a_column_cannot_hold_are_refused() {
        for (type_text, bytes) in [
            ("int", &b"\x02\x02a"[..]),
            ("int", b"\x09\x01"),
            ("varchar(5)", b"\x08\x02"),
            ("year", b"\x08\x01"),
            ("year", b"\x08\xd6\x0f"),
            ("tinyint unsigned", b"\x08\x01"),
            ("datetime", b"\x09\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
            ("timestamp", b"\x09\x01"),
            ("time", b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
            ("enum('x')", b"\x09\x02"),
            // Each value has more fractional digits than the column.
            ("datetime", b"\x09\xc0\xc4\x87\x80\xbc\x96\xdb\xdd\x19"),
            ("timestamp(3)", b"\x09\xc0\xc4\x87\x80\xbc\x96\xdb\xdd\x19"),
            ("timestamp(2)", b"\x09\xf8\xc0\x87\x80\xbc\x96\xdb\xdd\x19"),
            ("time(2)", b"\x08\xff\xbc\xa4\xb0\xcf\xcc\x14"),
            ("time(6)", b"\x08\x02"),
            ("date", b"\x09\xc0\xc4\x87\x80\xbc\x96\xdb\xdd\x19"),
        ] {
            assert!(shown(type_text, bytes).is_err(), "{type_text}");
        }
    }
}
