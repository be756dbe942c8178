//! Bytes and packets to events: what belongs to the file, what the server made up, and where holes are.

use super::cutter::{BlockCutter, State, OFFSET_MAX, TRANSACTION_BLOCKS_MAX};
use super::gathered::Fate;
use super::head::{read_format, split_head};
use super::record::{Block, FLAG_BEGINS};
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::heartbeat::Heartbeat;
use crate::event::rotate::{file_number, Rotate};
use crate::event::{EventKind, Header};
use crate::frame::events::{check_magic, checked_body, declared_size, event_size, is_artificial, span_at};
use crate::limits::{EVENT_BYTES_MAX, MAGIC_BYTES};

/// A position that seems further ahead than this lies behind: positions are told modulo 2^32.
const AHEAD_BYTES_MAX: u64 = 1 << 31;

/// What became of an event.
enum Taken {
    Kept,
    Swallowed,
    /// It stands behind a hole, and waits.
    Held,
}

impl BlockCutter {
    /// Takes whole events from the front of `input` and returns how many bytes that were. Stops early when the state
    /// is no longer `Input`. The rest must be offered again, with more behind it.
    ///
    /// What was gathered before an error can still be taken; every further call raises the same error.
    pub fn feed(&mut self, input: &[u8]) -> Result<usize> {
        self.gathered.reserve(input.len());
        self.guard(|cutter| {
            cutter.take_held()?;
            cutter.feed_events(input)
        })
    }

    /// The same for the packets of a dump: frames, marks of semi-synchronous replication, and events divided over
    /// several packets. Long packets are taken in pieces.
    pub fn feed_packets(&mut self, input: &[u8]) -> Result<usize> {
        self.gathered.reserve(input.len());
        self.guard(|cutter| {
            cutter.take_held()?;
            cutter.feed_frames(input)
        })
    }

    /// Keeps the error that ends the cutter, with its place.
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

    /// Takes the event behind a hole, once the hole was taken in.
    fn take_held(&mut self) -> Result<()> {
        if self.held && self.state == State::Input {
            self.held = false;
            self.take_front()?;
        }
        Ok(())
    }

    fn feed_events(&mut self, input: &[u8]) -> Result<usize> {
        let mut used = 0;
        while self.state == State::Input {
            let rest = input.get(used..).unwrap_or_default();
            if self.magic_due {
                let Some(magic) = rest.first_chunk::<MAGIC_BYTES>() else { break };
                check_magic(*magic)?;
                self.magic_due = false;
                self.offset = MAGIC_BYTES as u64;
                used += MAGIC_BYTES;
                continue;
            }
            let Some(size) = event_size(rest)? else { break };
            self.take_event(rest.get(..size).unwrap_or_default())?;
            used += size;
        }
        Ok(used)
    }

    fn feed_frames(&mut self, input: &[u8]) -> Result<usize> {
        let mut used = 0;
        while self.state == State::Input {
            let Some((bytes, piece)) = self.packets.take(input.get(used..).unwrap_or_default())? else { break };
            used += bytes;
            if self.packets.ended() || self.packets.error().is_some() {
                break;
            }
            if piece.begins && piece.ends {
                self.take_event(piece.bytes)?;
            } else {
                self.gathered.add_piece(piece.bytes);
                self.check_front()?;
                if piece.ends {
                    self.take_front()?;
                }
            }
            if piece.ends && self.packets.take_acknowledge() {
                self.acknowledge = Some((self.file.clone(), self.offset));
            }
        }
        Ok(used)
    }

    /// Holds an event that arrives in pieces to the length it announces.
    fn check_front(&self) -> Result<()> {
        let front = self.gathered.front();
        match declared_size(front)? {
            Some(size) if front.len() > size => Err(unframed(front.len(), size)),
            None if front.len() > EVENT_BYTES_MAX => Err(unframed(front.len(), 0)),
            _ => Ok(()),
        }
    }

    fn take_event(&mut self, event: &[u8]) -> Result<()> {
        match self.event(event)? {
            Taken::Kept => self.gathered.add(event, self.offset),
            Taken::Swallowed => {}
            Taken::Held => self.gathered.add_piece(event),
        }
        Ok(())
    }

    /// Takes the event that was put together behind the gathered ones.
    fn take_front(&mut self) -> Result<()> {
        let whole = self.gathered.whole();
        let bytes = self.gathered.lend();
        let taken = self.event(bytes.get(whole..).unwrap_or_default());
        let fate = match &taken {
            Ok(Taken::Kept) => Fate::Whole(self.offset),
            Ok(Taken::Held) => Fate::Waits,
            Ok(Taken::Swallowed) | Err(_) => Fate::Gone,
        };
        self.gathered.give_back(bytes, fate);
        taken.map(|_| ())
    }

    fn event(&mut self, event: &[u8]) -> Result<Taken> {
        let header = Header::read(&mut Cursor::new(event))?;
        if header.size as usize != event.len() {
            return Err(unframed(event.len(), header.size as usize));
        }
        let kind = EventKind::from_code(header.code);
        let live = self.settings.live;
        let body = checked_body(self.format.as_ref(), live, true, kind, event)?;
        if kind == Some(EventKind::FormatDescription) && (live || self.offset == MAGIC_BYTES as u64) {
            self.begin_file(&header, event)?;
            return Ok(Taken::Swallowed);
        }
        if live && is_artificial(&header, kind) {
            self.artificial(&header, kind, body)?;
            return Ok(Taken::Swallowed);
        }
        if self.format.is_none() || self.rotated.is_some() {
            return Err(malformed("an event before the file's format description"));
        }
        let span = span_at(self.offset, &header, live)?;
        if span.start != self.offset {
            return self.hole(span.start);
        }
        if kind == Some(EventKind::FormatDescription) {
            // Relay logs hold a second one, that of the source.
            self.format = Some(read_format(&header, event)?);
        }
        self.begin_block(&header);
        self.dispatch(&header, kind, body, span)?;
        self.offset = span.end;
        self.counters.events += 1;
        self.close_event();
        Ok(Taken::Kept)
    }

    /// Begins a block where none is in the making.
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

    /// Moves block and boundary behind the event taken last.
    #[inline]
    fn close_event(&mut self) {
        let end = self.offset;
        let (bytes_min, transaction_start) = match &mut self.open {
            None => {
                // Between transactions every event's end is a place to go on from.
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

    fn hole(&mut self, start: u64) -> Result<Taken> {
        if start - self.offset >= AHEAD_BYTES_MAX {
            let message = format!("an event that says it starts at {start} arrives where {} is due", self.offset);
            return Err(Error::new(ErrorKind::SequenceGap, message)
                .hint("the positions of the stream go back; start again at the last whole transaction"));
        }
        self.close_block();
        self.offset = start;
        self.state = State::Hole;
        self.held = true;
        Ok(Taken::Held)
    }

    /// Takes in what a server makes up for the stream; it stands in no file and moves no position.
    fn artificial(&mut self, header: &Header, kind: Option<EventKind>, body: &[u8]) -> Result<()> {
        match kind {
            Some(EventKind::Rotate) => {
                let rotate = Rotate::read(body)?;
                if rotate.offset > OFFSET_MAX {
                    return Err(malformed(format!("a rotation to offset {}", rotate.offset)));
                }
                self.rotated = Some((rotate.file, rotate.offset));
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

    /// A format description: a file begins, and what was gathered of the one before has to be taken first.
    fn begin_file(&mut self, header: &Header, event: &[u8]) -> Result<()> {
        let format = read_format(header, event)?;
        self.close_block();
        if let Some((file, offset)) = self.rotated.take() {
            self.file_number = file_number(&file)?;
            self.file = file.into();
            self.offset = offset;
        }
        // A dump from inside a file sends the format description too, and goes on where it was asked to.
        self.offset = self.offset.max((MAGIC_BYTES + event.len()) as u64);
        self.format = Some(format);
        self.format_description = event.to_vec();
        self.state = State::File;
        Ok(())
    }

    /// Reads magic and format description from a file's first bytes, without moving.
    pub(super) fn read_head(&mut self, head: &[u8]) -> Result<()> {
        let (event, format) = split_head(head).map_err(|error| error.at(&self.file, 0))?;
        self.format = Some(format);
        self.format_description = event.to_vec();
        Ok(())
    }
}

#[cold]
fn unframed(found: usize, announced: usize) -> Error {
    malformed(format!("an event of {announced} bytes lies in a packet of {found}"))
}

/// The full offset of which the low 32 bits are known, near a known one.
fn widen(low: u32, near: u64) -> u64 {
    let ahead = low.wrapping_sub(near as u32);
    if ahead < 1 << 31 {
        near.saturating_add(u64::from(ahead))
    } else {
        near.saturating_sub(u64::from(ahead.wrapping_neg()))
    }
}
