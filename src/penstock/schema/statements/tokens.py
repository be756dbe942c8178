# SPDX-License-Identifier: Apache-2.0
"""The tokens of an SQL statement, split in the same way as by the server's own scanner.

Source: MySQL and MariaDB manuals, "Language Structure". Text in `/*! ... */` is included if the server
executed it, because it may declare a column.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from penstock.limits import STATEMENT_TOKENS_MAX

# The charset that MySQL, and MariaDB by default, mean by the name utf8.
UTF8MB3 = "utf8mb3"


class Kind(Enum):
    """The possible meanings of a token."""

    WORD = "word"
    """Letters and digits without quotes: a keyword, a name or a number."""
    NAME = "name"
    """In backticks: always a name."""
    STRING = "string"
    """In single quotes: always text."""
    DOUBLE = "double"
    """In double quotes: text, or a name if the sql_mode is unknown. Under ANSI_QUOTES it is a NAME."""
    MARK = "mark"
    """One punctuation character."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token. `text` excludes quotes and escapes. `upper` is set only for words and marks."""

    kind: Kind
    text: str
    upper: str = ""


@dataclass(frozen=True)
class ServerSpelling:
    """The server family, version and SQL mode, which determine a statement's meaning.

    `version` is (major, minor, patch), or () if unknown. If it is unknown, the content of every version
    comment is parsed. `utf8` is the charset that the name utf8 stands for. On MariaDB, it depends on
    `old_mode`, which the log does not contain.
    """

    mariadb: bool = False
    version: tuple[int, ...] = ()
    sql_mode: frozenset[str] = frozenset()
    utf8: str = UTF8MB3

    @classmethod
    def of_server(cls, version: str | None) -> "ServerSpelling":
        """Return the spelling for a server version as named in the log, such as 10.11.19-MariaDB-log."""
        numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
        return cls("MariaDB" in (version or ""), tuple(map(int, numbers.groups())) if numbers else ())

    def under(self, sql_mode: frozenset[str]) -> "ServerSpelling":
        """Return the spelling for a session with this SQL mode."""
        return self if sql_mode == self.sql_mode else replace(self, sql_mode=sql_mode)

    @property
    def quotes_names_twice(self) -> bool:
        """Whether double quotes enclose names."""
        return "ANSI_QUOTES" in self.sql_mode

    @property
    def escapes(self) -> bool:
        """Whether a backslash in a string escapes the next character."""
        return "NO_BACKSLASH_ESCAPES" not in self.sql_mode

    @property
    def shows_display_width(self) -> bool:
        """Whether COLUMN_TYPE of an integer has a display width. MySQL dropped it in 8.0.19."""
        return self.mariadb or (bool(self.version) and self.version < (8, 0, 19))

    def takes(self, comment: str, number: str) -> bool:
        """Return whether the server executes the text of `/*!NUMBER` or `/*M!NUMBER`.

        MariaDB skips MySQL's versions 5.7 to 9.x.
        """
        if comment.startswith("/*M") and not self.mariadb:
            return False
        if not number:
            return True
        required = int(number)
        if self.mariadb and not comment.startswith("/*M") and 50700 <= required <= 99999:
            return False
        if not self.version:
            return True
        major, minor, patch = (*self.version, 0, 0, 0)[:3]
        return required <= major * 10000 + minor * 100 + patch


class TextUnreadable(Exception):
    """A quote or comment is open at the end of the text, or the text is too long for a definition."""


_SKIPPED = re.compile(r"\s+|#[^\n]*|--(?=[\s\x00-\x1f]|\Z)[^\n]*|/\*(?!M?!).*?\*/", re.DOTALL)
_VERSIONED = re.compile(r"/\*M?!(\d{5,6})?")
_WORD = re.compile(r"[0-9A-Za-z_$\u0080-\U0010ffff]+")
_QUOTED = {
    "'": re.compile(r"'((?:[^'\\]++|''|\\.)*+)'", re.DOTALL),
    '"': re.compile(r'"((?:[^"\\]++|""|\\.)*+)"', re.DOTALL),
}
# Strings in which a backslash is an ordinary character.
_PLAIN_QUOTED = {
    "'": re.compile(r"'((?:[^']++|'')*+)'"),
    '"': re.compile(r'"((?:[^"]++|"")*+)"'),
    "`": re.compile(r"`((?:[^`]++|``)*+)`"),
}


def _literals(string: str) -> re.Pattern[str]:
    """Return a pattern for lists of literals in parentheses, as in INSERT. `string` matches one string."""
    literal = (
        rf"(?:(?:[bnx]|_\w++)?{string}"
        r"|[-+]?\d++(?:\.\d*+)?+(?:e[-+]?\d++)?+|0x[0-9a-f]++|null|default)"
    )
    return re.compile(
        rf"(?:\s*+\(\s*+{literal}\s*+(?:,\s*+{literal}\s*+)*+\)\s*+,?+)++", re.DOTALL | re.IGNORECASE
    )


_LITERALS = _literals(_QUOTED["'"].pattern.replace("((?:", "(?:(?:"))
_PLAIN_LITERALS = _literals(_PLAIN_QUOTED["'"].pattern.replace("((?:", "(?:(?:"))
_KINDS = {"'": Kind.STRING, '"': Kind.DOUBLE, "`": Kind.NAME}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "Z": "\x1a", "%": "\\%", "_": "\\_"}


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text, so that a table of keywords can be written as one string."""
    return frozenset(text.split())


def tokens_of(text: str, spelling: ServerSpelling) -> list[Token]:
    """Return the tokens of a text, without comments. Raises TextUnreadable."""
    return list(read_tokens(text, spelling))


def read_tokens(text: str, spelling: ServerSpelling, *, without_literals: bool = False) -> Iterator[Token]:
    """Yield the tokens of a text lazily, without comments. Raises TextUnreadable.

    Most of the text of a routine or view is never read, so it costs neither time nor memory.
    `without_literals` omits most lists of literals, which makes a long INSERT about 25 times as fast.
    """
    literals_of = _LITERALS if spelling.escapes else _PLAIN_LITERALS
    end, inside_versioned = 0, 0
    while end < len(text):
        if skipped := _SKIPPED.match(text, end):
            end = skipped.end()
        elif versioned := _VERSIONED.match(text, end):
            end = versioned.end()
            if spelling.takes(versioned.group(), versioned.group(1) or ""):
                inside_versioned += 1
            else:
                close = text.find("*/", end)
                if close < 0:
                    raise TextUnreadable(text)
                end = close + 2
        elif inside_versioned and text.startswith("*/", end):
            inside_versioned -= 1
            end += 2
        else:
            token, end = _token_at(text, end, spelling)
            yield token
            if without_literals and token.upper == "," and (literals := literals_of.match(text, end)):
                end = literals.end()
    if inside_versioned:
        raise TextUnreadable(text)


def tokens_in_place(text: str) -> Iterator[tuple[Token, int, int]]:
    """Yield each token with its start and end in the text, in characters. Raises TextUnreadable.

    The text inside version comments is included, no matter which server the comments are for.
    """
    spelling, end = ServerSpelling(), 0
    while end < len(text):
        if skipped := _SKIPPED.match(text, end) or _VERSIONED.match(text, end):
            end = skipped.end()
        elif text.startswith("*/", end):
            end += 2
        else:
            start = end
            token, end = _token_at(text, start, spelling)
            yield token, start, end


def _token_at(text: str, start: int, spelling: ServerSpelling) -> tuple[Token, int]:
    if word := _WORD.match(text, start):
        return Token(Kind.WORD, word.group(), word.group().upper()), word.end()
    quote = text[start]
    if quote in _KINDS:
        kind = _KINDS[quote]
        if kind is Kind.DOUBLE and spelling.quotes_names_twice:
            kind = Kind.NAME
        escapes = kind is not Kind.NAME and spelling.escapes
        quoted = (_QUOTED if escapes else _PLAIN_QUOTED)[quote].match(text, start)
        if quoted is None:
            raise TextUnreadable(text)
        inner = quoted.group(1).replace(quote * 2, quote)
        return Token(kind, _unescaped(inner) if escapes else inner), quoted.end()
    if text.startswith("/*", start):
        raise TextUnreadable(text)
    return Token(Kind.MARK, quote, quote), start + 1


def _unescaped(inner: str) -> str:
    if "\\" not in inner:
        return inner
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match.group(1), match.group(1)), inner)


class TokenCursor:
    """Reads tokens from left to right, and keeps the tokens that it has read. After the last token, it
    returns an empty mark.

    Raises TextUnreadable as `read_tokens` does, and also after STATEMENT_TOKENS_MAX tokens.
    """

    _END = Token(Kind.MARK, "")

    def __init__(self, tokens: Iterable[Token]) -> None:
        self._tokens: list[Token] = []
        self._unread = iter(tokens)
        self._at = 0

    @property
    def ended(self) -> bool:
        """Whether every token has been read, not counting a final semicolon."""
        return not self._read_to(self._at) or self.next.upper == ";"

    @property
    def taken(self) -> int:
        """The number of tokens consumed."""
        return self._at

    @property
    def next(self) -> Token:
        """The next token, without consuming it."""
        return self.ahead(0)

    def ahead(self, steps: int) -> Token:
        """The token this many steps ahead, without consuming it."""
        at = self._at + steps
        return self._tokens[at] if self._read_to(at) else self._END

    def _read_to(self, at: int) -> bool:
        """Read up to the token at an index; return whether it exists."""
        while len(self._tokens) <= at:
            token = next(self._unread, None)
            if token is None:
                return False
            if len(self._tokens) == STATEMENT_TOKENS_MAX:
                raise TextUnreadable(f"more than {STATEMENT_TOKENS_MAX} tokens")
            self._tokens.append(token)
        return True

    def take(self) -> Token:
        """Consume and return the next token."""
        token = self.next
        self._at += 1
        return token

    def accept(self, *words: str) -> bool:
        """Consume these keywords or marks if all of them come next, in this order."""
        if all(self.ahead(step).upper == word for step, word in enumerate(words)):
            self._at += len(words)
            return True
        return False

    def accept_any(self, *words: str) -> bool:
        """Consume the first of these keywords or marks that comes next."""
        return any(self.accept(word) for word in words)

    def has(self, *words: str) -> bool:
        """Return whether these keywords occur anywhere ahead, in this order."""
        self._read_to(STATEMENT_TOKENS_MAX)
        upper = [token.upper for token in self._tokens[self._at :]]
        return any(upper[at : at + len(words)] == list(words) for at in range(len(upper)))

    def within_parentheses(self) -> "TokenCursor | None":
        """Consume a parenthesis and return a cursor over its content; None if no parenthesis opens here."""
        if self.next.upper != "(":
            return None
        start, depth = self._at + 1, 0
        while self._read_to(self._at):
            depth += {"(": 1, ")": -1}.get(self.take().upper, 0)
            if depth == 0:
                return TokenCursor(self._tokens[start : self._at - 1])
        return None

    def before(self, *phrases: tuple[str, ...]) -> "TokenCursor":
        """Return a cursor over the tokens up to the first of these phrases outside parentheses, or to the
        end."""
        start = end = self._at
        depth = 0
        while not self.ended and (depth or not any(self.accept(*phrase) for phrase in phrases)):
            depth += {"(": 1, ")": -1}.get(self.take().upper, 0)
            end = self._at
        return TokenCursor(self._tokens[start:end])

    def parts(self) -> list["TokenCursor"]:
        """Consume the remaining tokens, split at commas outside parentheses."""
        parts: list[list[Token]] = [[]]
        depth = 0
        while not self.ended:
            token = self.take()
            depth += {"(": 1, ")": -1}.get(token.upper, 0)
            if token.upper == "," and depth == 0:
                parts.append([])
            else:
                parts[-1].append(token)
        return [TokenCursor(part) for part in parts if part]
