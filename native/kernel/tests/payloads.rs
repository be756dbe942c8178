//! Tests that damaged TiDB payloads are refused with a named error or become a binlog that the decoder reads, without a
//! panic, a hang, or excessive memory. `PENSTOCK_KERNEL_MUTATIONS` is the number of payloads; `make test-long` tries
//! ten million.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use penstock_kernel::error::{Error, ErrorKind};
use penstock_kernel::stream::{Answer, Decoder, Emit, Options, State};
use penstock_kernel::tidb::payload_events;
use penstock_kernel::tidb::transcoder::{DdlStatement, Transcoder};
use penstock_kernel::write::file;
use serde_json::Value as Json;
use support::{memory_kib_max, setting, valid_rows, Chance};

const MUTATIONS: u64 = 3_000;
const ANSWERS_MAX: usize = 1_000_000;
const GROWTH_KIB_MAX: u64 = 256 << 10;
const EDGES: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0x12, 0x7f, 0x80, 0xfe, 0xff];

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/samples/tidb")
}

fn payloads() -> Vec<Vec<u8>> {
    let folder = samples().join("payloads");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let payloads: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    assert!(payloads.len() >= 20);
    payloads
}

/// The definitions of the sample's tables, with the schema versions from which they apply.
fn definitions() -> Vec<(i64, Vec<u8>)> {
    let jobs: Json = serde_json::from_slice(&fs::read(samples().join("ddl_jobs.json")).unwrap()).unwrap();
    let definition = |job: &Json| {
        let result = &job["binlog"];
        let table = result.get("TableInfo").filter(|table| !table.is_null())?;
        Some((result["SchemaVersion"].as_i64().unwrap(), table.to_string().into_bytes()))
    };
    jobs.as_array().unwrap().iter().filter_map(definition).collect()
}

fn transcoder(definitions: &[(i64, Vec<u8>)]) -> Transcoder {
    let mut transcoder = Transcoder::new(7001, 9);
    for (version, definition) in definitions {
        // A damaged definition may be rejected, and its rows then belong to an unknown table. `commit_ts` is above the
        // commit timestamps of all rows, so that the rows' schema versions select their definitions.
        drop(transcoder.define("shop", definition, *version, i64::MAX));
    }
    transcoder
}

fn damage(bytes: &[u8], chance: &mut Chance) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for _ in 0..=chance.below(3) {
        if out.is_empty() {
            break;
        }
        let at = chance.below(out.len());
        let length = [1, 2, 5, 20][chance.below(4)].min(out.len() - at);
        match chance.below(6) {
            0 => out[at] ^= 1 << chance.below(8),
            1 => out[at] = EDGES[chance.below(EDGES.len())],
            2 => out[at..at + length].fill(EDGES[chance.below(EDGES.len())]),
            3 => drop(out.drain(at..at + length)),
            4 => {
                let copy = out[at..at + length].to_vec();
                out.splice(at..at, copy);
            }
            _ => out.truncate(at),
        }
    }
    out
}

/// Transcodes a transaction of rows, or a DDL, after a file's head.
fn transcode(transcoder: &Transcoder, payload: &[u8]) -> Result<Vec<u8>, Error> {
    let mut log = file::head(9, 1)?;
    let statement = DdlStatement { database: "shop", ..DdlStatement::default() };
    match transcoder.ddl(payload, log.len() as u64, &statement) {
        Ok(events) => log.extend(events),
        Err(_) => {
            let payloads = [payload];
            let mut pieces = transcoder.transaction(&payloads, log.len() as u64)?;
            while let Some(piece) = pieces.next(&payloads)? {
                log.extend(piece);
            }
        }
    }
    Ok(log)
}

fn decode(log: &[u8]) -> Result<usize, Error> {
    let options = Options { emit: Emit::Typed, ..Options::of_file("fuzz", "tidb-binlog.000001", 1) };
    let mut decoder = Decoder::new(options, None)?;
    let (mut rest, mut rows, mut is_finished) = (log, 0, false);
    for _ in 0..ANSWERS_MAX {
        match decoder.state() {
            State::Batch => rows += valid_rows(&decoder.take_batch().unwrap()),
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
            State::Prepared => panic!("no TiDB transaction is prepared"),
            State::Done => return Ok(rows),
            State::Input if is_finished => return Ok(rows),
            State::Input => {
                let taken = decoder.feed(rest)?;
                rest = &rest[taken..];
                if decoder.state() == State::Input {
                    decoder.finish(rest.len(), false)?;
                    is_finished = true;
                }
            }
        }
    }
    panic!("the decoder does not come to an end");
}

#[test]
fn damaged_payloads_are_refused_or_become_a_readable_log() {
    let (payloads, definitions) = (payloads(), definitions());
    let whole = transcoder(&definitions);
    let sound: usize = payloads.iter().map(|payload| decode(&transcode(&whole, payload).unwrap()).unwrap()).sum();
    assert!(sound > 20, "{sound} rows");
    let first = setting("PENSTOCK_SEED", 0) << 32;
    let memory_before = memory_kib_max();
    let (mut read, mut refused) = (0u64, 0u64);
    for seed in first..first + setting("PENSTOCK_KERNEL_MUTATIONS", MUTATIONS) {
        let mut chance = Chance::new(seed);
        let mut payload = payloads[chance.below(payloads.len())].clone();
        let damaged_definition = chance.below(8) == 0;
        let damaged = if damaged_definition {
            let mut definitions = definitions.clone();
            let chosen = chance.below(definitions.len());
            definitions[chosen].1 = damage(&definitions[chosen].1, &mut chance);
            transcoder(&definitions)
        } else {
            payload = damage(&payload, &mut chance);
            whole.clone()
        };
        drop(payload_events::payloads(&payload));
        match transcode(&damaged, &payload) {
            Err(_) => refused += 1,
            Ok(log) => match decode(&log) {
                Ok(_) => read += 1,
                // The bytes of a value are copied unchanged, so a reader may refuse a value, but never an event.
                Err(error) if error.kind() == ErrorKind::ValueMalformed || damaged_definition => read += 1,
                Err(error) => panic!("{error}, seed {seed}"),
            },
        }
        let growth = memory_kib_max() - memory_before;
        assert!(growth < GROWTH_KIB_MAX, "{growth} KiB of memory, seed {seed}");
    }
    println!("{read} read, {refused} refused");
    assert!(read > 100 && refused > 100, "{read} read, {refused} refused");
}
