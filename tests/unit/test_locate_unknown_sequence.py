# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import numpy as np

from tests.unit.test_locate import BASE, BLOCKS, SOURCE, block_array, transactions_before, with_blocks


def test_block_without_the_start_of_its_sequence_proves_nothing(tmp_path: Path) -> None:
    """A replica may commit 8, 9, 5, 6, 7. A search that skips to 7 would lose the transactions before it."""
    records = block_array(2)
    half = BLOCKS // 2
    records["gtid_number"] = np.roll(records["gtid_number"], half)
    records["sequence_start"][half:] = 0
    log = with_blocks(tmp_path, records)
    consumed = f"{SOURCE}:1-{transactions_before(2, 100)}"
    assert log.locator().gtid_set(consumed).position.offset == BASE
