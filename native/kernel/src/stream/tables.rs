//! Processes table maps and rows events.

use std::fmt::Write as _;
use std::sync::Arc;

use super::decoder::{Decoder, Emitter, Flow};
use super::message_tables::{table_view, Keys};
use super::open_tables::{Answer, OpenTable, TableRequest, Usage};
use super::proof::{charset_of, source_columns};
use super::sources::{declared_columns, logged_columns, logged_sources};
use crate::emit::envelope::EnvelopeTable;
use crate::emit::rows::{RowsView, SourceColumn};
use crate::emit::system::TableRef;
use crate::emit::typed::{Plan, TableBatch};
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::compressed::decompress;
use crate::event::image_lengths::ImageLengths;
use crate::event::rows::{RowsHead, TABLE_ID_NONE};
use crate::event::table_map::{self, TableMap};
use crate::event::{EventKind, Header};
use crate::frame::events::Span;
use crate::limits::TABLES_OPEN_MAX;

impl Decoder {
    // Two of three events reach this function or `rows`. Without inlining, decoding small rows takes a tenth longer.
    #[inline(always)]
    pub(super) fn table_map(&mut self, header: &Header, body: &[u8], span: Span) -> Result<Flow> {
        let Some(format) = &self.format else { return Err(malformed("a table map before the format description")) };
        let id_bytes = format.table_id_bytes_table_map;
        let id = table_map::table_id(body, id_bytes)?;
        if self.tables.get(id).is_some_and(|table| *table.body == *body) {
            self.tables.announce(id);
        } else {
            let definition = body.get(id_bytes..).unwrap_or_default();
            let table = match self.tables.known.get(definition) {
                // The definition is the same but the id is new, because the server closed and reopened the table.
                Some(table) => table.clone(),
                None => {
                    let map = TableMap::read(body, format)?;
                    let Some(usage) = self.determine_usage(&map, span)? else { return Ok(Flow::Ask) };
                    let table = Arc::new(OpenTable {
                        body: body.into(),
                        database: map.database.clone(),
                        table: map.table.clone(),
                        lengths: lengths_to_skip(&map, &usage)?,
                        usage,
                    });
                    self.tables.known.insert(definition.into(), table.clone());
                    table
                }
            };
            if self.tables.open.len() >= TABLES_OPEN_MAX {
                let message = "one transaction changes too many tables";
                return Err(Error::new(ErrorKind::LimitExceeded, message));
            }
            self.tables.insert(id, table);
        }
        if matches!(self.emitter, Emitter::Events(_) | Emitter::Transactions(_)) {
            if let Some(table) = self.tables.get(id).cloned() {
                self.note_event(header, EventKind::TableMap, span, Some((&table.database, &table.table, None)));
            }
        }
        if let (Emitter::Messages(batch), Some(table)) = (&mut self.emitter, self.tables.get(id)) {
            // The statement changes a table that is not selected, or not visible as a whole, so its text may reveal
            // rows of that table.
            match &table.usage {
                Usage::Skip => batch.forget_rows_query(),
                Usage::Messages(table) if table.is_limited() => batch.forget_rows_query(),
                _ => {}
            }
        }
        Ok(Flow::Next)
    }

    /// Determines how to read the table; None until the caller has answered.
    fn determine_usage(&mut self, map: &TableMap, span: Span) -> Result<Option<Usage>> {
        if matches!(self.emitter, Emitter::Events(_) | Emitter::Transactions(_)) {
            return Ok(Some(Usage::Walk));
        }
        let Some(answer) = self.tables.answer.take() else {
            self.tables.request = Some(TableRequest {
                database: map.database.clone(),
                table: map.table.clone(),
                column_count: map.columns.len(),
                columns: logged_columns(map)?,
                primary_key: map.primary_key.clone(),
                file: self.file.clone(),
                offset: span.start,
                map: Arc::new(map.clone()),
                mariadb: self.format.as_ref().is_some_and(|format| format.mariadb),
            });
            return Ok(None);
        };
        self.tables.request = None;
        let Answer::Read { columns, from_log, schema_version, wanted, declared, primary_key, shard_columns, judged } =
            answer
        else {
            return Ok(Some(Usage::Skip));
        };
        let mariadb = self.format.as_ref().is_some_and(|format| format.mariadb);
        let name = format!("table `{}`.`{}`", map.database, map.table);
        let sources = if from_log {
            logged_sources(map, columns.as_deref().or(declared.as_deref()).unwrap_or_default(), mariadb)
        } else {
            source_columns(map, columns.as_deref(), mariadb)
        };
        let sources = sources.map_err(|error| error.within(&name))?;
        let table = TableRef { database: map.database.clone(), table: map.table.clone(), schema_version };
        let usage = match &mut self.emitter {
            Emitter::Envelope(_) => Usage::Envelope(EnvelopeTable {
                definition: definition_text(&table, map, &sources, mariadb).into(),
                kinds: sources.into_iter().map(|column| column.kind).collect(),
                table,
            }),
            Emitter::Typed(batches) => {
                let declared = declared.map(|columns| declared_columns(&columns, mariadb)).transpose()?;
                let plan = Plan::new(sources, wanted.as_deref(), declared).map_err(|error| error.within(&name))?;
                let index = match batches.iter().position(|batch| batch.takes(&table, &plan)) {
                    Some(index) => index,
                    None => {
                        batches.push(TableBatch::new(&self.options.instance, table, plan));
                        batches.len() - 1
                    }
                };
                Usage::Typed(index)
            }
            Emitter::Messages(batch) => {
                let keys =
                    Keys { primary: &primary_key, shard: shard_columns.as_deref(), wanted: wanted.as_deref(), judged };
                let view = table_view(&table, map, sources, columns.as_deref(), &keys, mariadb)
                    .map_err(|error| error.within(&name))?;
                Usage::Messages(Box::new(batch.table(view).map_err(|error| error.within(&name))?))
            }
            Emitter::Events(_) | Emitter::Transactions(_) => Usage::Walk,
        };
        Ok(Some(usage))
    }

    #[inline(always)]
    pub(super) fn rows(&mut self, header: &Header, kind: EventKind, body: &[u8], span: Span) -> Result<Flow> {
        let Some(open) = &mut self.open else { return Err(malformed("row images outside a transaction")) };
        if open.skipped {
            return Ok(Flow::Next);
        }
        let id_bytes = self.format.as_ref().map_or(6, |format| format.table_id_bytes_rows);
        let head = RowsHead::read(body, kind, id_bytes)?;
        let table = match self.tables.get(head.table_id) {
            Some(table) => table,
            None if head.table_id == TABLE_ID_NONE && head.images.is_empty() => return Ok(Flow::Next),
            None => {
                let message = format!("rows for table number {}, which no table map announced", head.table_id);
                return Err(Error::new(ErrorKind::TableMapMissing, message)
                    .hint("events are missing before this one; read from the start of the transaction"));
            }
        };
        let plain = if kind.has_compressed_rows() { Some(decompress(head.images)?) } else { None };
        let images = plain.as_deref().unwrap_or(head.images);
        let event = self.event;
        let view = RowsView { kind, head, images, event, row_first: open.rows, resume_rows: open.resume_rows };
        let filter = self.options.changes;
        let changes = match (&mut self.emitter, &table.usage) {
            (Emitter::Typed(batches), Usage::Typed(index)) => {
                let batch = batches.get_mut(*index).ok_or_else(|| malformed("a table without its batch"))?;
                let before = batch.rows();
                let changes = batch.add(&open.view, &view, filter)?;
                self.buffered_rows += batch.rows() - before;
                if self.dirty.last() != Some(index) {
                    self.dirty.push(*index);
                }
                open.selected += changes;
                changes
            }
            (Emitter::Envelope(batch), Usage::Envelope(table)) => {
                let changes = batch.add(&open.view, table, &view, filter)?;
                self.buffered_rows += changes as usize;
                open.selected += changes;
                changes
            }
            (Emitter::Messages(batch), Usage::Messages(table)) => {
                let before = (batch.len(), batch.bytes());
                let changes = batch.add(&open.view, table, &view, filter)?;
                self.buffered_rows += batch.len() - before.0;
                self.buffered_bytes += batch.bytes() - before.1;
                open.selected += changes;
                changes
            }
            _ => match &table.lengths {
                Some(lengths) => lengths.count_changes(&head, images, kind)?,
                // These rows are not needed, and the metadata to split them is missing, so they are not counted.
                None => 0,
            },
        };
        open.rows += changes;
        if matches!(table.usage, Usage::Typed(_) | Usage::Envelope(_)) {
            self.buffered_bytes += images.len();
        }
        if matches!(self.emitter, Emitter::Events(_) | Emitter::Transactions(_)) {
            let table = table.clone();
            self.note_rows(header, kind, span, &table, changes);
        }
        if self.buffered_bytes >= self.options.held_bytes_max {
            self.flush_open()?;
        }
        Ok(Flow::Next)
    }

    /// Closes the batch inside the open transaction.
    fn flush_open(&mut self) -> Result<()> {
        self.flush(true)?;
        let held_back = match &self.emitter {
            Emitter::Messages(batch) => batch.held_back(),
            _ => 0,
        };
        if let Some(open) = &mut self.open {
            open.handed_out = open.handed_out.max(open.rows.max(open.resume_rows).saturating_sub(held_back));
        }
        Ok(())
    }

    fn note_rows(&mut self, header: &Header, kind: EventKind, span: Span, table: &OpenTable, changes: u32) {
        match self.emitter {
            Emitter::Events(_) => {
                self.note_event(header, kind, span, Some((&table.database, &table.table, Some(changes))));
            }
            Emitter::Transactions(_) => {
                self.tally.events += 1;
                self.tally.rows += u64::from(changes);
                let name = format!("{}.{}", table.database, table.table);
                if !self.tally.tables.contains(&name) {
                    self.tally.tables.push(name);
                }
            }
            _ => {}
        }
    }
}

/// Returns how to skip the rows of a table that is not read; None if the log lacks the metadata.
fn lengths_to_skip(map: &TableMap, usage: &Usage) -> Result<Option<ImageLengths>> {
    if !matches!(usage, Usage::Skip | Usage::Walk) {
        return Ok(None);
    }
    match map.skip_kinds() {
        Err(error) if error.kind() == ErrorKind::SchemaUnknown => Ok(None),
        kinds => Ok(Some(ImageLengths::new(kinds?))),
    }
}

/// Returns the definition for envelope rows, as JSON.
fn definition_text(table: &TableRef, map: &TableMap, columns: &[SourceColumn], mariadb: bool) -> String {
    let mut out = String::new();
    out.push_str("{\"database\":");
    push_json(&table.database, &mut out);
    out.push_str(",\"table\":");
    push_json(&table.table, &mut out);
    // Writing into a String cannot fail.
    let _ = write!(out, ",\"schema_version\":{},\"mariadb\":{mariadb},\"columns\":[", table.schema_version);
    for (index, (column, logged)) in columns.iter().zip(&map.columns).enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str("{\"name\":");
        push_json(&column.name, &mut out);
        out.push_str(",\"type\":");
        push_json(&column.kind.type_text(), &mut out);
        out.push_str(",\"charset\":");
        match charset_of(&column.kind) {
            Some(charset) => push_json(charset.name(), &mut out),
            None => out.push_str("null"),
        }
        let _ = write!(out, ",\"code\":{},\"metadata\":{}}}", logged.wire.code, logged.wire.metadata);
    }
    out.push_str("]}");
    out
}

fn push_json(text: &str, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            control if u32::from(control) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", u32::from(control));
            }
            printable => out.push(printable),
        }
    }
    out.push('"');
}
