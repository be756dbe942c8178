# SPDX-License-Identifier: Apache-2.0
"""Full loads: a server's tables read in chunks, as the changes that the log would have held.

targets_of(address, patterns)            which tables, with columns and keys
plan_chunks(address, target)             a table cut into ranges of its key
take_watermark(address)                  a log position; later reads contain every change before it
read_chunk(address, target, chunk, ...)  the rows, as `Changes`
open_exact(address, tables)              tables at one log position, for those without a key
"""
