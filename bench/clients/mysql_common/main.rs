//! Reads every row of a binlog file with mysql_common: `drain FILE` prints "inserts updates deletes columns".
// SPDX-License-Identifier: Apache-2.0

use std::env::args;
use std::fs::File;
use std::io::BufReader;

use mysql_common::binlog::consts::BinlogVersion;
use mysql_common::binlog::events::{EventData, RowsEventData};
use mysql_common::binlog::row::BinlogRow;
use mysql_common::binlog::BinlogFile;

fn main() -> std::io::Result<()> {
    let path = args().nth(1).expect("drain FILE");
    let mut file = BinlogFile::new(BinlogVersion::Version4, BufReader::with_capacity(1 << 20, File::open(path)?))?;
    let (mut inserts, mut updates, mut deletes, mut columns) = (0_u64, 0_u64, 0_u64, 0_usize);
    while let Some(event) = file.next() {
        let event = event?;
        let Some(EventData::RowsEvent(rows)) = event.read_data()? else { continue };
        let table = file.reader().get_tme(rows.table_id()).expect("a table map comes before its rows");
        if table.database_name() != "bench" {
            continue;
        }
        let mut count = 0;
        for images in rows.rows(table) {
            let (before, after) = images?;
            columns += before.as_ref().map_or(0, BinlogRow::len) + after.as_ref().map_or(0, BinlogRow::len);
            count += 1;
        }
        match rows {
            RowsEventData::WriteRowsEvent(_) | RowsEventData::WriteRowsEventV1(_) => inserts += count,
            RowsEventData::UpdateRowsEvent(_) | RowsEventData::UpdateRowsEventV1(_) => updates += count,
            RowsEventData::DeleteRowsEvent(_) | RowsEventData::DeleteRowsEventV1(_) => deletes += count,
            RowsEventData::PartialUpdateRowsEvent(_) => updates += count,
        }
    }
    println!("{inserts} {updates} {deletes} {columns}");
    Ok(())
}
