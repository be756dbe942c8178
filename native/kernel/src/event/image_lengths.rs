//! Counts the changes in a rows event by skipping over its images, according to a plan that is built once for each
//! table.
//!
//! Nearly every image contains all columns. Consecutive columns of fixed length are then skipped in a single step,
//! whose length is reduced by the columns that are NULL. Images of wide tables, and images without some columns, are
//! skipped value by value: `rows::skip_image`.

use crate::column::{Kind, Width};
use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::event::rows::{count, skip_image, RowsHead};
use crate::event::{Change, EventKind};

/// Maximum number of columns for a plan, because the NULL bits of an image must fit into an integer.
const COLUMNS_MAX: usize = u64::BITS as usize;

/// Finds the end of a table's row images.
#[derive(Debug, Clone)]
pub struct ImageLengths {
    kinds: Vec<Kind>,
    json_columns: usize,
    /// The width in bytes of each column of fixed length; 0 for other columns.
    widths: Vec<usize>,
    /// The plan for images with all columns; None if the table has too many columns for a plan.
    runs: Option<Vec<Run>>,
}

/// A run of fixed-length columns, and the column after the run, which has a length prefix.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    /// The NULL bits of the fixed columns.
    fixed: u64,
    /// Total width in bytes of the fixed columns if none is NULL.
    bytes: usize,
    /// The NULL bit of the column with a prefix; 0 if the run ends the image.
    prefixed: u64,
    /// Size of the length prefix in bytes.
    prefix: u8,
}

impl ImageLengths {
    /// Plans how to skip the images of a table with these columns.
    pub fn new(kinds: Vec<Kind>) -> ImageLengths {
        let json_columns = kinds.iter().filter(|kind| matches!(kind, Kind::Json { .. })).count();
        let fixed = |kind: &Kind| match kind.width() {
            Width::Bytes(bytes) => bytes,
            Width::Prefix(_) => 0,
        };
        let widths = kinds.iter().map(fixed).collect();
        let runs = (kinds.len() <= COLUMNS_MAX).then(|| runs_of(&kinds));
        ImageLengths { kinds, json_columns, widths, runs }
    }

    /// Counts the changes of an event. An update has two images; other changes have one. `images` are the images of
    /// `head` after decompression.
    pub fn count_changes(&self, head: &RowsHead<'_>, images: &[u8], kind: EventKind) -> Result<u32> {
        let is_update = kind.change() == Some(Change::Update);
        let partial_json = (kind == EventKind::PartialUpdateRows).then_some(self.json_columns);
        let whole = |present| count(present, self.kinds.len()) == self.kinds.len();
        let runs = self
            .runs
            .as_deref()
            .filter(|_| partial_json.is_none() && whole(head.present) && (!is_update || whole(head.present_after)));
        let images_of_change = if is_update { 2 } else { 1 };
        match runs {
            Some(runs) => count_steps(images, |cursor| {
                (0..images_of_change).try_for_each(|_| self.skip_whole_image(cursor, runs))
            }),
            None => count_steps(images, |cursor| {
                skip_image(cursor, &self.kinds, head.present, None)?;
                if is_update {
                    skip_image(cursor, &self.kinds, head.present_after, partial_json)?;
                }
                Ok(())
            }),
        }
    }

    #[inline]
    fn skip_whole_image(&self, cursor: &mut Cursor<'_>, runs: &[Run]) -> Result<()> {
        let nulls = cursor.uint(self.kinds.len().div_ceil(8))?;
        for run in runs {
            let mut bytes = run.bytes;
            let mut fixed_nulls = nulls & run.fixed;
            while fixed_nulls != 0 {
                bytes -= self.widths.get(fixed_nulls.trailing_zeros() as usize).copied().unwrap_or_default();
                fixed_nulls &= fixed_nulls - 1;
            }
            cursor.skip(bytes)?;
            if run.prefixed & !nulls != 0 {
                cursor.prefixed(run.prefix)?;
            }
        }
        Ok(())
    }
}

fn runs_of(kinds: &[Kind]) -> Vec<Run> {
    let mut runs = Vec::new();
    let mut run = Run::default();
    for (index, kind) in kinds.iter().enumerate() {
        match kind.width() {
            Width::Bytes(bytes) => {
                run.fixed |= 1 << index;
                run.bytes += bytes;
            }
            Width::Prefix(prefix) => {
                runs.push(Run { prefixed: 1 << index, prefix, ..run });
                run = Run::default();
            }
        }
    }
    if run.fixed != 0 {
        runs.push(run);
    }
    runs
}

/// Counts how many times `skip` moves the cursor until no bytes are left.
#[inline]
fn count_steps(images: &[u8], mut skip: impl FnMut(&mut Cursor<'_>) -> Result<()>) -> Result<u32> {
    let mut cursor = Cursor::new(images);
    let mut changes = 0u32;
    while !cursor.is_empty() {
        let before = cursor.remaining();
        skip(&mut cursor)?;
        if cursor.remaining() == before {
            return Err(malformed("row images without bytes"));
        }
        changes = changes.saturating_add(1);
    }
    Ok(changes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the high bits of a linear congruential generator.
    struct Chance(u64);

    impl Chance {
        fn below(&mut self, end: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % end
        }
    }

    fn kind(chance: &mut Chance) -> Kind {
        match chance.below(7) {
            0 => Kind::Integer { bytes: [1, 2, 3, 4, 8][chance.below(5)], unsigned: false },
            1 => Kind::Null,
            2 => Kind::Decimal { precision: 18, scale: 4 },
            3 => Kind::Bit { bits: 1 + chance.below(64) as u8 },
            4 => Kind::Date,
            5 => Kind::Json { prefix: 4 },
            _ => Kind::Geometry { prefix: 1 + chance.below(4) as u8 },
        }
    }

    fn image(kinds: &[Kind], chance: &mut Chance) -> Vec<u8> {
        let mut nulls: Vec<u8> = (0..kinds.len().div_ceil(8)).map(|_| chance.below(256) as u8).collect();
        if chance.below(2) == 0 {
            nulls.fill(0);
        }
        let mut image = nulls.clone();
        for (index, kind) in kinds.iter().enumerate() {
            if nulls[index / 8] >> (index % 8) & 1 == 1 {
                continue;
            }
            let bytes = match kind.width() {
                Width::Bytes(bytes) => bytes,
                Width::Prefix(prefix) => {
                    let bytes = chance.below(20);
                    image.extend_from_slice(&(bytes as u32).to_le_bytes()[..usize::from(prefix)]);
                    bytes
                }
            };
            image.extend((0..bytes).map(|_| chance.below(256) as u8));
        }
        image
    }

    #[test]
    fn planned_counts_equal_counts_value_by_value() {
        let mut chance = Chance(7);
        let (mut counted, mut refused) = (0, 0);
        for _ in 0..5_000 {
            let kinds: Vec<Kind> = (0..chance.below(70)).map(|_| kind(&mut chance)).collect();
            let event = [EventKind::WriteRows, EventKind::UpdateRows, EventKind::DeleteRows][chance.below(3)];
            let mut images = Vec::new();
            for _ in 0..chance.below(6) * if event == EventKind::UpdateRows { 2 } else { 1 } {
                images.extend(image(&kinds, &mut chance));
            }
            if chance.below(4) == 0 {
                images.truncate(chance.below(images.len() + 1));
            }
            let mut present = vec![0xff; kinds.len().div_ceil(8)];
            if chance.below(8) == 0 {
                present.iter_mut().for_each(|bits| *bits = chance.below(256) as u8);
            }
            let head = RowsHead {
                table_id: 1,
                width: kinds.len(),
                present: &present,
                present_after: &present,
                images: &images,
            };
            let planned = ImageLengths::new(kinds);
            let plain = ImageLengths { runs: None, ..planned.clone() };
            let outcome = planned.count_changes(&head, &images, event);
            assert_eq!(outcome.as_ref().ok(), plain.count_changes(&head, &images, event).as_ref().ok());
            counted += usize::from(outcome.as_ref().is_ok_and(|changes| *changes > 0));
            refused += usize::from(outcome.is_err());
        }
        assert!(counted > 1_000 && refused > 200, "{counted} counted, {refused} refused");
    }
}
