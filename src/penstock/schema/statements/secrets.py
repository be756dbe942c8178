# SPDX-License-Identifier: Apache-2.0
"""Hides the passwords in statements that are shown to users.

Logged account statements contain password hashes in MySQL, and sometimes the passwords themselves in MariaDB.
Statements for tables on other servers (FEDERATED, SPIDER and CONNECT) may contain the password of the
connection. Passwords are not removed from the log itself, or from the statements that sinks receive.
"""

import re

from penstock.schema.statements.tokens import Kind, TextUnreadable, Token, tokens_in_place, words_of

HIDDEN = "'***'"
_UNREADABLE = "(a statement that may hold a password, and cannot be read)"

_MAY_HOLD_SECRET = re.compile(r"identified|passw|connection", re.IGNORECASE)
_LITERALS = (Kind.STRING, Kind.DOUBLE)
# Statements whose options may be passwords: CREATE USER, SET PASSWORD, CREATE SERVER, CHANGE MASTER.
_VERBS = words_of("CREATE ALTER SET CHANGE")
_OBJECTS = words_of("USER PASSWORD SERVER MASTER REPLICATION")
# Options of tables that may name a password among other values: SPIDER's comments, CONNECT's list.
_TEXT_OPTIONS = words_of("COMMENT OPTION_LIST")
_NAMED_PASSWORD = re.compile(r"passw(or)?d[\s=:\"']", re.IGNORECASE)
# CREATE OR REPLACE SERVER
_OPENING_TOKENS = 4
_REPLACING = words_of("OR REPLACE")
_PASSWORD_FUNCTIONS = words_of("PASSWORD OLD_PASSWORD")


def without_secrets(text: str) -> str:
    """Return a statement with `'***'` in place of each password, password hash, and connection string.

    In statements about accounts, servers and replication, it replaces every literal after IDENTIFIED and
    after an option whose value is a password, except the parts of account names. It hides too much rather
    than too little.
    """
    if not _MAY_HOLD_SECRET.search(text):
        return text
    try:
        tokens = list(tokens_in_place(text))
    except TextUnreadable:
        return _UNREADABLE
    pieces, end = [], 0
    for start, stop in _secrets([token for token, _, _ in tokens], [span for _, *span in tokens]):
        pieces += [text[end:start], HIDDEN]
        end = stop
    return "".join([*pieces, text[end:]])


def _secrets(tokens: list[Token], spans: list[list[int]]) -> list[list[int]]:
    opening = [token.upper for token in tokens[:_OPENING_TOKENS] if token.upper not in _REPLACING]
    has_passwords = len(opening) > 1 and opening[0] in _VERBS and opening[1] in _OBJECTS
    of_table = opening[:1] in (["CREATE"], ["ALTER"])
    after_password, secrets = False, []
    for index, token in enumerate(tokens):
        before = [other.upper for other in tokens[max(index - 2, 0) : index]]
        if token.kind is Kind.WORD and (
            token.upper == "IDENTIFIED" or (has_passwords and "PASSWORD" in token.upper)
        ):
            after_password = True
        elif token.kind in _LITERALS or token.upper.startswith("0X"):
            following = tokens[index + 1].upper if index + 1 < len(tokens) else ""
            is_name = "@" in (following, *before[-1:])
            is_argument = before[-1:] == ["("] and before[0] in _PASSWORD_FUNCTIONS
            option = before[0] if before[1:] == ["="] else "".join(before[-1:])
            is_option = (
                option == "CONNECTION"
                or (of_table and "PASSWORD" in option)
                or (option in _TEXT_OPTIONS and _NAMED_PASSWORD.search(token.text) is not None)
            )
            if (after_password and not is_name) or is_argument or is_option:
                secrets.append(spans[index])
    return secrets
