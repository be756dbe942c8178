//! Tests that the texts of the system columns are valid and belong to their rows.

use super::*;
use crate::gtid::Gtid;

fn transaction(number: u32) -> TransactionView {
    let gtid = match number % 3 {
        0 => Gtid::Anonymous,
        _ => Gtid::Mariadb { domain: 0, server: 1, sequence: number.into() },
    };
    TransactionView {
        file: format!("binlog.{:06}", number / 5).into(),
        start: 4,
        commit_version: number.into(),
        commit_us: 0,
        gtid,
        thread_id: None,
        clock: None,
    }
}

/// Returns the longest name of a table that MySQL allows, of several bytes per character.
fn name(number: usize) -> String {
    format!("{}{number}", "漢".repeat(63))
}

/// Adds rows of ten transactions in ten tables.
fn add(columns: &mut SystemColumns, rows: u32) {
    let images = [Images::Each(Change::Insert), Images::Pairs, Images::Before];
    for number in 0..10 {
        let table = TableRef { database: "größe".into(), table: name(number as usize).into(), schema_version: 1 };
        let images = images.into_iter().cycle().nth(number as usize).unwrap();
        columns.begin_run(&transaction(number), &table, EventView::default(), images, 0, [0, 0]);
        (0..rows).for_each(|_| columns.add_row());
    }
}

#[test]
fn texts_are_valid_in_new_and_in_reused_memory() {
    let mut columns = SystemColumns::new("größe".into());
    let mut read = Vec::new();
    // The names of 120 rows take more than 16 KiB, so the pool lends their memory.
    for (rows, cut) in [(12, 120), (12, 120), (1, 7), (12, 119), (0, 0)] {
        add(&mut columns, rows);
        let built = columns.finish(&ALL, cut);
        for (_, array) in built.iter().chain(&read) {
            array.to_data().validate_full().unwrap();
        }
        assert!(built.iter().all(|(_, array)| array.len() == cut));
        // The previous batch is still read while the next one is built.
        read = built;
    }
}

#[test]
fn texts_belong_to_their_rows() {
    let mut columns = SystemColumns::new("shop".into());
    add(&mut columns, 2);
    let built = columns.finish(&ALL, 20);
    let text = |array: &ArrayRef, row: usize| {
        let texts = array.as_any().downcast_ref::<StringArray>().unwrap();
        texts.is_valid(row).then(|| texts.value(row).to_owned())
    };
    let (_, kinds) = built.first().unwrap();
    let kinds: Vec<_> = (0..6).filter_map(|row| text(kinds, row)).collect();
    let expected = ["insert", "insert", "update_preimage", "update_postimage", "update_preimage", "update_preimage"];
    assert_eq!(kinds, expected);
    let (_, metadata) = built.last().unwrap();
    let metadata = metadata.as_any().downcast_ref::<StructArray>().unwrap();
    let column = |name: &str, row: usize| text(metadata.column_by_name(name).unwrap(), row);
    for number in 0..10_usize {
        assert_eq!(column("table", 2 * number), Some(name(number)));
        assert_eq!(column("file", 2 * number + 1), Some(format!("binlog.{:06}", number / 5)));
        let gtid = (number % 3 != 0).then(|| format!("0-1-{number}"));
        assert_eq!(column("gtid", 2 * number), gtid);
    }
}
