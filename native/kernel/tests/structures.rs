//! Tests logs with a damaged structure: events are repeated, nested, swapped and lengthened, and statements are built
//! from repeated prefixes. Lengths, positions and checksums are then corrected, so that the kernel cannot reject the
//! log because of them. The kernel must finish or stop with a named error, within its memory limit.
//! `PENSTOCK_KERNEL_MUTATIONS` is the number of logs; `make test-long` tries ten million.

mod support;

use std::fs;
use std::path::Path;

use penstock_kernel::blocks::{BlockCutter, Settings};
use penstock_kernel::checksum::crc32;
use penstock_kernel::event::query::{verb, Query};
use penstock_kernel::event::session::Backslash;
use penstock_kernel::gtid::GtidSet;
use penstock_kernel::stream::{Answer, Decoder, Emit, Options, State};
use support::{memory_kib_max, setting, valid_rows, Chance};

const MUTATIONS: u64 = 2_000;
const ANSWERS_MAX: usize = 1_000_000;
const LOG_BYTES_MAX: usize = 1 << 21;
const GROWTH_KIB_MAX: u64 = 512 << 10;
const QUERY: u8 = 2;
const TRANSACTION_PAYLOAD: u8 = 40;
const CODES: [u8; 18] = [2, 4, 15, 16, 19, 30, 31, 32, 33, 35, 38, 39, 40, 42, 160, 162, 165, 166];
const NUMBERS: [u64; 12] = [0, 1, 2, 0x7f, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff, 0xffff, 0xffff_ffff];
const PIECES: [&str; 24] = [
    "/*!",
    "/*M!",
    "/*!99999 ",
    "/*",
    "*/",
    "(",
    ")",
    "SET STATEMENT a=1 FOR ",
    "-- \n",
    "#\n",
    "'",
    "\"",
    "`",
    "\\",
    "ALTER TABLE t ",
    "ADD c INT,",
    "CREATE TABLE d.z ",
    "INSERT INTO t ",
    "XA COMMIT ",
    "ANALYZE ",
    "FOR ",
    "\u{e9}",
    "START TRANSACTION",
    "1",
];

/// An event without its checksum; the length and the position in its header are written by `assemble`.
#[derive(Clone)]
struct Event(Vec<u8>);

fn logs() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/logs");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let logs: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    assert!(logs.len() > 8);
    logs
}

fn events(log: &[u8]) -> Vec<Event> {
    let (mut at, mut events) = (4, Vec::new());
    while at + 23 <= log.len() {
        let size = u32::from_le_bytes(log[at + 9..at + 13].try_into().unwrap()) as usize;
        events.push(Event(log[at..at + size - 4].to_vec()));
        at += size;
    }
    events
}

fn assemble(events: &[Event]) -> Vec<u8> {
    let mut log = b"\xfebin".to_vec();
    for event in events {
        let (start, size) = (log.len(), event.0.len() + 4);
        log.extend_from_slice(&event.0);
        log[start + 9..start + 13].copy_from_slice(&(size as u32).to_le_bytes());
        log[start + 13..start + 17].copy_from_slice(&((start + size) as u32).to_le_bytes());
        let checksum = crc32(&log[start..]);
        log.extend_from_slice(&checksum.to_le_bytes());
    }
    log
}

/// Fragments of statements, some of which are repeated many times.
fn statement(chance: &mut Chance) -> Vec<u8> {
    let mut text = Vec::new();
    for _ in 0..=chance.below(6) {
        let piece = PIECES[chance.below(PIECES.len())];
        let times = if chance.below(8) == 0 { 1 << chance.below(15) } else { 1 };
        text.extend_from_slice(piece.repeat(times).as_bytes());
    }
    text
}

/// Returns a query event with a new statement, or with a statement derived from the log.
fn query(events: &[Event], chance: &mut Chance) -> Event {
    let mut event =
        events.iter().find(|event| event.0[4] == QUERY).map_or_else(|| vec![0; 19], |event| event.0[..19].to_vec());
    event[4] = QUERY;
    event.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, b'd', 0]);
    event.extend(statement(chance));
    Event(event)
}

/// Returns a transaction payload that contains these events, and possibly another payload.
fn payload(events: &[Event], chance: &mut Chance) -> Event {
    let mut plain = Vec::new();
    for event in events {
        let start = plain.len();
        plain.extend_from_slice(&event.0);
        plain[start + 9..start + 13].copy_from_slice(&(event.0.len() as u32).to_le_bytes());
    }
    let packed = zstd::encode_all(plain.as_slice(), 1).unwrap();
    let announced = if chance.below(4) > 0 { plain.len() as u64 } else { NUMBERS[chance.below(NUMBERS.len())] };
    let mut event = events.first().map_or_else(|| vec![0; 19], |event| event.0[..19].to_vec());
    event[4] = TRANSACTION_PAYLOAD;
    for (kind, value) in [(2u8, 0u64), (3, announced), (1, packed.len() as u64)] {
        event.extend_from_slice(&[kind, 9, 0xfe]);
        event.extend_from_slice(&value.to_le_bytes());
    }
    event.push(0);
    event.extend(packed);
    Event(event)
}

fn mutate(events: &mut Vec<Event>, others: &[Event], chance: &mut Chance) {
    let at = chance.below(events.len());
    let until = (at + 1 + chance.below(8)).min(events.len());
    match chance.below(9) {
        0 => events[at].0[4] = CODES[chance.below(CODES.len())],
        1 => events.insert(at, others[chance.below(others.len())].clone()),
        2 => {
            let part = events[at..until].to_vec();
            let times_max = if chance.below(6) == 0 { 200 } else { 3 };
            let times = 1 + chance.below(times_max);
            events.splice(at..at, part.iter().cycle().take(part.len() * times).cloned());
        }
        3 => drop(events.drain(at..until)),
        4 => {
            let packed = payload(&events[at..until], chance);
            events.splice(at..until, [packed]);
        }
        5 => events.insert(at, query(others, chance)),
        6 => events.swap(at, until - 1),
        _ => damage(&mut events[at].0, chance),
    }
    if events.is_empty() {
        events.push(others[0].clone());
    }
}

/// Sets a number in an event's body to a boundary value, or removes, duplicates or repeats a part of the body.
fn damage(event: &mut Vec<u8>, chance: &mut Chance) {
    if event.len() <= 20 {
        return;
    }
    let at = 19 + chance.below(event.len() - 19);
    let width = [1, 2, 3, 4, 8][chance.below(5)].min(event.len() - at);
    match chance.below(4) {
        0 | 1 => {
            let number = NUMBERS[chance.below(NUMBERS.len())].to_le_bytes();
            event[at..at + width].copy_from_slice(&number[..width]);
        }
        2 => drop(event.drain(at..at + width)),
        _ => {
            let part = event[at..at + width].to_vec();
            let times = if chance.below(10) == 0 { 1 << chance.below(14) } else { 1 };
            event.splice(at..at, part.repeat(times));
        }
    }
}

/// Decodes to the end or to the first error; returns whether the end was reached.
fn decode(log: &[u8], emit: Emit) -> bool {
    let options = Options { emit, verify_checksum: false, ..Options::of_file("fuzz", "binlog.000001", 1) };
    let mut decoder = Decoder::new(options, None).unwrap();
    let mut rest = log;
    for _ in 0..ANSWERS_MAX {
        match decoder.state() {
            State::Batch => drop(decoder.take_batch().as_ref().map(valid_rows)),
            State::Statement => drop(decoder.take_statement()),
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
            // A mutation removed the events that prepared the committed transaction.
            State::Prepared => return false,
            State::Done => return true,
            State::Input => match decoder.feed(rest) {
                Ok(taken) => {
                    rest = &rest[taken..];
                    if decoder.state() == State::Input {
                        return decoder.finish(rest.len(), false).is_ok();
                    }
                }
                Err(_) => return false,
            },
        }
    }
    panic!("the decoder does not come to an end");
}

fn cut(log: &[u8]) {
    let settings = Settings {
        epoch: 0,
        file: "binlog.000001".into(),
        offset: 0,
        gtid_set: GtidSet::default(),
        block_bytes: 1000,
        time_max_us: 0,
        live: false,
        semi_sync: false,
        statements: true,
    };
    let mut cutter = BlockCutter::new(settings, None).unwrap();
    let result = cutter.feed(log);
    assert!(result.is_err() || cutter.data_range().1 <= log.len() as u64);
}

#[test]
fn logs_of_damaged_structure_end_or_stop_by_name_within_memory() {
    let logs: Vec<Vec<Event>> = logs().iter().map(|log| events(log)).collect();
    for log in &logs {
        assert!(decode(&assemble(log), Emit::Typed));
    }
    let first = setting("PENSTOCK_SEED", 0) << 32;
    let memory_before = memory_kib_max();
    let (mut ended, mut stopped) = (0u64, 0u64);
    for seed in first..first + setting("PENSTOCK_KERNEL_MUTATIONS", MUTATIONS) {
        let mut chance = Chance::new(seed);
        let mut log = logs[chance.below(logs.len())].clone();
        let other = chance.below(logs.len());
        for _ in 0..=chance.below(5) {
            mutate(&mut log, &logs[other], &mut chance);
        }
        let bytes = assemble(&log);
        if bytes.len() > LOG_BYTES_MAX {
            continue;
        }
        let emit = [Emit::Typed, Emit::Envelope, Emit::Events, Emit::Transactions][chance.below(4)];
        match decode(&bytes, emit) {
            true => ended += 1,
            false => stopped += 1,
        }
        if chance.below(4) == 0 {
            cut(&bytes);
        }
        let growth = memory_kib_max() - memory_before;
        assert!(growth < GROWTH_KIB_MAX, "{growth} KiB of memory, seed {seed}");
    }
    println!("{ended} ended, {stopped} stopped");
    assert!(ended > 100 && stopped > 100, "{ended} ended, {stopped} stopped");
}

#[test]
fn statements_of_repeated_pieces_have_a_verb() {
    for seed in 0..setting("PENSTOCK_KERNEL_MUTATIONS", MUTATIONS) {
        let mut chance = Chance::new(seed);
        let text = statement(&mut chance);
        verb(&text, Backslash::default);
        let mut body = vec![1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 5, 0, 4, 33, 0, 7, 1, b'd', 0];
        body.extend(text);
        let at = chance.below(20);
        body[at] = NUMBERS[chance.below(NUMBERS.len())] as u8;
        if let Ok(query) = Query::read(&body) {
            assert!(query.text.len() <= body.len());
            assert!(query.text_utf8(query.text).len() <= 4 * body.len());
        }
    }
}
