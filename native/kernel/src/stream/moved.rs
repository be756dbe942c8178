//! Moves events of a log to a given offset of a joined log, which contains the transactions of several servers.
//!
//! Only positions and checksums change. Events that would be ambiguous in a joined log are refused by
//! `EventMover::refuse`.

use std::collections::HashSet;

use super::payload_events::{read_xa_id, visit_payload};
use crate::checksum::crc32;
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::compressed::decompress;
use crate::event::format_description::Format;
use crate::event::query::{Query as QueryBody, Verb};
use crate::event::table_map::TableMap as TableMapBody;
use crate::event::xa::{read_prepare, XaId};
use crate::event::{EventKind, Header, FLAG_IGNORABLE};
use crate::frame::events::{
    check_magic, checked_body, checksum_holds, checksum_holds_without_flag, event_size, mismatch, unknown,
};
use crate::limits::{CHECKSUM_BYTES, EVENT_HEADER_BYTES, MAGIC_BYTES, TABLES_OPEN_MAX};

/// The offset of the server's start time in the body of a format description.
const CREATED_OFFSET: usize = EVENT_HEADER_BYTES + 2 + 50;

/// Moves the events of one file.
pub struct EventMover {
    format: Format,
    head: Vec<u8>,
    /// Table maps (without their table id) that are known to name every column.
    described: HashSet<Box<[u8]>>,
}

impl EventMover {
    /// Starts with the magic and the format description of the file.
    ///
    /// Raises `EventUnsupported` for a log without checksums or without GTID events, because its transactions could not
    /// be moved without changing their content.
    pub fn new(head: &[u8]) -> Result<EventMover> {
        let truncated = || Error::new(ErrorKind::FileTruncated, "the format description is not whole");
        check_magic(*head.first_chunk::<MAGIC_BYTES>().ok_or_else(truncated)?)?;
        let rest = head.get(MAGIC_BYTES..).unwrap_or_default();
        let event = event_size(rest)?.and_then(|size| rest.get(..size)).ok_or_else(truncated)?;
        let header = Header::read(&mut Cursor::new(event))?;
        if header.kind() != Some(EventKind::FormatDescription) {
            return Err(malformed("the first event is no format description"));
        }
        let format = Format::read(event.get(EVENT_HEADER_BYTES..).unwrap_or_default())?;
        if !checksum_holds_without_flag(event, &header) && !checksum_holds(event) {
            return Err(mismatch());
        }
        if !format.checksum {
            return Err(unsupported("a log without checksums cannot be merged")
                .hint("SET GLOBAL binlog_checksum = CRC32, and begin the merge after that"));
        }
        if !format.gtid_events {
            return Err(unsupported(format!("a log of {} cannot be merged", format.server_version))
                .hint("merge servers from MySQL 5.7 and MariaDB 10.0 on"));
        }
        let mut plain = event.to_vec();
        // Clear the server's start time, which would end the open transaction of the joined log.
        if let Some(created) = plain.get_mut(CREATED_OFFSET..CREATED_OFFSET + 4) {
            created.fill(0);
        }
        let plain_header = Header { flags: 0, end_position: (MAGIC_BYTES + event.len()) as u32, ..header };
        seal(&plain_header, &mut plain);
        let head = [head.get(..MAGIC_BYTES).unwrap_or_default(), plain.as_slice()].concat();
        Ok(EventMover { format, head, described: HashSet::new() })
    }

    /// The first bytes of the new file: the magic and the format description.
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Whether the server is MariaDB.
    pub fn is_mariadb(&self) -> bool {
        self.format.mariadb
    }

    /// Appends the complete events at the start of `input` to `out`. Their positions are rewritten to start at `offset`
    /// of the joined log's file. Returns the number of consumed bytes.
    pub fn move_events(&mut self, input: &[u8], offset: u64, out: &mut Vec<u8>) -> Result<usize> {
        let mut consumed = 0;
        while let Some(size) = event_size(input.get(consumed..).unwrap_or_default())? {
            let event = input.get(consumed..consumed + size).unwrap_or_default();
            let header = Header::read(&mut Cursor::new(event))?;
            let kind = header.kind();
            let body = checked_body(Some(&self.format), false, true, kind, event)?;
            self.refuse(&header, kind, body)?;
            let start = out.len();
            out.extend_from_slice(event);
            consumed += size;
            let moved_header = Header { end_position: (offset + consumed as u64) as u32, ..header };
            seal(&moved_header, out.get_mut(start..).unwrap_or_default());
        }
        Ok(consumed)
    }

    /// Fails for events that a joined log cannot contain.
    ///
    /// Two servers may prepare XA transactions with the same id, and readers find the rows of an XA COMMIT by this id.
    /// Two servers may also have different tables with the same name, so a table map must contain the column names.
    fn refuse(&mut self, header: &Header, kind: Option<EventKind>, body: &[u8]) -> Result<()> {
        use EventKind::*;
        let Some(kind) = kind else {
            return if header.flags & FLAG_IGNORABLE != 0 { Ok(()) } else { Err(unknown(header.code)) };
        };
        match kind {
            XaPrepare => match read_prepare(body)? {
                (true, _) => Ok(()),
                (false, id) => Err(prepared(&id)),
            },
            TransactionPayload => match read_xa_id(body)? {
                None => visit_payload(body, |inner, body| match inner.kind() {
                    Some(TransactionPayload) => Err(malformed("a transaction payload inside another")),
                    kind => self.refuse(inner, kind, body),
                }),
                Some(id) => Err(prepared(&id)),
            },
            Query | QueryCompressed => {
                let query = QueryBody::read(body)?;
                let plain = (kind == QueryCompressed).then(|| decompress(query.text)).transpose()?;
                let text = plain.as_deref().unwrap_or(query.text);
                match query.verb(text) {
                    Verb::XaCommit => Err(prepared(&XaId::of_statement(text)?)),
                    _ => Ok(()),
                }
            }
            TableMap => self.check_table(body),
            Rotate | FormatDescription | Stop | Heartbeat | HeartbeatV2 => {
                Err(malformed(format!("a {} event inside a transaction", kind.name())))
            }
            _ => Ok(()),
        }
    }

    fn check_table(&mut self, body: &[u8]) -> Result<()> {
        let definition = body.get(self.format.table_id_bytes_table_map..).unwrap_or_default();
        if self.described.contains(definition) {
            return Ok(());
        }
        let map = TableMapBody::read(body, &self.format)?;
        if !map.is_complete() {
            let message = format!("the log does not name the columns of {}.{}", map.database, map.table);
            return Err(Error::new(ErrorKind::SchemaUnknown, message)
                .hint("SET GLOBAL binlog_row_metadata = FULL, and begin the merge after that"));
        }
        if self.described.len() >= TABLES_OPEN_MAX {
            self.described.clear();
        }
        self.described.insert(definition.into());
        Ok(())
    }
}

/// Writes the header of an event, and the checksum at its end.
fn seal(header: &Header, event: &mut [u8]) {
    let mut head = Vec::with_capacity(EVENT_HEADER_BYTES);
    header.write(&mut head);
    if let Some(place) = event.get_mut(..EVENT_HEADER_BYTES) {
        place.copy_from_slice(&head);
    }
    if let Some((bytes, checksum)) = event.split_last_chunk_mut::<CHECKSUM_BYTES>() {
        *checksum = crc32(bytes).to_le_bytes();
    }
}

fn unsupported(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::EventUnsupported, message)
}

#[cold]
fn prepared(id: &XaId) -> Error {
    unsupported(format!("the XA transaction {id} cannot be merged"))
        .hint("two servers may use one id for their parts of a transaction; read this server's own instance instead")
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::write::events::EventWriter;
    use crate::write::file;

    fn xid(offset: u64) -> Vec<u8> {
        let mut writer = EventWriter::new(offset, 7, 1);
        writer.event(EventKind::Xid, 0, |out| out.extend_from_slice(&[9; 8])).unwrap();
        writer.into_bytes()
    }

    #[test]
    fn moved_events_have_new_positions_and_checksums_only() {
        let mut mover = EventMover::new(&file::head(7, 1).unwrap()).unwrap();
        let two = [xid(500), xid(531)].concat();
        let mut out = Vec::new();
        let partial = two.get(..40).unwrap();
        assert_eq!(mover.move_events(partial, 0xffff_fff0, &mut out).unwrap(), 31);
        let rest = two.get(31..).unwrap();
        assert_eq!(mover.move_events(rest, 0xffff_fff0 + 31, &mut out).unwrap(), 31);
        assert_eq!(out, [xid(0xffff_fff0), xid(0xffff_fff0 + 31)].concat());
        assert!(out.chunks(31).all(checksum_holds));
    }

    #[test]
    fn a_moved_format_description_ends_no_transaction() {
        let mut head = file::head(7, 1).unwrap();
        head.get_mut(MAGIC_BYTES + CREATED_OFFSET..MAGIC_BYTES + CREATED_OFFSET + 4).unwrap().fill(9);
        let size = event_size(head.get(MAGIC_BYTES..).unwrap()).unwrap().unwrap();
        let event = head.get_mut(MAGIC_BYTES..MAGIC_BYTES + size).unwrap();
        let header = Header::read(&mut Cursor::new(event)).unwrap();
        seal(&header, event);
        let mover = EventMover::new(&head).unwrap();
        let moved = mover.head().get(MAGIC_BYTES..).unwrap();
        assert!(checksum_holds(moved));
        assert_eq!(Format::read(moved.get(EVENT_HEADER_BYTES..).unwrap()).unwrap().created, 0);
    }

    #[test]
    fn a_flipped_bit_is_not_sealed_again() {
        let mut mover = EventMover::new(&file::head(7, 1).unwrap()).unwrap();
        let mut event = xid(500);
        *event.get_mut(20).unwrap() ^= 1;
        let error = mover.move_events(&event, 4, &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ChecksumMismatch);
    }

    #[test]
    fn prepared_transactions_and_their_commits_are_refused() {
        let mut mover = EventMover::new(&file::head(7, 1).unwrap()).unwrap();
        for (one_phase, is_refused) in [(0u8, true), (1, false)] {
            let mut writer = EventWriter::new(4, 7, 1);
            let body = [&[one_phase][..], &1u32.to_le_bytes(), &1u32.to_le_bytes(), &0u32.to_le_bytes(), b"x"].concat();
            writer.event(EventKind::XaPrepare, 0, |out| out.extend_from_slice(&body)).unwrap();
            let moved = mover.move_events(&writer.into_bytes(), 4, &mut Vec::new());
            assert_eq!(moved.is_err(), is_refused, "{one_phase}");
        }
    }

    #[test]
    fn commits_of_prepared_transactions_are_refused_plain_and_compressed() {
        let mut mover = EventMover::new(&file::head(7, 1).unwrap()).unwrap();
        let mut moved = |kind: EventKind, text: &[u8]| {
            let mut writer = EventWriter::new(4, 7, 1);
            // The statement has no database and no variables.
            let body = [&[0; 14][..], text].concat();
            writer.event(kind, 0, |out| out.extend_from_slice(&body)).unwrap();
            mover.move_events(&writer.into_bytes(), 4, &mut Vec::new())
        };
        for (text, is_refused) in [("XA COMMIT X'78',X'',1", true), ("XA ROLLBACK X'78',X'',1", false)] {
            let mut zlib = flate2::write::ZlibEncoder::new(vec![0x81, text.len() as u8], flate2::Compression::fast());
            zlib.write_all(text.as_bytes()).unwrap();
            for outcome in
                [moved(EventKind::Query, text.as_bytes()), moved(EventKind::QueryCompressed, &zlib.finish().unwrap())]
            {
                let named = outcome.err().map(|error| error.to_string().contains("X'78',X'',1"));
                assert_eq!(named, is_refused.then_some(true));
            }
        }
    }
}
