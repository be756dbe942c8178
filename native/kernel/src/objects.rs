//! Writes Arrow rows as JSON objects.

use arrow_array::{RecordBatch, StringArray};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};

use crate::column::{json, quoted, CellColumn, DeclaredColumn, Value};
use crate::emit::unrepresentable::{array, no_column, UnrepresentableValues};
use crate::error::{malformed, Error, ErrorKind, Result};

/// A member of the objects: its name, its JSON key and its values.
struct Member<'a> {
    name: &'a str,
    key: Vec<u8>,
    cells: CellColumn<'a>,
}

/// Writes a JSON object for each row of `batch`.
///
/// The members are the declared columns in declaration order, or only `names` in the given order. Values are written as
/// the server's client shows them. A value that its type cannot represent is null, or, with `exact`, the text from
/// `_metadata.unrepresentable`. Raises `SchemaInvalid` for a column that does not have its declared type,
/// `OptionInvalid` for a name that is not declared or not in the batch, `LimitExceeded` for more than 2 GiB of text.
pub fn json_objects(
    batch: &RecordBatch,
    columns: &[DeclaredColumn],
    mariadb: bool,
    names: Option<&[String]>,
    exact: bool,
) -> Result<StringArray> {
    let members = members(batch, columns, mariadb, names)?;
    let unrepresentable = if exact { UnrepresentableValues::of(batch) } else { None };
    let mut out = Vec::new();
    let mut ends = Vec::with_capacity(batch.num_rows() + 1);
    ends.push(0i32);
    for row in 0..batch.num_rows() {
        let start = out.len();
        for member in &members {
            out.extend_from_slice(&member.key);
            match unrepresentable.as_ref().and_then(|unrepresentable| unrepresentable.text(row, member.name)) {
                Some(text) => quoted::write(text.as_bytes(), &mut out),
                None => member
                    .cells
                    .value(row)
                    .and_then(|value| value.write_shown(member.cells.kind(), &mut out))
                    .map_err(|error| error.within(&format!("column `{}`", member.name)))?,
            }
        }
        close_object(start, &mut out);
        ends.push(i32::try_from(out.len()).map_err(|_| too_long())?);
    }
    StringArray::try_new(OffsetBuffer::new(ScalarBuffer::from(ends)), out.into(), None)
        .map_err(|error| malformed(format!("JSON that is no text: {error}")))
}

/// Returns the text of a column's value in each row; null if the value is null. With `path`, the column contains JSON
/// documents, and the text is that of the value at this path.
///
/// Values are written as the server's client shows them, except that numbers have all their digits, BIT is a number and
/// bytes are hexadecimal digits. For a value that the column's type cannot represent, the text is the exact value.
/// Raises what `json_objects` does.
pub fn column_texts(
    batch: &RecordBatch,
    column: &DeclaredColumn,
    mariadb: bool,
    path: &[json::Step],
) -> Result<StringArray> {
    let cells = CellColumn::new(&column.name, &column.kind(mariadb)?, array(batch, &column.name)?)?;
    let unrepresentable = UnrepresentableValues::of(batch);
    let mut out = Vec::new();
    let mut ends = Vec::with_capacity(batch.num_rows() + 1);
    let mut valid = Vec::with_capacity(batch.num_rows());
    ends.push(0i32);
    for row in 0..batch.num_rows() {
        let start = out.len();
        let exact = unrepresentable.as_ref().and_then(|unrepresentable| unrepresentable.text(row, &column.name));
        let is_some = match exact {
            Some(text) => {
                out.extend_from_slice(text.as_bytes());
                true
            }
            None => {
                let value = cells.value(row);
                let written = value.and_then(|value| match value {
                    Value::Null => Ok(false),
                    value => value.write_name(cells.kind(), &mut out).map(|()| true),
                });
                written.map_err(|error| error.within(&format!("column `{}`", column.name)))?
            }
        };
        let is_valid = if is_some && !path.is_empty() { replace_by_path(start, path, &mut out)? } else { is_some };
        ends.push(i32::try_from(out.len()).map_err(|_| too_long())?);
        valid.push(is_valid);
    }
    StringArray::try_new(OffsetBuffer::new(ScalarBuffer::from(ends)), out.into(), Some(valid.into()))
        .map_err(|error| malformed(format!("a name that is no text: {error}")))
}

/// Replaces the document after `start` by the value at a path; false if the path leads nowhere.
fn replace_by_path(start: usize, path: &[json::Step], out: &mut Vec<u8>) -> Result<bool> {
    let document = std::str::from_utf8(out.get(start..).unwrap_or_default());
    let value_at_path = json::pick(document.map_err(|_| malformed("a document that is no text"))?, path)?;
    out.truncate(start);
    out.extend_from_slice(value_at_path.as_deref().unwrap_or_default().as_bytes());
    Ok(value_at_path.is_some())
}

/// Turns the pairs after `start`, each with a leading comma, into an object.
fn close_object(start: usize, out: &mut Vec<u8>) {
    match out.get_mut(start) {
        Some(first) => *first = b'{',
        None => out.push(b'{'),
    }
    out.push(b'}');
}

fn members<'a>(
    batch: &'a RecordBatch,
    columns: &'a [DeclaredColumn],
    mariadb: bool,
    names: Option<&[String]>,
) -> Result<Vec<Member<'a>>> {
    let member = |column: &'a DeclaredColumn| {
        let mut key = vec![b','];
        quoted::write(column.name.as_bytes(), &mut key);
        key.push(b':');
        let cells = CellColumn::new(&column.name, &column.kind(mariadb)?, array(batch, &column.name)?)?;
        Ok(Member { name: &column.name, key, cells })
    };
    match names {
        None => columns.iter().map(member).collect(),
        Some(names) => {
            let column = |name: &String| columns.iter().find(|column| column.name == *name);
            names.iter().map(|name| column(name).ok_or_else(|| no_column(name)).and_then(member)).collect()
        }
    }
}

#[cold]
fn too_long() -> Error {
    Error::new(ErrorKind::LimitExceeded, "the JSON of one batch holds more than 2 GiB").hint("lower batch_bytes_max")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{ArrayRef, Decimal128Array, DurationMicrosecondArray, Int32Array};
    use arrow_schema::{Field, Schema};

    use super::*;

    fn column(name: &str, type_text: &str, array: ArrayRef) -> (DeclaredColumn, ArrayRef) {
        let (name, type_text) = (name.to_owned(), type_text.to_owned());
        (DeclaredColumn { name, type_text, charset: Some("utf8mb4".to_owned()), nullable: true }, array)
    }

    fn texts(values: &[Option<&str>]) -> ArrayRef {
        Arc::new(StringArray::from(values.to_vec()))
    }

    fn objects(columns: Vec<(DeclaredColumn, ArrayRef)>, names: Option<&[&str]>) -> Result<Vec<String>> {
        let fields: Vec<Field> =
            columns.iter().map(|(column, array)| Field::new(&column.name, array.data_type().clone(), true)).collect();
        let (declared, arrays): (Vec<_>, Vec<_>) = columns.into_iter().unzip();
        let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap();
        let names: Option<Vec<String>> = names.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
        let array = json_objects(&batch, &declared, true, names.as_deref(), false)?;
        Ok(array.iter().flatten().map(str::to_owned).collect())
    }

    #[test]
    fn rows_become_objects_of_client_texts() {
        let decimals = Decimal128Array::from(vec![Some(-150), None]).with_precision_and_scale(5, 2).unwrap();
        let times = DurationMicrosecondArray::from(vec![-1_500_000, 3_020_399_000_000]);
        let columns = || {
            vec![
                column("id", "mediumint unsigned", Arc::new(Int32Array::from(vec![7, 16_777_215]))),
                column("price", "decimal(5,2)", Arc::new(decimals.clone())),
                column(
                    "wide",
                    "decimal(40,1)",
                    texts(&[Some("-0.5"), Some("123456789012345678901234567890123456789.1")]),
                ),
                column("at", "time(1)", Arc::new(times.clone())),
                column("na\"me", "varchar(9)", texts(&[Some("a\nb"), Some("")])),
                column("set", "set('x','y')", texts(&[Some("y,x"), Some("")])),
                column("address", "inet6", texts(&[Some("::1"), None])),
            ]
        };
        let expected = [
            r#"{"id":7,"price":-1.50,"wide":-0.5,"at":"-00:00:01.5","na\"me":"a\nb","set":"x,y","address":"::1"}"#,
            concat!(
                r#"{"id":16777215,"price":null,"wide":123456789012345678901234567890123456789.1,"#,
                r#""at":"838:59:59.0","na\"me":"","set":"","address":null}"#
            ),
        ];
        assert_eq!(objects(columns(), None).unwrap(), expected);
        assert_eq!(objects(columns(), Some(&["set", "id"])).unwrap()[0], r#"{"set":"x,y","id":7}"#);
        assert_eq!(objects(columns(), Some(&[])).unwrap(), ["{}", "{}"]);
        let error = objects(columns(), Some(&["none"])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OptionInvalid);
    }

    #[test]
    fn values_that_contradict_the_type_are_rejected_by_column() {
        let cases = [
            ("int", texts(&[Some("1")]), ErrorKind::SchemaInvalid),
            ("enum('a')", texts(&[Some("b")]), ErrorKind::ValueMalformed),
            ("set('a')", texts(&[Some("a,b")]), ErrorKind::ValueMalformed),
            ("uuid", texts(&[Some("b")]), ErrorKind::ValueMalformed),
            ("inet4", texts(&[Some("1.2.3")]), ErrorKind::ValueMalformed),
            ("decimal(40,0)", texts(&[Some("1.5")]), ErrorKind::ValueMalformed),
        ];
        for (type_text, array, kind) in cases {
            let error = objects(vec![column("odd", type_text, array)], None).unwrap_err();
            assert_eq!(error.kind(), kind, "{type_text}");
            assert!(error.message().contains("`odd`"), "{error}");
        }
    }
}
