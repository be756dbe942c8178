# SPDX-License-Identifier: Apache-2.0
"""Full loads: a server's tables read in chunks, as the changes that the log would have held.

targets_of(address, patterns)            which tables, with columns and keys
plan_chunks(address, target)             a table cut by its own key
take_watermark(address)                  a place in the log; what is read next holds all before it
read_chunk(address, target, chunk, ...)  the rows, as `Changes`
open_exact(address, tables)              tables at one place of the log, for those without a key
"""
