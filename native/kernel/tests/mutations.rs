//! Tests that damaged logs never make the kernel panic, hang, or read bytes outside of its input.
//!
//! `tests/fuzz/logs.py` recorded the logs in `logs/` from real servers; each name identifies the server. The damage is
//! the same in every run. `make test-long` tries different damage for a long time.

mod support;

use std::fs;
use std::path::Path;

use penstock_kernel::blocks::{self, BlockCutter, Settings, RECORD_BYTES};
use penstock_kernel::checksum::crc32;
use penstock_kernel::emit::dialect::{DialectOptions, NAMES};
use penstock_kernel::error::Error;
use penstock_kernel::gtid::GtidSet;
use penstock_kernel::stream::{Answer, Decoder, Emit, Options, State};
use support::{valid_rows, Chance};

const ROUNDS: u64 = 1000;
const ANSWERS_MAX: usize = 100_000;
const EDGES: [u8; 10] = [0, 1, 2, 0x7f, 0x80, 0xfb, 0xfc, 0xfd, 0xfe, 0xff];

fn logs() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/logs");
    let mut logs: Vec<(String, Vec<u8>)> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(path).unwrap()))
        .collect();
    logs.sort();
    assert!(logs.len() > 8);
    logs
}

fn damage(log: &[u8], chance: &mut Chance) -> Vec<u8> {
    let mut out = log.to_vec();
    for _ in 0..=chance.below(4) {
        let at = chance.below(out.len());
        let length = [1, 2, 4, 19, 100][chance.below(5)].min(out.len() - at);
        match chance.below(6) {
            0 => out[at] ^= 1 << chance.below(8),
            1 => out[at] = EDGES[chance.below(EDGES.len())],
            2 => out[at..at + length].fill(EDGES[chance.below(EDGES.len())]),
            3 => drop(out.drain(at..at + length)),
            4 => {
                let copy = out[at..at + length].to_vec();
                out.splice(at..at, copy);
            }
            _ => out.truncate(at.max(1)),
        }
    }
    out
}

/// Decodes to the end or to the first error; returns the number of rows and the error's name.
fn decode(bytes: &[u8], options: Options, piece: usize) -> (usize, Option<&'static str>) {
    let mut decoder = Decoder::new(options, None).unwrap();
    let mut rows = 0;
    let (mut start, mut end) = (0, 0);
    for _ in 0..ANSWERS_MAX {
        match decoder.state() {
            State::Batch => rows += valid_rows(&decoder.take_batch().unwrap()),
            State::Statement => drop(decoder.take_statement()),
            State::Prepared => {
                if let Err(error) = feed_prepared(&mut decoder, bytes, piece) {
                    return (rows, Some(error));
                }
            }
            State::Table => decoder.answer_table(Answer::Read {
                columns: None,
                from_log: true,
                schema_version: 0,
                wanted: None,
                declared: None,
                primary_key: Vec::new(),
                shard_columns: None,
                judged: false,
            }),
            State::Done => return (rows, None),
            State::Input => {
                let taken = match decoder.feed(&bytes[start..end]) {
                    Ok(taken) => taken,
                    Err(error) => return (rows, Some(error.kind().name())),
                };
                assert!(taken <= end - start);
                start += taken;
                if decoder.state() != State::Input {
                    continue;
                }
                if end == bytes.len() {
                    return finish(&mut decoder, end - start, rows);
                }
                end = bytes.len().min(end + piece.max(end - start));
            }
        }
    }
    panic!("the decoder does not come to an end");
}

/// Feeds the decoder the bytes of a prepared transaction from the same log; returns the error's name.
fn feed_prepared(decoder: &mut Decoder, bytes: &[u8], piece: usize) -> Result<(), &'static str> {
    let name = |error: Error| error.kind().name();
    if let Some(request) = decoder.prepared_request() {
        let location = request.location.ok_or("PreparedMissing")?;
        let head = &bytes[..bytes.len().min(1000)];
        decoder.answer_prepared(&location.file, location.start, location.end, Some(head)).map_err(name)?;
    }
    // The decoder has dropped the bytes that it consumed, so the next piece begins at its current offset.
    let start = usize::try_from(decoder.next_offset()).unwrap().min(bytes.len());
    let mut end = bytes.len().min(start + piece);
    loop {
        let taken = decoder.feed_prepared(&bytes[start..end]).map_err(name)?;
        if taken > 0 || decoder.state() != State::Prepared {
            return Ok(());
        }
        if end == bytes.len() {
            return Err("PreparedMissing");
        }
        end = bytes.len().min(end + piece);
    }
}

/// Ends the input. The remaining batches come first, then the error.
fn finish(decoder: &mut Decoder, left: usize, mut rows: usize) -> (usize, Option<&'static str>) {
    loop {
        if let Err(error) = decoder.finish(left, false) {
            return (rows, Some(error.kind().name()));
        }
        match decoder.take_batch() {
            Some(batch) => rows += valid_rows(&batch),
            None => return (rows, None),
        }
    }
}

fn options(emit: Emit, verify_checksum: bool) -> Options {
    Options { emit, verify_checksum, ..Options::of_file("fuzz", "binlog.000001", 1) }
}

#[test]
fn logs_that_are_whole_decode_to_their_end() {
    for (name, log) in logs() {
        for piece in [17, 1000, 1 << 20] {
            let (rows, error) = decode(&log, options(Emit::Typed, true), piece);
            assert_eq!((rows > 0, error), (true, None), "{name}");
        }
    }
}

#[test]
fn damaged_logs_end_or_stop_by_name() {
    let mut stopped = 0;
    for (index, (_, log)) in logs().iter().enumerate() {
        for round in 0..ROUNDS {
            let mut chance = Chance::new(1 + round + (index as u64) * ROUNDS);
            // A generator whose seed has few bits needs a warm-up before its numbers are useful.
            for _ in 0..8 {
                chance.next();
            }
            let damaged = damage(log, &mut chance);
            let emit = [Emit::Typed, Emit::Envelope, Emit::Events, Emit::Transactions][chance.below(4)];
            let verify = chance.below(4) == 0;
            let (_, error) = decode(&damaged, options(emit, verify), [64, 1 << 20][chance.below(2)]);
            stopped += usize::from(error.is_some());
        }
    }
    assert!(stopped > 1000, "{stopped}");
}

fn messages(dialect: &str, verify_checksum: bool, per_row: bool) -> Options {
    let dialect = DialectOptions {
        message_per_row: per_row,
        server_zone_seconds: 3600,
        gtid_set: per_row.then(GtidSet::default),
        ..DialectOptions::of_name(dialect)
    };
    Options { dialect: Some(dialect), ..options(Emit::Messages, verify_checksum) }
}

#[test]
fn damaged_logs_become_messages_up_to_their_end_or_stop_by_name() {
    let mut stopped = 0;
    for (index, (name, log)) in logs().iter().enumerate() {
        for dialect in NAMES {
            let (rows, error) = decode(log, messages(dialect, true, false), 1000);
            // A dialect without XA support stops at a rollback.
            assert!(rows > 0 && matches!(error, None | Some("TransactionRolledBack")), "{name} {dialect}: {error:?}");
        }
        for round in 0..ROUNDS {
            let mut chance = Chance::new(1 + round + (index as u64) * ROUNDS);
            for _ in 0..8 {
                chance.next();
            }
            let mut damaged = damage(log, &mut chance);
            if chance.below(4) > 0 {
                seal(&mut damaged, chance.below(2) == 0);
            }
            let dialect = NAMES[chance.below(NAMES.len())];
            let options = messages(dialect, chance.below(4) == 0, chance.below(2) == 0);
            let (_, error) = decode(&damaged, options, [64, 1 << 20][chance.below(2)]);
            stopped += usize::from(error.is_some());
        }
    }
    assert!(stopped > 1000, "{stopped}");
}

#[test]
fn any_damage_to_checked_bytes_is_found() {
    for (name, log) in logs() {
        let (rows, _) = decode(&log, options(Emit::Typed, true), 1 << 20);
        for at in (300..log.len()).step_by(23) {
            let mut damaged = log.clone();
            damaged[at] ^= 0x10;
            let (fewer, error) = decode(&damaged, options(Emit::Typed, true), 1 << 20);
            assert!(error.is_some() && fewer <= rows, "{name} at {at}");
        }
    }
}

/// Makes lengths, positions and checksums consistent again, so that damage reaches the content that the checksums
/// protect.
fn seal(log: &mut [u8], positions: bool) {
    let mut at = 4;
    while let Some(rest) = log.get_mut(at..).filter(|rest| rest.len() >= 23) {
        let size = u32::from_le_bytes(rest[9..13].try_into().unwrap()) as usize;
        if size < 23 || size > rest.len() {
            return;
        }
        if positions {
            rest[13..17].copy_from_slice(&((at + size) as u32).to_le_bytes());
        }
        let checksum = crc32(&rest[..size - 4]).to_le_bytes();
        rest[size - 4..size].copy_from_slice(&checksum);
        at += size;
    }
}

/// Returns the packets in which a server would send the log. Damage to the log also moves the boundaries of packets.
fn packets(log: &[u8]) -> Vec<u8> {
    let (mut out, mut at, mut sequence) = (Vec::new(), 4, 1u8);
    while at < log.len() {
        let announced = log.get(at + 9..at + 13).map_or(0, |size| u32::from_le_bytes(size.try_into().unwrap()));
        let size = (announced as usize).clamp(1, log.len() - at);
        out.extend_from_slice(&((size + 1) as u32).to_le_bytes()[..3]);
        out.extend_from_slice(&[sequence, 0]);
        out.extend_from_slice(&log[at..at + size]);
        sequence = sequence.wrapping_add(1);
        at += size;
    }
    out
}

fn settings(live: bool, block_bytes: u64) -> Settings {
    Settings {
        epoch: 0,
        file: "binlog.000001".into(),
        offset: if live { 4 } else { 0 },
        gtid_set: GtidSet::default(),
        block_bytes,
        time_max_us: 0,
        live,
        semi_sync: false,
        statements: true,
    }
}

/// Runs the cutter to the end or to the first error. Returns the number of output bytes and transactions, and the name
/// of the error.
fn cut(bytes: &[u8], live: bool, block_bytes: u64, piece: usize) -> (Vec<u8>, u64, Option<&'static str>) {
    let mut cutter = BlockCutter::new(settings(live, block_bytes), None).unwrap();
    let (mut start, mut end, mut error) = (0, 0, None);
    let mut data = Vec::new();
    for _ in 0..ANSWERS_MAX {
        let input = &bytes[start..end];
        match if live { cutter.feed_packets(input) } else { cutter.feed(input) } {
            Ok(taken) => {
                assert!(taken <= input.len());
                start += taken;
            }
            Err(found) => error = Some(found.kind().name()),
        }
        let (from, to) = cutter.data_range();
        let taken = cutter.take_data();
        assert_eq!(taken.len() as u64, to - from);
        data.extend_from_slice(&taken);
        assert_eq!(cutter.take_records().len() % RECORD_BYTES, 0);
        assert!(cutter.boundary() <= cutter.data_range().1);
        cutter.take_statements();
        if error.is_some() {
            assert!(cutter.feed(&[]).is_err());
            break;
        }
        match cutter.state() {
            blocks::State::File => assert!(cutter.take_file()),
            blocks::State::Hole => assert!(cutter.take_hole()),
            blocks::State::Input if end == bytes.len() => break,
            blocks::State::Input => end = bytes.len().min(end + piece.max(end - start)),
        }
    }
    assert!(error.is_some() || end == bytes.len(), "the cutter does not come to an end");
    assert!(data.len() <= bytes.len());
    (data, cutter.counters().transactions, error)
}

#[test]
fn logs_that_are_whole_are_cut_to_their_end() {
    for (name, log) in logs() {
        let (data, transactions, error) = cut(&log, false, 300, 1000);
        assert_eq!((log.ends_with(&data), transactions > 0, error), (true, true, None), "{name}");
        for piece in [1, 17, 1 << 20] {
            assert_eq!(cut(&log, false, 300, piece).0, data, "{name}");
            assert_eq!(cut(&packets(&log), true, 300, piece), (data.clone(), transactions, None), "{name}");
        }
    }
}

#[test]
fn damaged_logs_are_cut_to_their_end_or_stop_by_name() {
    let (mut stopped, mut ended) = (0, 0);
    for (index, (_, log)) in logs().iter().enumerate() {
        for round in 0..ROUNDS {
            let mut chance = Chance::new(1 + round + (index as u64) * ROUNDS);
            for _ in 0..8 {
                chance.next();
            }
            let mut damaged = damage(log, &mut chance);
            if chance.below(10) > 0 {
                seal(&mut damaged, chance.below(2) == 0);
            }
            let live = chance.below(2) == 0;
            let sent = if live { packets(&damaged) } else { damaged };
            let block_bytes = [1, 100, 65_536][chance.below(3)];
            let (_, _, error) = cut(&sent, live, block_bytes, [64, 1 << 20][chance.below(2)]);
            stopped += usize::from(error.is_some());
            ended += usize::from(error.is_none());
        }
    }
    assert!(stopped > 1000 && ended > 1000, "{stopped} stopped, {ended} ended");
}

#[test]
fn damaged_heads_of_segments_are_read_or_refused() {
    for (name, log) in logs() {
        let cutter = {
            let mut cutter = BlockCutter::new(settings(false, 1), None).unwrap();
            cutter.feed(&log).unwrap();
            cutter
        };
        let head = blocks::segment_head(&blocks::HeadParts {
            format_description: cutter.format_description(),
            file: "binlog.000001",
            offset: 4,
            gtid_set: &GtidSet::default(),
            mariadb: name.starts_with("mariadb"),
            server_id: 1,
            time_s: 2,
        })
        .unwrap();
        assert_eq!(blocks::read_segment_head(&head).unwrap().base, 4, "{name}");
        for round in 0..ROUNDS {
            let mut chance = Chance::new(7 + round);
            let mut damaged = damage(&head, &mut chance);
            seal(&mut damaged, false);
            if let Ok(found) = blocks::read_segment_head(&damaged) {
                assert!(found.head_bytes <= damaged.len());
            }
        }
    }
}
