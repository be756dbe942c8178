//! Feeds the cutter: extracts events from bytes and packets, and detects artificial events and holes.

use super::cutter::{BlockCutter, State, OFFSET_MAX, TRANSACTION_BLOCKS_MAX};
use super::event_buffer::PendingEvent;
use super::head::{read_format, split_head};
use super::record::{Block, FLAG_BEGINS};
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::heartbeat::Heartbeat;
use crate::event::rotate::{file_number, Rotate};
use crate::event::{EventKind, Header};
use crate::frame::events::{check_magic, checked_body, declared_size, event_size, is_artificial, span_at};
use crate::limits::{EVENT_BYTES_MAX, MAGIC_BYTES};

/// Positions wrap modulo 2^32, so a position that seems further ahead than this lies in the past.
const AHEAD_BYTES_MAX: u64 = 1 << 31;

/// What the cutter does with an event after processing it.
enum Disposition {
    Kept,
    Consumed,
    /// The event comes after a hole. It is buffered until the hole is taken.
    Held,
}

impl BlockCutter {
    /// Consumes complete events from the start of `input` and returns the number of consumed bytes. Stops early when
    /// the state is no longer `Input`. The caller must offer the rest again, followed by more bytes.
    ///
    /// Events buffered before an error can still be taken. After an error, every later call raises the same error.
    pub fn feed(&mut self, input: &[u8]) -> Result<usize> {
        self.buffer.reserve(input.len());
        self.guard(|cutter| {
            cutter.process_held_event()?;
            cutter.feed_events(input)
        })
    }

    /// Consumes the packets of a dump as `feed` consumes events: removes framing and semi-synchronous marker bytes, and
    /// joins events that span several packets. Long packets are processed in pieces.
    pub fn feed_packets(&mut self, input: &[u8]) -> Result<usize> {
        self.buffer.reserve(input.len());
        self.guard(|cutter| {
            cutter.process_held_event()?;
            cutter.feed_frames(input)
        })
    }

    /// Stores the error that stops the cutter, together with its position.
    fn guard<T>(&mut self, step: impl FnOnce(&mut BlockCutter) -> Result<T>) -> Result<T> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        step(self).map_err(|error| {
            let error = error.at(&self.file, self.offset);
            self.failure = Some(error.clone());
            error
        })
    }

    /// Processes the event after a hole, once the caller has taken the hole.
    fn process_held_event(&mut self) -> Result<()> {
        if self.event_held && self.state == State::Input {
            self.event_held = false;
            self.process_front()?;
        }
        Ok(())
    }

    fn feed_events(&mut self, input: &[u8]) -> Result<usize> {
        let mut consumed = 0;
        while self.state == State::Input {
            let rest = input.get(consumed..).unwrap_or_default();
            if self.magic_due {
                let Some(magic) = rest.first_chunk::<MAGIC_BYTES>() else { break };
                check_magic(*magic)?;
                self.magic_due = false;
                self.offset = MAGIC_BYTES as u64;
                consumed += MAGIC_BYTES;
                continue;
            }
            let Some(size) = event_size(rest)? else { break };
            self.process_event(rest.get(..size).unwrap_or_default())?;
            consumed += size;
        }
        Ok(consumed)
    }

    fn feed_frames(&mut self, input: &[u8]) -> Result<usize> {
        let mut consumed = 0;
        while self.state == State::Input {
            let Some((bytes, piece)) = self.packets.take(input.get(consumed..).unwrap_or_default())? else { break };
            consumed += bytes;
            if self.packets.ended() || self.packets.error().is_some() {
                break;
            }
            if piece.begins && piece.ends {
                self.process_event(piece.bytes)?;
            } else {
                self.buffer.add_piece(piece.bytes);
                self.check_front()?;
                if piece.ends {
                    self.process_front()?;
                }
            }
            if piece.ends && self.packets.take_acknowledge() {
                self.acknowledge = Some((self.file.clone(), self.offset));
            }
        }
        Ok(consumed)
    }

    /// Fails if an event that arrives in pieces exceeds the length in its header.
    fn check_front(&self) -> Result<()> {
        let front = self.buffer.front();
        match declared_size(front)? {
            Some(size) if front.len() > size => Err(unframed(front.len(), size)),
            None if front.len() > EVENT_BYTES_MAX => Err(unframed(front.len(), 0)),
            _ => Ok(()),
        }
    }

    fn process_event(&mut self, event: &[u8]) -> Result<()> {
        match self.event(event)? {
            Disposition::Kept => self.buffer.add(event, self.offset),
            Disposition::Consumed => {}
            Disposition::Held => self.buffer.add_piece(event),
        }
        Ok(())
    }

    /// Processes the event that was assembled from pieces. It follows the complete events in the buffer.
    fn process_front(&mut self) -> Result<()> {
        let complete_bytes = self.buffer.complete_bytes();
        let bytes = self.buffer.lend();
        let disposition = self.event(bytes.get(complete_bytes..).unwrap_or_default());
        let pending_event = match &disposition {
            Ok(Disposition::Kept) => PendingEvent::Complete(self.offset),
            Ok(Disposition::Held) => PendingEvent::Held,
            Ok(Disposition::Consumed) | Err(_) => PendingEvent::Dropped,
        };
        self.buffer.give_back(bytes, pending_event);
        disposition.map(|_| ())
    }

    fn event(&mut self, event: &[u8]) -> Result<Disposition> {
        let header = Header::read(&mut Cursor::new(event))?;
        if header.size as usize != event.len() {
            return Err(unframed(event.len(), header.size as usize));
        }
        let kind = header.kind();
        let live = self.settings.live;
        let body = checked_body(self.format.as_ref(), live, true, kind, event)?;
        if kind == Some(EventKind::FormatDescription) && (live || self.offset == MAGIC_BYTES as u64) {
            self.begin_file(&header, event)?;
            return Ok(Disposition::Consumed);
        }
        if live && is_artificial(&header, kind) {
            self.process_artificial(&header, kind, body)?;
            return Ok(Disposition::Consumed);
        }
        if self.format.is_none() || self.next_file.is_some() {
            return Err(malformed("an event before the file's format description"));
        }
        let span = span_at(self.offset, &header, live)?;
        if span.start != self.offset {
            return self.hole(span.start);
        }
        if kind == Some(EventKind::FormatDescription) {
            // A relay log has a second format description, from the source.
            self.format = Some(read_format(&header, event)?);
        }
        self.begin_block(&header);
        self.dispatch(&header, kind, body, span)?;
        self.offset = span.end;
        self.counters.events += 1;
        if let Some(kind) = kind {
            self.counts.add_event(kind);
        }
        self.close_event();
        Ok(Disposition::Kept)
    }

    /// Starts a block if there is none.
    #[inline]
    fn begin_block(&mut self, header: &Header) {
        if self.block.is_some() {
            return;
        }
        let mut block = Block::new(self.offset, self.file_number, self.settings.epoch);
        match &self.open {
            Some(open) => {
                block.event_index = open.events;
                block.transaction_start = open.start;
                block.note_transaction(&open.gtid, open.server_id, open.time_us);
            }
            None => {
                block.flags |= FLAG_BEGINS;
                block.server_id = header.server_id;
                block.time_us = i64::from(header.timestamp) * 1_000_000;
            }
        }
        self.block = Some(block);
    }

    /// Moves the end of the block past the last event. If no transaction is open, moves the boundary there too.
    #[inline]
    fn close_event(&mut self) {
        let end = self.offset;
        let (bytes_min, transaction_start) = match &mut self.open {
            None => {
                // Between transactions, reading can resume after any event.
                self.boundary = end;
                (self.settings.block_bytes, end)
            }
            Some(open) => {
                open.events = open.events.saturating_add(1);
                (self.settings.block_bytes, open.start)
            }
        };
        let Some(block) = &mut self.block else { return };
        block.events = block.events.saturating_add(1);
        block.end = end;
        if end - block.start < bytes_min {
            return;
        }
        if self.open.is_none() || end - transaction_start > bytes_min.saturating_mul(TRANSACTION_BLOCKS_MAX) {
            self.close_block();
        }
    }

    fn hole(&mut self, start: u64) -> Result<Disposition> {
        if start - self.offset >= AHEAD_BYTES_MAX {
            let message = format!("an event that says it starts at {start} arrives where {} is due", self.offset);
            return Err(Error::new(ErrorKind::SequenceGap, message)
                .hint("the positions of the stream go back; start again at the last whole transaction"));
        }
        self.close_block();
        self.offset = start;
        self.state = State::Hole;
        self.event_held = true;
        Ok(Disposition::Held)
    }

    /// Processes an artificial event, which is not in any file and does not move the position.
    fn process_artificial(&mut self, header: &Header, kind: Option<EventKind>, body: &[u8]) -> Result<()> {
        match kind {
            Some(EventKind::Rotate) => {
                let rotate = Rotate::read(body)?;
                if rotate.offset > OFFSET_MAX {
                    return Err(malformed(format!("a rotation to offset {}", rotate.offset)));
                }
                self.next_file = Some((rotate.file, rotate.offset));
            }
            Some(EventKind::Heartbeat) => {
                let heartbeat = Heartbeat::read_v1(body)?;
                let offset = widen(header.end_position, self.offset);
                self.note_heartbeat(heartbeat, offset);
            }
            Some(EventKind::HeartbeatV2) => {
                let heartbeat = Heartbeat::read_v2(body)?;
                let offset = heartbeat.offset.unwrap_or_else(|| widen(header.end_position, self.offset));
                self.note_heartbeat(heartbeat, offset);
            }
            _ => {}
        }
        Ok(())
    }

    fn note_heartbeat(&mut self, heartbeat: Heartbeat, offset: u64) {
        self.counters.heartbeats += 1;
        self.last_heartbeat = Some((heartbeat.file, offset));
    }

    /// Processes a format description: a new file begins, and the caller must first take the output of the previous
    /// file.
    fn begin_file(&mut self, header: &Header, event: &[u8]) -> Result<()> {
        let format = read_format(header, event)?;
        self.close_block();
        if let Some((file, offset)) = self.next_file.take() {
            self.file_number = file_number(&file)?;
            self.file = file.into();
            self.offset = offset;
        }
        // A dump that starts inside a file also sends the format description, then continues at the requested offset.
        self.offset = self.offset.max((MAGIC_BYTES + event.len()) as u64);
        self.format = Some(format);
        self.format_description = event.to_vec();
        self.state = State::File;
        Ok(())
    }

    /// Reads magic and format description from a file's first bytes, without moving the position.
    pub(super) fn read_head(&mut self, head: &[u8]) -> Result<()> {
        let (event, format) = split_head(head).map_err(|error| error.at(&self.file, 0))?;
        self.format = Some(format);
        self.format_description = event.to_vec();
        Ok(())
    }
}

#[cold]
fn unframed(packet_bytes: usize, announced: usize) -> Error {
    malformed(format!("an event of {announced} bytes lies in a packet of {packet_bytes}"))
}

/// Restores the full offset from its low 32 bits and a nearby offset.
fn widen(low: u32, near: u64) -> u64 {
    let ahead = low.wrapping_sub(near as u32);
    if ahead < 1 << 31 {
        near.saturating_add(u64::from(ahead))
    } else {
        near.saturating_sub(u64::from(ahead.wrapping_neg()))
    }
}
