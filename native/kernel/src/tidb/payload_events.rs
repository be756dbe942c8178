//! Stores payloads unchanged in events, as a Pump's log does.

use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::event::tidb_payload::PayloadPart;
use crate::event::{EventKind, Header, FLAG_IGNORABLE};
use crate::frame::events::{checksum_holds, event_size, mismatch};
use crate::limits::{CHECKSUM_BYTES, EVENT_BYTES_MAX, EVENT_HEADER_BYTES};
use crate::write::events::EventWriter;

/// Maximum size of the part of a payload in one event. TiDB's client sends payloads of up to 2 GiB.
pub const PART_BYTES_MAX: usize = 512 << 20;

const _: () = assert!(PART_BYTES_MAX + 1024 < EVENT_BYTES_MAX, "a part and its event's header fit an event");

/// Returns the events that hold the payloads. The first event starts at `offset` of a file.
pub fn events(payloads: &[&[u8]], offset: u64, server_id: u32, time_s: u32) -> Result<Vec<u8>> {
    events_of_parts(payloads, offset, server_id, time_s, PART_BYTES_MAX)
}

fn events_of_parts(
    payloads: &[&[u8]],
    offset: u64,
    server_id: u32,
    time_s: u32,
    part_bytes_max: usize,
) -> Result<Vec<u8>> {
    let mut events = EventWriter::new(offset, server_id, time_s);
    for payload in payloads {
        let total = payload.len() as u64;
        let parts = payload.chunks(part_bytes_max).chain(payload.is_empty().then_some(&[][..]));
        let mut start = 0;
        for bytes in parts {
            let part = PayloadPart { total, start, bytes };
            events.event(EventKind::TidbPayload, FLAG_IGNORABLE, |out| part.write(out))?;
            start += bytes.len() as u64;
        }
    }
    Ok(events.into_bytes())
}

/// Returns the payloads in `events`, a buffer of whole events. Events of other types are skipped.
///
/// Raises `ChecksumMismatch` for a damaged event, and `EventMalformed` if the bytes end inside an event or a payload,
/// or if parts do not belong together.
pub fn payloads(events: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut payloads: Vec<Vec<u8>> = Vec::new();
    // The size of the last payload, if it is not complete.
    let mut awaited = None;
    let mut rest = events;
    while !rest.is_empty() {
        let size = event_size(rest)?.ok_or_else(|| malformed("the bytes end inside an event"))?;
        let (event, after) = rest.split_at_checked(size).unwrap_or((rest, &[]));
        rest = after;
        let header = Header::read(&mut Cursor::new(event))?;
        if header.kind() != Some(EventKind::TidbPayload) {
            continue;
        }
        if !checksum_holds(event) {
            return Err(mismatch());
        }
        let end = event.len().saturating_sub(CHECKSUM_BYTES);
        let part = PayloadPart::read(event.get(EVENT_HEADER_BYTES..end).unwrap_or_default())?;
        match (payloads.last_mut(), awaited) {
            (Some(payload), Some(total)) if (part.total, part.start) == (total, payload.len() as u64) => {
                payload.extend_from_slice(part.bytes);
            }
            (_, None) if part.start == 0 => payloads.push(part.bytes.to_vec()),
            _ => return Err(malformed(format!("a part of a TiDB payload from byte {}, out of turn", part.start))),
        }
        awaited = (!part.is_last()).then_some(part.total);
    }
    match awaited {
        None => Ok(payloads),
        Some(total) => Err(malformed(format!("the bytes end inside a TiDB payload of {total} bytes"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_survive_their_events() {
        let written: [&[u8]; 4] = [b"first", b"", b"0123456789", b"last!"];
        for part_bytes_max in [1, 3, 5, 1024] {
            let events = events_of_parts(&written, 4711, 1, 2, part_bytes_max).unwrap();
            assert_eq!(payloads(&events).unwrap(), written, "{part_bytes_max}");
        }
    }

    #[test]
    fn damaged_events_are_refused() {
        let whole = events_of_parts(&[b"0123456789"], 4, 1, 2, 5).unwrap();
        let event_bytes = whole.len() / 2;
        for end in 1..whole.len() {
            assert!(payloads(whole.get(..end).unwrap()).is_err(), "{end}");
        }
        assert!(payloads(whole.get(event_bytes..).unwrap()).is_err(), "a part without its first");
        for at in EVENT_HEADER_BYTES..event_bytes {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            assert!(payloads(&damaged).is_err(), "{at}");
        }
        let twice = [whole.get(..event_bytes).unwrap(), &whole].concat();
        assert!(payloads(&twice).is_err(), "a payload that begins inside another");
    }
}
