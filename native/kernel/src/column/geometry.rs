//! GEOMETRY and its subtypes in the server's format: SRID (four bytes, little-endian) and well-known binary.

use super::base64;
use crate::cursor::Cursor;
use crate::error::{value_malformed, Error, ErrorKind, Result};

/// Maximum nesting depth of collections, which is more than servers allow.
const DEPTH_MAX: usize = 100;

/// Codes of well-known binary.
const POINT: u32 = 1;
const LINE: u32 = 2;
const POLYGON: u32 = 3;
const POINTS: u32 = 4;
const LINES: u32 = 5;
const POLYGONS: u32 = 6;
const COLLECTION: u32 = 7;

#[inline(always)]
pub(super) fn read<'a>(prefix: u8, cursor: &mut Cursor<'a>) -> Result<&'a [u8]> {
    cursor.prefixed(prefix)
}

/// Splits a value into its spatial reference system (0 if there is none) and its well-known binary.
///
/// Raises `ValueMalformed` for a value that is too short.
pub(crate) fn parts(bytes: &[u8]) -> Result<(u32, &[u8])> {
    let mut cursor = Cursor::new(bytes);
    let srid = cursor.u32().map_err(|_| value_malformed(format!("a geometry of {} bytes", bytes.len())))?;
    Ok((srid, cursor.take_rest()))
}

/// Reads the numbers of a geometry in the byte order that it declares.
struct Shapes<'a> {
    cursor: Cursor<'a>,
    little: bool,
}

impl Shapes<'_> {
    fn count(&mut self) -> Result<u32> {
        if self.little {
            self.cursor.u32()
        } else {
            self.cursor.u32_be()
        }
    }

    fn number(&mut self) -> Result<f64> {
        let bits = self.cursor.u64()?;
        Ok(f64::from_bits(if self.little { bits } else { bits.swap_bytes() }))
    }

    /// Reads the byte order and the type code at the start of every geometry.
    fn code(&mut self) -> Result<u32> {
        self.little = match self.cursor.u8()? {
            0 => false,
            1 => true,
            order => return Err(value_malformed(format!("a geometry with the byte order {order}"))),
        };
        self.count()
    }

    fn point(&mut self, out: &mut Vec<u8>) -> Result<()> {
        write_number(self.number()?, out);
        out.push(b' ');
        write_number(self.number()?, out);
        Ok(())
    }

    /// Reads a count and writes that many parts in parentheses, or EMPTY if the count is 0.
    fn list(&mut self, out: &mut Vec<u8>, mut part: impl FnMut(&mut Self, &mut Vec<u8>) -> Result<()>) -> Result<()> {
        let count = self.count()?;
        if count == 0 {
            out.extend_from_slice(b"EMPTY");
            return Ok(());
        }
        out.push(b'(');
        for index in 0..count {
            if index > 0 {
                out.extend_from_slice(b", ");
            }
            part(self, out)?;
        }
        out.push(b')');
        Ok(())
    }

    /// Writes the body of a geometry with this type code; the caller has written its name.
    fn body(&mut self, code: u32, depth: usize, out: &mut Vec<u8>) -> Result<()> {
        match code {
            POINT => {
                out.push(b'(');
                self.point(out)?;
                out.push(b')');
                Ok(())
            }
            LINE => self.list(out, |shapes, out| shapes.point(out)),
            POLYGON => self.list(out, |shapes, out| shapes.list(out, |shapes, out| shapes.point(out))),
            // The parts of a multi-geometry have their own byte order and code, and are written without a name.
            POINTS | LINES | POLYGONS => self.list(out, |shapes, out| {
                let part_code = shapes.code()?;
                if part_code != code - POINTS + POINT {
                    return Err(value_malformed(format!("a geometry of code {part_code} in one of code {code}")));
                }
                shapes.body(part_code, depth, out)
            }),
            COLLECTION if depth >= DEPTH_MAX => {
                let message = format!("a geometry nested deeper than {DEPTH_MAX}");
                Err(Error::new(ErrorKind::LimitExceeded, message))
            }
            COLLECTION => self.list(out, |shapes, out| shapes.tagged(depth + 1, out)),
            code => Err(value_malformed(format!("a geometry of code {code}"))),
        }
    }

    fn tagged(&mut self, depth: usize, out: &mut Vec<u8>) -> Result<()> {
        let code = self.code()?;
        out.extend_from_slice(match code {
            POINT => b"POINT ",
            LINE => b"LINESTRING ",
            POLYGON => b"POLYGON ",
            POINTS => b"MULTIPOINT ",
            LINES => b"MULTILINESTRING ",
            POLYGONS => b"MULTIPOLYGON ",
            _ => b"GEOMETRYCOLLECTION ",
        });
        self.body(code, depth, out)
    }
}

/// Writes the shortest digits that parse to the same number, never with an exponent.
fn write_number(value: f64, out: &mut Vec<u8>) {
    out.extend_from_slice(value.to_string().as_bytes());
}

/// Writes the value as well-known text, such as `POINT (1.5 -2)`, without its spatial reference system.
///
/// Raises `ValueMalformed` if the value is not a geometry, `LimitExceeded` for collections nested too deeply.
pub(crate) fn write_wkt(bytes: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let (_, wkb) = parts(bytes)?;
    let mut shapes = Shapes { cursor: Cursor::new(wkb), little: true };
    shapes.tagged(0, out).map_err(|error| match error.kind() {
        ErrorKind::EventMalformed => value_malformed("a geometry that ends too early"),
        _ => error,
    })
}

/// Writes Debezium's struct: for a POINT column its coordinates first, then the well-known binary, and the spatial
/// reference system or null.
///
/// Raises `ValueMalformed` if the value is not a geometry, or not a point in a POINT column.
pub(crate) fn write_debezium(bytes: &[u8], is_point: bool, out: &mut Vec<u8>) -> Result<()> {
    let (srid, wkb) = parts(bytes)?;
    out.push(b'{');
    if is_point {
        for (name, coordinate) in [&b"\"x\":"[..], b"\"y\":"].into_iter().zip(coordinates(wkb)?) {
            out.extend_from_slice(name);
            super::float::write_json(coordinate, out);
            out.push(b',');
        }
    }
    out.extend_from_slice(b"\"wkb\":");
    base64::write_quoted(wkb, out);
    out.extend_from_slice(b",\"srid\":");
    match srid {
        0 => out.extend_from_slice(b"null"),
        srid => super::integer::write_unsigned(srid.into(), out),
    }
    out.push(b'}');
    Ok(())
}

/// Returns the coordinates of a point in well-known binary. Raises `ValueMalformed` if the value is another geometry.
pub(crate) fn coordinates(wkb: &[u8]) -> Result<[f64; 2]> {
    let mut shapes = Shapes { cursor: Cursor::new(wkb), little: true };
    if shapes.code()? != POINT {
        return Err(value_malformed("another geometry than a point in a column of type POINT"));
    }
    Ok([shapes.number()?, shapes.number()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(x: f64, y: f64) -> Vec<u8> {
        let mut bytes = vec![1, 1, 0, 0, 0];
        bytes.extend(x.to_le_bytes());
        bytes.extend(y.to_le_bytes());
        bytes
    }

    fn collection(code: u8, parts: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![1, code, 0, 0, 0, parts.len() as u8, 0, 0, 0];
        bytes.extend(parts.concat());
        bytes
    }

    fn wkt(wkb: &[u8]) -> Result<String> {
        let mut out = Vec::new();
        write_wkt(&[&[0xe6, 0x10, 0, 0], wkb].concat(), &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn shapes_show_as_well_known_text() {
        assert_eq!(wkt(&point(1.5, -2.0)).unwrap(), "POINT (1.5 -2)");
        assert_eq!(wkt(&collection(4, &[point(0.0, 1e21), point(1.0, 2.0)])).unwrap(), {
            "MULTIPOINT ((0 1000000000000000000000), (1 2))"
        });
        assert_eq!(wkt(&collection(7, &[])).unwrap(), "GEOMETRYCOLLECTION EMPTY");
        assert_eq!(wkt(&collection(7, &[point(1.0, 2.0)])).unwrap(), "GEOMETRYCOLLECTION (POINT (1 2))");
        let big_endian = [&[0, 0, 0, 0, 2, 0, 0, 0, 1][..], &3f64.to_be_bytes(), &4f64.to_be_bytes()].concat();
        assert_eq!(wkt(&big_endian).unwrap(), "LINESTRING (3 4)");
        let ring = [&[1, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0][..], &3f64.to_le_bytes(), &4f64.to_le_bytes()].concat();
        assert_eq!(wkt(&ring).unwrap(), "POLYGON ((3 4))");
    }

    #[test]
    fn invalid_geometries_are_malformed() {
        for wkb in [&[][..], &[2, 1, 0, 0, 0], &[1, 9, 0, 0, 0], &[1, 1, 0, 0, 0, 1], &collection(4, &[vec![1, 2]])] {
            assert_eq!(wkt(wkb).unwrap_err().kind(), ErrorKind::ValueMalformed);
        }
        let mut deep = point(1.0, 2.0);
        for _ in 0..=DEPTH_MAX {
            deep = collection(7, &[deep]);
        }
        assert_eq!(wkt(&deep).unwrap_err().kind(), ErrorKind::LimitExceeded);
        assert_eq!(parts(b"abc").unwrap_err().kind(), ErrorKind::ValueMalformed);
    }

    #[test]
    fn points_of_debezium_have_their_coordinates() {
        let shown = |srid: [u8; 4], is_point| {
            let mut out = Vec::new();
            write_debezium(&[&srid[..], &point(1.5, -2.0)].concat(), is_point, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(shown([0; 4], false), r#"{"wkb":"AQEAAAAAAAAAAAD4PwAAAAAAAADA","srid":null}"#);
        let with_coordinates = r#"{"x":1.5,"y":-2.0,"wkb":"AQEAAAAAAAAAAAD4PwAAAAAAAADA","srid":4326}"#;
        assert_eq!(shown([0xe6, 0x10, 0, 0], true), with_coordinates);
        let line = [0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0];
        assert!(write_debezium(&line, true, &mut Vec::new()).is_err());
    }
}
