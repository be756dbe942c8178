//! Shared by the damage tests: valid batches, seeded random numbers, the memory use of the process, and settings.

#![allow(dead_code, reason = "each test file is a crate of its own, and uses some of these")]

use std::fs;

use arrow_array::Array;
use penstock_kernel::emit::Batch;

/// Returns the number of rows of a batch. Panics if a column is invalid, because the kernel builds text columns without
/// validating them.
pub fn valid_rows(batch: &Batch) -> usize {
    for column in batch.record.columns() {
        column.to_data().validate_full().unwrap();
    }
    batch.record.num_rows()
}

/// Random numbers from xorshift64*, so that a seed gives the same damage on every machine.
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Chance {
        let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        chance.next();
        chance
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Returns the peak memory of this process in KiB (proc(5)).
pub fn memory_kib_max() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Returns the number in an environment variable, or the default if it is not set.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}
