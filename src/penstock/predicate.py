# SPDX-License-Identifier: Apache-2.0
"""A WHERE condition over a row's columns, compiled once and evaluated on whole Arrow batches.

    Predicate.compile("status = 'paid' AND price >= 19.99").passes(batch)

Subscribers' `where` and the step `filter` share it, so that a condition selects the same rows in both.

Supported: AND, OR, XOR, NOT, comparisons, <=>, BETWEEN, IN (...), LIKE, IS [NOT] NULL, TRUE and FALSE, LOWER
and UPPER, and constants of every kind. NULL behaves as in MySQL: a result that is neither true nor false does
not pass. Text is compared exactly, regardless of the column's collation. A time without a zone is UTC. A
value that its Arrow type cannot represent, such as a zero date, is NULL.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, NoReturn

import numpy
import pyarrow
import pyarrow.compute as compute

from penstock.durations import duration_of
from penstock.errors import OptionInvalid

Part = Any

_HINT = (
    "Known are AND, OR, NOT, =, <>, <, <=, >, >=, <=>, BETWEEN, IN (...), LIKE, IS NULL, LOWER and UPPER over"
    " columns and constants"
)
_METADATA = "_metadata"
_DIGITS_MAX = 76
# No column has numbers with more digits, and arithmetic on much longer numbers would block other clients.
_CONSTANT_DIGITS_MAX = 400
_MOMENTS = {"TIMESTAMP", "DATETIME", "TIME"}
_DAY = re.compile(r"\s*\d{4}-\d{2}-\d{2}\s*")

_Constant = bool | int | float | Decimal | str | bytes | date | datetime | None
_Condition = Callable[[pyarrow.RecordBatch], Any]

_OPERATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "EQ": (compute.equal, "="),
    "NEQ": (compute.not_equal, "<>"),
    "LT": (compute.less, "<"),
    "LTE": (compute.less_equal, "<="),
    "GT": (compute.greater, ">"),
    "GTE": (compute.greater_equal, ">="),
}
_CONDITIONS = {*_OPERATORS, "And", "Or", "Xor", "Not", "NullSafeEQ", "Is", "Between", "In", "Like", "Escape"}
# The arguments of a node that the compiler knows. A column's node also has the qualifiers before the column
# name.
_ARGUMENTS = {"this", "expression", "expressions", "low", "high", "negate", "table", "db", "catalog"}
_TURNED = {"EQ": "EQ", "NEQ": "NEQ", "LT": "GT", "LTE": "GTE", "GT": "LT", "GTE": "LTE"}


@dataclass(frozen=True)
class _Column:
    """A column of the row, or a field of `_metadata`, optionally converted to lower or upper case."""

    name: str
    field: str | None = None
    change: Callable[..., Any] | None = None

    def of(self, batch: pyarrow.RecordBatch) -> pyarrow.Array:
        """Return the column's values. Raises OptionInvalid if the table has no such column."""
        values = batch.column(_spelled(self.name, batch.schema.names))
        if self.field is not None:
            values = compute.struct_field(values, self.field)
        return values if self.change is None else self.change(values)

    def __str__(self) -> str:
        return self.name if self.field is None else f"{self.name}.{self.field}"


def _spelled(name: str, names: Sequence[str]) -> str:
    """Return a column's name as the table spells it: MySQL's column names are case-insensitive."""
    if name in names:
        return name
    folded_names = {known.casefold(): known for known in names}
    if name.casefold() in folded_names:
        return folded_names[name.casefold()]
    near = difflib.get_close_matches(name.casefold(), list(folded_names), n=1)
    shown = ", ".join(known for known in names if not known.startswith("_"))
    raise OptionInvalid(
        f"where: there is no column {name!r}",
        hint=f"Did you mean {folded_names[near[0]]}?" if near else f"The columns are {shown}",
    )


class Predicate:
    """A compiled condition. `columns` are the names of the columns that the condition reads, as written. Can
    be pickled.
    """

    def __init__(self, text: str, condition: _Condition, columns: frozenset[str]) -> None:
        self.text = text
        self.columns = columns
        self._condition = condition

    def __reduce__(self) -> tuple[Callable[[str], "Predicate"], tuple[str]]:
        return Predicate.compile, (self.text,)

    @classmethod
    def compile(cls, text: str) -> "Predicate":
        """Compile a condition. Raises OptionInvalid, which names the part that is not supported."""
        compiler = _Compiler()
        try:
            condition = compiler.condition(_parse(text))
        except RecursionError as problem:
            raise OptionInvalid("where: the condition is nested too deep", hint=_HINT) from problem
        return cls(text, condition, frozenset(compiler.columns))

    def check(self, schema: pyarrow.Schema) -> None:
        """Raise OptionInvalid if a column is missing, or its type does not support the comparison."""
        self.passes(pyarrow.RecordBatch.from_pylist([], schema=schema))

    def reads(self, schema: pyarrow.Schema) -> frozenset[str]:
        """Return the table columns that the condition reads, as the table spells them. Raises
        OptionInvalid.
        """
        return frozenset(_spelled(name, schema.names) for name in self.columns)

    def passes(self, batch: pyarrow.RecordBatch) -> numpy.ndarray:
        """Return a boolean mask of the rows that pass.

        Raises OptionInvalid if a column is missing, or its type does not support the comparison.
        """
        try:
            outcome = self._condition(batch)
        except pyarrow.ArrowException as problem:
            raise OptionInvalid(f"where: {problem}", hint=_HINT) from problem
        if isinstance(outcome, pyarrow.Scalar):
            return numpy.full(batch.num_rows, outcome.as_py() is True)
        mask: numpy.ndarray = compute.fill_null(outcome, False).to_numpy(zero_copy_only=False)
        return mask

    def __repr__(self) -> str:
        return f"Predicate({self.text!r})"


def _parse(text: str) -> Part:
    # Imported here because importing sqlglot takes longer than decoding a small file, and few subscribers
    # need it.
    import sqlglot
    from sqlglot.errors import SqlglotError

    try:
        # MySQL reads || as OR, unless sql_mode has PIPES_AS_CONCAT; Spark reads || as a concatenation.
        if any(token.token_type.name == "DPIPE" for token in sqlglot.tokenize(text, read="mysql")):
            raise OptionInvalid(f"where: || in {text!r} may mean OR or a concatenation", hint="Write OR")
        statements = sqlglot.parse(text, read="mysql")
    except SqlglotError as problem:
        raise OptionInvalid(f"where: {text!r} is no condition: {_plain(problem)}", hint=_HINT) from problem
    if len(statements) != 1 or statements[0] is None:
        raise OptionInvalid(f"where: {text!r} is not one condition", hint=_HINT)
    return statements[0]


def _plain(problem: Exception) -> str:
    """Return an error's first line without terminal escape sequences."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(problem)).splitlines()[0]


def _refuse(part: Part, why: str = "") -> NoReturn:
    raise OptionInvalid(f"where: {part.sql(dialect='mysql')!r} is not understood{why}", hint=_HINT)


class _Compiler:
    """Converts a parsed condition to a function, and records the columns that it reads."""

    def __init__(self) -> None:
        self.columns: set[str] = set()

    def condition(self, part: Part) -> _Condition:
        """Return a function that evaluates a part to true, false or null for each row."""
        kind = type(part).__name__
        if unknown := {name for name, value in part.args.items() if value} - _ARGUMENTS:
            # Refuse unknown modifiers. Otherwise a modifier that a later version of the parser adds would be
            # ignored.
            _refuse(part, f" ({', '.join(sorted(unknown))})")
        match kind:
            case "Paren":
                return self.condition(part.this)
            case "And" | "Or" | "Xor":
                left, right = self.condition(part.this), self.condition(part.expression)
                join = {"And": compute.and_kleene, "Or": compute.or_kleene, "Xor": compute.xor}[kind]
                return lambda batch: join(left(batch), right(batch))
            case "Not":
                inner = self.condition(part.this)
                return lambda batch: compute.invert(inner(batch))
            case "Boolean" | "Null":
                constant = pyarrow.scalar(self._constant(part), pyarrow.bool_())
                return lambda batch: constant
            case "NullSafeEQ":
                return self._null_safe(part)
            case "Is":
                return self._is(part)
            case "Between":
                return self._between(part)
            case "In":
                return self._in(part)
            case "Like":
                return self._like(part, "\\")
            case "Escape" if type(part.this).__name__ == "Like":
                return self._like(part.this, str(self._constant(part.expression)))
            case "Column" | "Dot":
                column = self._column(part)
                return lambda batch: _compare("NEQ", column, column.of(batch), 0)
        if kind in _OPERATORS:
            return self._comparison(kind, part)
        _refuse(part)

    def _comparison(self, kind: str, part: Part) -> _Condition:
        left, right = self._operand(part.this), self._operand(part.expression)
        if isinstance(left, _Column):
            if isinstance(right, _Column):
                return partial(_compare_columns, kind, left, right)
            return partial(_compare_constant, kind, left, right)
        if isinstance(right, _Column):
            return partial(_compare_constant, _TURNED[kind], right, left)
        _refuse(part)

    def _null_safe(self, part: Part) -> _Condition:
        equal = self._comparison("EQ", part)
        nulls = [self._null_of(side) for side in (part.this, part.expression)]

        def condition(batch: pyarrow.RecordBatch) -> Any:
            both = compute.and_(*(null(batch) for null in nulls))
            return compute.or_(both, compute.fill_null(equal(batch), False))

        return condition

    def _null_of(self, part: Part) -> _Condition:
        inner = part
        while type(inner).__name__ == "Paren":
            inner = inner.this
        if type(inner).__name__ in _CONDITIONS:
            condition = self.condition(inner)
            return lambda batch: compute.is_null(condition(batch))
        operand = self._operand(inner)
        if isinstance(operand, _Column):
            return lambda batch: compute.is_null(operand.of(batch))
        return lambda batch: pyarrow.scalar(operand is None)

    def _is(self, part: Part) -> _Condition:
        expected = self._constant(part.expression)
        if expected is None:
            return self._null_of(part.this)
        if not isinstance(expected, bool):
            _refuse(part)
        inner = self.condition(part.this)
        return lambda batch: compute.equal(compute.fill_null(inner(batch), not expected), expected)

    def _between(self, part: Part) -> _Condition:
        column = self._column(part.this)
        low, high = self._constant(part.args["low"]), self._constant(part.args["high"])
        return lambda batch: compute.and_kleene(
            _compare("GTE", column, column.of(batch), low), _compare("LTE", column, column.of(batch), high)
        )

    def _in(self, part: Part) -> _Condition:
        if not part.expressions:
            _refuse(part)
        column = self._column(part.this)
        constants = [self._constant(constant) for constant in part.expressions]
        has_null = None in constants
        non_null = [constant for constant in constants if constant is not None]

        def condition(batch: pyarrow.RecordBatch) -> Any:
            values = column.of(batch)
            matches = _is_among(column, values, non_null)
            matches = compute.if_else(compute.is_null(values), pyarrow.scalar(None, pyarrow.bool_()), matches)
            # x IN (1, NULL) is true or unknown, never false.
            return (
                compute.if_else(matches, matches, pyarrow.scalar(None, pyarrow.bool_()))
                if has_null
                else matches
            )

        return condition

    def _like(self, part: Part, escape: str) -> _Condition:
        column, pattern = self._column(part.this), self._constant(part.expression)
        if not isinstance(pattern, str) or len(escape) > 1:
            _refuse(part)
        pattern = _with_backslashes(pattern, escape)
        # Some versions of sqlglot write the NOT of NOT LIKE into the LIKE node, and others around it.
        negated = bool(part.args.get("negate"))

        def condition(batch: pyarrow.RecordBatch) -> Any:
            values = column.of(batch)
            if not _is_text(values.type):
                raise OptionInvalid(
                    f"where: LIKE is for text, and {column} is {values.type}",
                    hint="Compare it with =, < or >",
                )
            matches = compute.match_like(values, pattern)
            return compute.invert(matches) if negated else matches

        return condition

    # --- Operands ---------------------------------------------------------------------------

    def _operand(self, part: Part) -> _Column | _Constant:
        inner = part
        while type(inner).__name__ == "Paren":
            inner = inner.this
        if type(inner).__name__ in ("Column", "Dot", "Lower", "Upper"):
            return self._column(inner)
        return self._constant(inner)

    def _column(self, part: Part) -> _Column:
        match type(part).__name__:
            case "Paren":
                return self._column(part.this)
            case "Lower" | "Upper" as change:
                column = self._column(part.this)
                change_case = compute.utf8_lower if change == "Lower" else compute.utf8_upper
                return _Column(column.name, column.field, change_case)
            case "Column" if not part.table:
                self.columns.add(part.name)
                return _Column(part.name)
            case "Column" if part.table == _METADATA and not part.db:
                self.columns.add(_METADATA)
                return _Column(_METADATA, part.name)
        _refuse(part)

    def _constant(self, part: Part) -> _Constant:
        match type(part).__name__:
            case "Null":
                return None
            case "Boolean":
                return bool(part.this)
            case "Paren":
                return self._constant(part.this)
            case "Literal":
                return str(part.this) if part.is_string else _number(str(part.this))
            case "Neg":
                value = self._constant(part.this)
                if isinstance(value, int | float | Decimal):
                    return -value
            case "HexString":
                text = str(part.this)
                return bytes.fromhex(text if len(text) % 2 == 0 else f"0{text}")
            case "Cast" | "TsOrDsToDate" | "Date" | "Timestamp":
                # DATE '2026-01-01' and TIMESTAMP '...': the column determines how the text is parsed.
                value = self._constant(part.this)
                kind = part.args.get("to")
                type_text = "DATE" if "Date" in type(part).__name__ else "TIMESTAMP"
                type_text = type_text if kind is None else kind.sql(dialect="mysql").upper()
                # A DATE has no time of day, so a constant with a time of day does not fit.
                is_exact = type_text in _MOMENTS or (type_text == "DATE" and _DAY.fullmatch(str(value)))
                if isinstance(value, str) and is_exact:
                    return value
        _refuse(part)


def _number(text: str) -> int | float | Decimal:
    if "e" in text.lower():
        return float(text)
    number = _decimal(text)
    assert number is not None, "the parser takes nothing else for a number"
    return number if "." in text else int(number)


def _decimal(text: str) -> Decimal | None:
    """Return the finite number in a text, or None. Raises OptionInvalid if the number has too many digits."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    if not number.is_finite():
        return None
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), "the number is finite"
    if len(text) > _CONSTANT_DIGITS_MAX or max(number.adjusted(), -exponent) > _CONSTANT_DIGITS_MAX:
        raise OptionInvalid(
            f"where: the number {text[:64]!r} has over {_CONSTANT_DIGITS_MAX} digits",
            hint="No column has such numbers: write it without an exponent",
        )
    return number


def _with_backslashes(pattern: str, escape: str) -> str:
    """Return a LIKE pattern with the backslash as its escape character."""
    if escape == "\\":
        return pattern
    out, characters = "", iter(pattern)
    for character in characters:
        if character == escape:
            following = next(characters, escape)
            out += f"\\{following}" if following in "%_\\" else following
        else:
            out += "\\\\" if character == "\\" else character
    return out


# --- Comparisons ----------------------------------------------------------------------------


def _compare_constant(kind: str, column: _Column, constant: _Constant, batch: pyarrow.RecordBatch) -> Any:
    return _compare(kind, column, column.of(batch), constant)


def _compare(kind: str, column: _Column, values: pyarrow.Array, constant: _Constant) -> Any:
    """Compare a column's values with a constant; null if either is null."""
    if constant is None:
        return pyarrow.scalar(None, pyarrow.bool_())
    values, scalar = _convert_alike(column, values, constant)
    return _OPERATORS[kind][0](values, scalar)


def _compare_columns(kind: str, left: _Column, right: _Column, batch: pyarrow.RecordBatch) -> Any:
    first, second = left.of(batch), right.of(batch)
    if first.type != second.type:
        numbers = _is_number(first.type) and _is_number(second.type)
        if numbers and (pyarrow.types.is_floating(first.type) or pyarrow.types.is_floating(second.type)):
            first, second = (
                first.cast(pyarrow.float64(), safe=False),
                second.cast(pyarrow.float64(), safe=False),
            )
        elif not (
            numbers
            or (_is_day(first.type) and _is_day(second.type))
            or _is_text(first.type) == _is_text(second.type)
        ):
            raise OptionInvalid(
                f"where: {left} is {first.type} and {right} is {second.type}, which do not compare",
                hint=_HINT,
            )
    return _OPERATORS[kind][0](first, second)


def _is_among(column: _Column, values: pyarrow.Array, constants: Sequence[_Constant]) -> Any:
    """Return a mask of the values that equal one of the constants."""
    alike = [_convert_alike(column, values, constant) for constant in constants]
    if pyarrow.types.is_floating(values.type):
        # `is_in` compares bits, so 0 and -0 would differ. Adding 0 turns -0 into 0.
        alike = [
            (compute.add(column_values, 0.0), compute.add(scalar, 0.0)) for column_values, scalar in alike
        ]
    kinds = {scalar.type for _, scalar in alike}
    if len(kinds) == 1 and all(column_values.type == alike[0][0].type for column_values, _ in alike):
        value_set = pyarrow.array([scalar.as_py() for _, scalar in alike], kinds.pop())
        return compute.is_in(alike[0][0], value_set=value_set.cast(alike[0][0].type, safe=False))
    matches = pyarrow.array(numpy.zeros(len(values), bool))
    for column_values, scalar in alike:
        matches = compute.or_(matches, compute.fill_null(compute.equal(column_values, scalar), False))
    return matches


def _convert_alike(column: _Column, values: pyarrow.Array, constant: _Constant) -> tuple[Any, pyarrow.Scalar]:
    """Convert values and constant to types that compare as in MySQL. Raises OptionInvalid."""
    kind = values.type
    if _is_number(kind):
        return _numbers_alike(column, values, constant)
    if _is_text(kind):
        if isinstance(constant, str):
            return values, pyarrow.scalar(constant, kind)
        _refuse_kinds(column, kind, constant, "Write the constant in quotes")
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
        if isinstance(constant, str | bytes):
            content = constant.encode() if isinstance(constant, str) else constant
            return values, pyarrow.scalar(content, kind)
        _refuse_kinds(column, kind, constant, "Write bytes as X'00FF'")
    if isinstance(constant, str):
        if pyarrow.types.is_duration(kind):
            return values, pyarrow.scalar(_duration(column, constant), kind)
        if _is_day(kind):
            return _days_alike(column, values, constant)
    _refuse_kinds(column, kind, constant, "Compare another column")


def _refuse_kinds(column: _Column, kind: pyarrow.DataType, constant: _Constant, hint: str) -> NoReturn:
    raise OptionInvalid(f"where: {column} is {kind}, and {constant!r} does not compare with it", hint=hint)


def _numbers_alike(column: _Column, values: pyarrow.Array, constant: _Constant) -> tuple[Any, pyarrow.Scalar]:
    if isinstance(constant, str):
        number_of_text = _decimal(constant.strip())
        if number_of_text is None:
            _refuse_kinds(column, values.type, constant[:64], "Compare a number with a number")
        constant = number_of_text
    if isinstance(constant, bytes | date):
        _refuse_kinds(column, values.type, constant, "Compare a number with a number")
    assert isinstance(constant, bool | int | float | Decimal), "NULL was left out before"
    if isinstance(constant, float) or pyarrow.types.is_floating(values.type):
        return values.cast(pyarrow.float64(), safe=False), pyarrow.scalar(float(constant), pyarrow.float64())
    number = Decimal(constant)
    if pyarrow.types.is_integer(values.type) and number == number.to_integral_value():
        whole = int(number)
        if -(1 << 63) <= whole < 1 << 63:
            return values.cast(pyarrow.int64()), pyarrow.scalar(whole, pyarrow.int64())
    before, behind = _digits(number)
    if pyarrow.types.is_integer(values.type):
        own_before, own_behind = 19, 0
    else:
        own_before, own_behind = values.type.precision - values.type.scale, values.type.scale
    scale = max(behind, own_behind)
    digits = max(before, own_before) + scale
    if digits > _DIGITS_MAX:
        return values.cast(pyarrow.float64(), safe=False), pyarrow.scalar(float(number), pyarrow.float64())
    common = pyarrow.decimal128(digits, scale) if digits <= 38 else pyarrow.decimal256(digits, scale)
    return values.cast(common), pyarrow.scalar(number, common)


def _digits(number: Decimal) -> tuple[int, int]:
    """Return the number of digits before and after the decimal point."""
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int), "a constant is a finite number"
    return max(len(digits) + exponent, 1), max(-exponent, 0)


def _days_alike(column: _Column, values: pyarrow.Array, constant: str) -> tuple[Any, pyarrow.Scalar]:
    try:
        timestamp = datetime.fromisoformat(constant.strip())
    except ValueError:
        _refuse_kinds(column, values.type, constant, "Write 2026-11-21 or 2026-11-21 08:00:00")
    if timestamp.tzinfo is not None:
        try:
            timestamp = timestamp.astimezone(UTC).replace(tzinfo=None)
        except OverflowError:
            _refuse_kinds(column, values.type, constant, "Write a moment of the years 1 to 9999 in UTC")
    if pyarrow.types.is_date(values.type):
        values = values.cast(pyarrow.timestamp("us"))
    zone = values.type.tz
    return values, pyarrow.scalar(timestamp.replace(tzinfo=UTC) if zone else timestamp, values.type)


def _duration(column: _Column, text: str) -> timedelta:
    duration = duration_of(text)
    if duration is None:
        raise OptionInvalid(f"where: {column} is a TIME, and {text!r} is none", hint="Write 08:30:00")
    return duration


def _is_number(kind: pyarrow.DataType) -> bool:
    return bool(
        pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind)
    )


def _is_text(kind: pyarrow.DataType) -> bool:
    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _is_day(kind: pyarrow.DataType) -> bool:
    return bool(pyarrow.types.is_date(kind) or pyarrow.types.is_timestamp(kind))
