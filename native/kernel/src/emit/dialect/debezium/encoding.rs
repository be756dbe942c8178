//! The common interface of the binary encodings of Debezium's records.

/// Encodes the fields of a record, in order.
pub(crate) trait Encoding {
    /// Writes a field that is null.
    fn null(&mut self);

    /// Called before the value of a nullable field.
    fn present(&mut self);

    /// Called before the value of a nullable field with a default.
    fn present_with_default(&mut self);

    /// Writes an int or a long.
    fn long(&mut self, value: i64);

    /// Writes a boolean.
    fn boolean(&mut self, value: bool);

    /// Writes a float.
    fn float(&mut self, value: f32);

    /// Writes a double.
    fn double(&mut self, value: f64);

    /// Writes bytes or a string.
    fn bytes(&mut self, value: &[u8]);

    /// Writes bytes or a string whose content `write` appends. Returns what `write` returned.
    fn content<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R;

    /// Writes a decimal whose unscaled bytes `write` appends. Returns what `write` returned.
    fn decimal<R>(&mut self, precision: u8, scale: u8, write: impl FnOnce(&mut Vec<u8>) -> R) -> R;

    /// Writes an array of floats, given with the lowest byte first.
    fn floats(&mut self, values: &[u8]);

    /// Writes a record whose fields `write` writes. Returns what `write` returned.
    fn record<R>(&mut self, write: impl FnOnce(&mut Self) -> R) -> R;

    /// Writes fields that are encoded already.
    fn encoded(&mut self, fields: &[u8], count: u32);
}
