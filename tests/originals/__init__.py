# SPDX-License-Identifier: Apache-2.0
"""Run Debezium and Canal themselves beside Penstock, on one server and one file of statements.

statements.sql      the statements that every system gets
differences.toml    what may differ, and where docs/formats/messages.md names it
running.py          runs the statements, and returns what each system wrote
comparing.py        pairs the events, and finds every field that differs
"""
