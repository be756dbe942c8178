//! Decodes envelope rows of a table into typed rows.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, BinaryArray, RecordBatch, StringArray, StructArray, UInt64Array};
use arrow_schema::{Field, Schema};

use super::rows::SourceColumn;
use crate::column::ColumnBuilder;
use crate::cursor::Cursor;
use crate::emit::system;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::rows::{bit, count};

/// Metadata of the rows: absent columns and unrepresentable values.
#[derive(Default)]
struct Notes {
    absent: Vec<Vec<Arc<str>>>,
    unrepresentable: Vec<system::Unrepresentable>,
}

impl Notes {
    /// Fills in these fields of the envelope's metadata column, which are still empty there.
    fn put_into(&self, metadata: &ArrayRef) -> Result<ArrayRef> {
        let Some(parts) = metadata.as_any().downcast_ref::<StructArray>() else {
            return Err(malformed("envelope rows whose metadata is no struct"));
        };
        let (fields, mut columns, nulls) = parts.clone().into_parts();
        for (field, column) in fields.iter().zip(&mut columns) {
            match field.name().as_str() {
                "absent" => *column = system::absent_array(&self.absent),
                "unrepresentable" => {
                    *column = system::unrepresentable_array(metadata.len(), &self.unrepresentable);
                }
                _ => {}
            }
        }
        let joined = StructArray::try_new(fields, columns, nulls);
        Ok(Arc::new(joined.map_err(|error| malformed(format!("metadata columns: {error}")))?))
    }
}

/// Decodes images that share a definition into the columns of a batch.
pub struct ImageDecoder {
    sources: Vec<SourceColumn>,
    target_of: Vec<Option<usize>>,
    targets: Vec<SourceColumn>,
}

impl ImageDecoder {
    /// `targets` fixes the columns of the output. A column that is not among them, or has a different Arrow type,
    /// raises `SchemaChanged`. If `targets` is `None`, the columns of the definition are used.
    pub fn new(sources: Vec<SourceColumn>, targets: Option<Vec<SourceColumn>>) -> Result<ImageDecoder> {
        let targets = targets.unwrap_or_else(|| sources.clone());
        let mut target_of = Vec::with_capacity(sources.len());
        for source in &sources {
            let at = targets.iter().position(|target| target.name == source.name);
            let fits =
                at.and_then(|at| targets.get(at)).is_some_and(|t| t.kind.arrow_type() == source.kind.arrow_type());
            if !fits {
                let message = format!("column `{}` ({}) is not in the schema", source.name, source.kind.type_text());
                return Err(Error::new(ErrorKind::SchemaChanged, message)
                    .hint("decode with the newest definition of the table"));
            }
            target_of.push(at);
        }
        Ok(ImageDecoder { sources, target_of, targets })
    }

    /// Decodes envelope rows that share this definition. An update becomes two rows.
    pub fn decode(&self, envelope: &RecordBatch) -> Result<RecordBatch> {
        let changes = text_column(envelope, system::CHANGE_TYPE)?;
        let before = binary_column(envelope, "before")?;
        let after = binary_column(envelope, "after")?;
        let mut builders: Vec<ColumnBuilder> =
            self.targets.iter().map(|target| ColumnBuilder::new(&target.kind)).collect();
        let mut origin: Vec<u64> = Vec::with_capacity(envelope.num_rows() * 2);
        let mut names: Vec<&'static str> = Vec::with_capacity(envelope.num_rows() * 2);
        let mut notes = Notes::default();
        for row in 0..envelope.num_rows() {
            let images: &[(&BinaryArray, &'static str)] = match changes.value(row) {
                "insert" => &[(after, "insert")],
                "delete" => &[(before, "delete")],
                "update" => &[(before, "update_preimage"), (after, "update_postimage")],
                change_type => return Err(malformed(format!("envelope rows with change type `{change_type}`"))),
            };
            for (images, name) in images {
                if images.is_null(row) {
                    return Err(malformed(format!("an envelope row lacks the image of its {name}")));
                }
                self.image(images.value(row), &mut builders, &mut notes)?;
                origin.push(row as u64);
                names.push(name);
            }
        }
        self.assemble(envelope, builders, &UInt64Array::from(origin), names, &notes)
    }

    fn image(&self, image: &[u8], builders: &mut [ColumnBuilder], notes: &mut Notes) -> Result<()> {
        let width = self.sources.len();
        let mut cursor = Cursor::new(image);
        let present = cursor.take(width.div_ceil(8))?;
        let nulls = cursor.take(count(present, width).div_ceil(8))?;
        let row = notes.absent.len();
        let mut absent = Vec::new();
        let mut at = 0;
        for (index, (source, target)) in self.sources.iter().zip(&self.target_of).enumerate() {
            let is_present = bit(present, index);
            let null = is_present && bit(nulls, at);
            at += usize::from(is_present);
            let Some(builder) = target.and_then(|target| builders.get_mut(target)) else { continue };
            if !is_present {
                absent.push(source.name.clone());
            }
            if !is_present || null {
                builder.append_null();
            } else if let Some(text) = builder.append_from(&source.kind, &mut cursor)? {
                notes.unrepresentable.push((row, source.name.clone(), text));
            }
        }
        for (builder, target) in builders.iter_mut().zip(&self.targets).filter(|(builder, _)| builder.len() == row) {
            builder.append_null();
            absent.push(target.name.clone());
        }
        notes.absent.push(absent);
        Ok(())
    }

    fn assemble(
        &self,
        envelope: &RecordBatch,
        mut builders: Vec<ColumnBuilder>,
        origin: &UInt64Array,
        names: Vec<&'static str>,
        notes: &Notes,
    ) -> Result<RecordBatch> {
        let mut fields: Vec<Arc<Field>> = Vec::new();
        let mut columns = Vec::new();
        for (target, builder) in self.targets.iter().zip(&mut builders) {
            fields.push(Arc::new(Field::new(&*target.name, target.kind.arrow_type(), true)));
            columns.push(builder.finish());
        }
        let schema = envelope.schema();
        for (index, field) in schema.fields().iter().enumerate() {
            if !system::ALL.contains(&field.name().as_str()) {
                continue;
            }
            fields.push(field.clone());
            if field.name() == system::CHANGE_TYPE {
                columns.push(Arc::new(StringArray::from(names.clone())));
                continue;
            }
            let column = arrow_select::take::take(envelope.column(index), origin, None)
                .map_err(|error| malformed(format!("system columns: {error}")))?;
            columns.push(if field.name() == system::METADATA { notes.put_into(&column)? } else { column });
        }
        RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
            .map_err(|error| malformed(format!("columns of one batch disagree: {error}")))
    }
}

fn text_column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a StringArray> {
    let column = batch.column_by_name(name).and_then(|column| column.as_any().downcast_ref());
    column.ok_or_else(|| malformed(format!("envelope rows lack the text column `{name}`")))
}

fn binary_column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a BinaryArray> {
    let column = batch.column_by_name(name).and_then(|column| column.as_any().downcast_ref());
    column.ok_or_else(|| malformed(format!("envelope rows lack the binary column `{name}`")))
}
