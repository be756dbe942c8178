//! Tests sets of both families, and MariaDB logs in which a GTID position is ambiguous.

use super::*;

const UUID: &str = "3e11fa47-71ca-11e1-9e33-c80aa9429562";

#[test]
fn text_is_canonical_and_round_trips() {
    for (text, canonical) in [
        (format!("{UUID}:1-5:8"), format!("{UUID}:1-5:8")),
        (format!("{UUID}:8:1-3:4-5"), format!("{UUID}:1-5:8")),
        (format!("{UUID}:1:blue:2-3"), format!("{UUID}:1:blue:2-3")),
        ("0-1-5, 7-2-9".to_owned(), "0-1-5,7-2-9".to_owned()),
        (String::new(), String::new()),
    ] {
        assert_eq!(GtidSet::parse(&text).unwrap().text(), canonical);
    }
    assert!(GtidSet::parse("nonsense").is_err());
    assert!(GtidSet::parse(&format!("{UUID}:5-1")).is_err());
}

#[test]
fn membership_follows_intervals_and_positions() {
    let set = GtidSet::parse(&format!("{UUID}:1-5:8,3-1-7")).unwrap();
    let uuid = parse_uuid(UUID).unwrap();
    for (number, is_member) in [(1, true), (5, true), (6, false), (8, true), (9, false)] {
        assert_eq!(set.contains(&Gtid::Mysql { uuid, tag: String::new(), number }), is_member, "{number}");
    }
    assert!(set.contains(&Gtid::Mariadb { domain: 3, server: 1, sequence: 7 }));
    assert!(!set.contains(&Gtid::Mariadb { domain: 3, server: 1, sequence: 8 }));
    assert!(!set.contains(&Gtid::Mariadb { domain: 3, server: 9, sequence: 7 }));
}

fn contains_in_log(set: &str, gtid: &str, before: &str) -> Result<bool> {
    GtidSet::parse(set)?.contains_in_log(&Gtid::parse(gtid)?, &GtidSet::parse(before)?)
}

#[test]
fn mariadb_set_has_the_last_sequence_of_each_server_and_the_newest_last() {
    let mut set = GtidSet::parse("0-1-100,0-2-150,7-1-3").unwrap();
    assert_eq!(set.text(), "0-1-100,0-2-150,7-1-3");
    set.add(&Gtid::Mariadb { domain: 0, server: 1, sequence: 151 });
    assert_eq!((set.text(), set.position().text()), ("0-2-150,0-1-151,7-1-3".into(), "0-1-151,7-1-3".into()));
    set.union(&GtidSet::parse("0-1-100,0-3-152").unwrap());
    assert_eq!(set.text(), "0-1-151,0-2-150,0-3-152,7-1-3");
    set.subtract(&GtidSet::parse("0-1-151").unwrap());
    assert_eq!(set.text(), "0-2-150,0-3-152,7-1-3");
    set.subtract(&GtidSet::parse("0-3-152").unwrap());
    assert_eq!(set.text(), "7-1-3", "the position contains what other servers wrote before it");
}

#[test]
fn mariadb_position_contains_what_precedes_it_in_the_log() {
    for (set, gtid, before, expected) in [
        // An earlier primary wrote these transactions before the position.
        ("0-1-100", "0-2-40", "0-2-39", true),
        // The transaction follows the position, although its number is lower: another server wrote it.
        ("0-1-100", "0-2-50", "0-1-100", false),
        ("0-1-100", "0-2-50", "0-1-101", false),
        ("0-1-100,0-2-50", "0-2-51", "0-1-100,0-2-50", false),
        ("0-1-100,0-2-50", "0-1-99", "0-1-98,0-2-50", true),
        ("0-1-100,0-2-50", "0-3-7", "0-1-99", true),
        ("0-1-100,0-2-50", "0-3-7", "0-2-50", false),
        // The log of a server that was restored from a backup begins after the position.
        ("0-1-100", "0-2-101", "", false),
        ("0-1-100", "5-2-1", "0-1-3", false),
    ] {
        assert_eq!(contains_in_log(set, gtid, before).unwrap(), expected, "{set} {gtid} {before}");
    }
}

#[test]
fn mariadb_log_that_does_not_tell_the_place_of_a_position_is_an_error() {
    for (set, gtid, before) in [
        // The sequence number of a server goes backward or repeats.
        ("0-1-100", "0-1-50", "0-1-100"),
        ("0-1-100", "0-1-100", "0-1-100"),
        // Another server continued without the position's transaction.
        ("0-1-101", "0-2-101", "0-1-100"),
        ("0-1-101", "0-2-103", "0-1-100,0-2-102"),
    ] {
        let error = contains_in_log(set, gtid, before).unwrap_err();
        assert!(error.to_string().contains(gtid), "{error}");
    }
}

#[test]
fn mariadb_set_contains_a_log_only_up_to_its_position() {
    for (set, log, expected) in [
        ("0-1-100", "0-2-40,0-1-100", true),
        ("0-1-100", "0-2-40,0-1-80", true),
        ("0-1-100", "0-1-100,0-2-50", false),
        ("0-1-100", "0-1-101", false),
        ("0-1-100", "0-2-100", true),
        ("0-1-100,0-2-150", "0-3-7,0-1-100", true),
        ("0-1-100,0-2-150", "0-2-150,0-3-7", false),
        ("0-2-150", "0-1-100", true),
    ] {
        let contains = GtidSet::parse(set).unwrap().contains_set(&GtidSet::parse(log).unwrap());
        assert_eq!(contains, expected, "{set} {log}");
    }
}

#[test]
fn subtracting_a_set_splits_intervals() {
    let mut set = GtidSet::parse(&format!("{UUID}:1-10")).unwrap();
    set.subtract(&GtidSet::parse(&format!("{UUID}:3-4:7")).unwrap());
    assert_eq!(set.text(), format!("{UUID}:1-2:5-6:8-10"));
    assert!(GtidSet::parse(&format!("{UUID}:1-10")).unwrap().contains_set(&set));
}
