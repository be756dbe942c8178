//! Protobuf's encoding of records, with the field numbers that Confluent's converter gives to the fields of a Kafka
//! Connect schema: 1 for the first, and so on. A field that is null is left out.
//!
//! Source: "Protocol Buffers Encoding"; Confluent's `ProtobufData`, and its message `confluent.type.Decimal`.

use super::encoding::Encoding;
use crate::emit::dialect::protobuf;

/// Writes the fields of a message in protobuf.
pub(crate) struct ProtobufMessage<'o> {
    pub(crate) out: &'o mut Vec<u8>,
    /// The number of the last field.
    pub(crate) field: u32,
}

impl ProtobufMessage<'_> {
    fn next_field(&mut self) -> u32 {
        self.field += 1;
        self.field
    }
}

impl Encoding for ProtobufMessage<'_> {
    fn null(&mut self) {
        self.next_field();
    }

    fn present(&mut self) {}

    fn present_with_default(&mut self) {}

    fn long(&mut self, value: i64) {
        let field = self.next_field();
        protobuf::signed(field, value, self.out);
    }

    fn boolean(&mut self, value: bool) {
        let field = self.next_field();
        protobuf::number(field, value.into(), self.out);
    }

    fn float(&mut self, value: f32) {
        let field = self.next_field();
        protobuf::float(field, value, self.out);
    }

    fn double(&mut self, value: f64) {
        let field = self.next_field();
        protobuf::double(field, value, self.out);
    }

    fn bytes(&mut self, value: &[u8]) {
        let field = self.next_field();
        protobuf::bytes(field, value, self.out);
    }

    fn content<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let field = self.next_field();
        let start = protobuf::open(field, self.out);
        let result = write(self.out);
        protobuf::close(start, self.out);
        result
    }

    fn decimal<R>(&mut self, precision: u8, scale: u8, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        self.record(|message| {
            let result = message.content(write);
            message.long(precision.into());
            message.long(scale.into());
            result
        })
    }

    fn floats(&mut self, values: &[u8]) {
        // Write a packed repeated field, which is left out if it has no elements.
        let field = self.next_field();
        if !values.is_empty() {
            protobuf::bytes(field, values, self.out);
        }
    }

    fn record<R>(&mut self, write: impl FnOnce(&mut Self) -> R) -> R {
        let field = self.next_field();
        let start = protobuf::open(field, self.out);
        self.field = 0;
        let result = write(self);
        self.field = field;
        protobuf::close(start, self.out);
        result
    }

    fn encoded(&mut self, fields: &[u8], count: u32) {
        self.out.extend_from_slice(fields);
        self.field += count;
    }
}
