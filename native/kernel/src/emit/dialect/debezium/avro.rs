//! Avro's binary encoding.
//!
//! A nullable field is a union with null. Null is the first branch unless the field has a default.
//!
//! Source: Avro's specification, "Binary Encoding".

use super::encoding::Encoding;

/// The branches of a union that begins with null.
const NULL: i64 = 0;
const SOME: i64 = 1;

/// Writes the fields of a record in Avro.
pub(crate) struct AvroRecord<'o> {
    pub(crate) out: &'o mut Vec<u8>,
}

/// Writes an int or a long: zigzag, then seven bits a byte, lowest first.
fn write_long(value: i64, out: &mut Vec<u8>) {
    let mut zigzag = ((value << 1) ^ (value >> 63)) as u64;
    while zigzag >= 0x80 {
        out.push(zigzag as u8 | 0x80);
        zigzag >>= 7;
    }
    out.push(zigzag as u8);
}

impl Encoding for AvroRecord<'_> {
    fn null(&mut self) {
        write_long(NULL, self.out);
    }

    fn present(&mut self) {
        write_long(SOME, self.out);
    }

    fn present_with_default(&mut self) {
        write_long(0, self.out);
    }

    fn long(&mut self, value: i64) {
        write_long(value, self.out);
    }

    fn boolean(&mut self, value: bool) {
        self.out.push(u8::from(value));
    }

    fn float(&mut self, value: f32) {
        self.out.extend_from_slice(&value.to_le_bytes());
    }

    fn double(&mut self, value: f64) {
        self.out.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, value: &[u8]) {
        write_long(value.len() as i64, self.out);
        self.out.extend_from_slice(value);
    }

    fn content<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let start = self.out.len();
        let result = write(self.out);
        let end = self.out.len();
        // The content determines the size of its length. Write the length after the content, then move it to the front.
        write_long((end - start) as i64, self.out);
        let length_bytes = self.out.len() - end;
        if let Some(written) = self.out.get_mut(start..) {
            written.rotate_right(length_bytes);
        }
        result
    }

    fn decimal<R>(&mut self, _precision: u8, _scale: u8, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        self.content(write)
    }

    /// Writes all floats as a single block, and the empty block that ends the array.
    fn floats(&mut self, values: &[u8]) {
        if !values.is_empty() {
            write_long((values.len() / 4) as i64, self.out);
            self.out.extend_from_slice(values);
        }
        write_long(0, self.out);
    }

    fn record<R>(&mut self, write: impl FnOnce(&mut Self) -> R) -> R {
        write(self)
    }

    fn encoded(&mut self, fields: &[u8], _count: u32) {
        self.out.extend_from_slice(fields);
    }
}
