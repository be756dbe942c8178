# SPDX-License-Identifier: Apache-2.0
"""Mutants of the Python code, generated with cosmic-ray's operators and judged by the tests that run the
mutated lines.
"""

import ast
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mutants.coverage_map import CoverageMap, CoveringTest
from tools.mutants.mutant import Mutant, edit, line_at
from tools.mutants.places import PYTHON_AREAS, TREE, sources
from tools.mutants.results import Verdict
from tools.mutants.tree import replaced, run_pytest

Position = tuple[int, int]

SECONDS_MAX = 60.0
# The limit for the recorded duration of the tests that run on a mutant. Only a mutant that hangs reaches
# SECONDS_MAX.
TEST_SECONDS_MAX = 20.0
SERVER_START_SECONDS = 8.0

# The replacements of binary and comparison operators: the opposite operator, and for an ordering also the
# operator with the other strictness. Most other replacements of cosmic-ray cause a TypeError, which every
# test detects.
_REPLACEMENTS = {
    "ReplaceBinaryOperator": (
        "Add_Sub Sub_Add Mul_FloorDiv Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul "
        "LShift_RShift RShift_LShift BitOr_BitAnd BitAnd_BitOr BitXor_BitAnd"
    ).split(),
    "ReplaceComparisonOperator": (
        "Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt"
    ).split(),
}
# These operators draw names at random.
_UNUSED = ("VariableReplacer", "VariableInserter")
# The only syntax nodes to which operators with many replacements apply.
_KINDS = {"ReplaceBinaryOperator": "operator", "ReplaceComparisonOperator": "comparison"}


@dataclass(frozen=True)
class Candidate:
    """A span of a file, and an operator that can mutate the span. The mutant is created only when the
    candidate is drawn.
    """

    area: str
    path: str
    line_text: str
    span: tuple[str, int, int]
    node: int
    operator: str
    index: int
    number: int
    column: int

    @property
    def key(self) -> str:
        """The name that determines when a sample draws the candidate."""
        return f"{self.path}: {self.line_text} #{self.number} {self.column} {self.operator} {self.index}"


def candidates(tree: Path = TREE) -> list[Candidate]:
    """Return every candidate of the Python areas. Raises ImportError unless cosmic-ray can be imported."""
    return [
        candidate
        for area, patterns in PYTHON_AREAS.items()
        for path in sources(patterns, tree)
        for candidate in _candidates_of(area, path, (tree / path).read_text())
    ]


def mutant_of(candidate: Candidate, tree: Path = TREE) -> Mutant | None:
    """Create the mutant; return None if the operator leaves the program invalid or unchanged."""
    text = (tree / candidate.path).read_text()
    changed = _mutate(candidate, text)
    if changed == text or not _compiles(changed):
        return None
    start, end, replacement = edit(text, changed)
    line, line_text = line_at(text, candidate.span[1])
    _, change = line_at(changed, candidate.span[1])
    if changed.count("\n") < text.count("\n"):
        change = f"delete {line_text}"
    return Mutant(
        "python",
        candidate.area,
        candidate.path,
        line,
        line_text,
        change,
        start,
        end,
        replacement,
        candidate.number,
    )


def judge(mutant: Mutant, coverage: CoverageMap, tree: Path = TREE) -> Verdict:
    """Run the tests that cover a mutant until one fails, everyday tests first.

    A mutant is killed if a test fails, if a signal kills the tests, or if they time out. The same tests must
    pass on the unmutated code within the same time.
    """
    began = time.monotonic()
    text = (tree / mutant.path).read_text()
    if _runs_at_import(text, mutant.line):
        tests = coverage.importing(mutant.path)
    else:
        tests = coverage.covering(mutant.path, mutant.lines(text))
    if not tests:
        return Verdict("survived", detail="no test runs this line")
    chosen = _within_time(tests)
    with replaced(tree / mutant.path, mutant.apply(text).encode()):
        for tier in ("everyday", "deep"):
            names = [test.name for test in chosen if (test.tier == "everyday") == (tier == "everyday")]
            seconds = SECONDS_MAX - (time.monotonic() - began)
            if names and seconds > 0:
                status, failed = _run_tests(names, seconds, tree)
                if status != 0:
                    break
        else:
            detail = f"{len(chosen)} of {len(tests)} tests that run the line passed"
            return Verdict("survived", detail=detail)
    if failed is None and status is not None and status >= 0:
        return Verdict("undecided", detail=f"pytest ended with {status}, and no test failed")
    # If a test file cannot be imported, `failed` is the name of the file without a test.
    killers = [name for name in names if failed is None or name.startswith(failed)]
    limit = seconds if status is None else SECONDS_MAX
    if _run_tests(killers or names, limit, tree)[0] != 0:
        return Verdict("undecided", detail=f"{failed or names[0]} fails without the mutation as well")
    if status is None:
        return Verdict("killed", tier, detail=f"timeout after {limit:.0f} s", timeout=True)
    detail = "" if failed else f"the tests died by signal {-status}"
    return Verdict("killed", tier, test=failed or "", detail=detail)


def _candidates_of(area: str, path: str, text: str) -> Iterator[Candidate]:
    import parso
    from cosmic_ray.ast import ast_nodes

    operators = _operators()
    skipped = _annotations(text)
    offsets = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]
    texts = [line.strip() for line in text.splitlines()]
    # Equal lines of a file are distinguished by their order.
    numbers = [texts[:line].count(line_text) + 1 for line, line_text in enumerate(texts)]
    for number, node in enumerate(ast_nodes(parso.parse(text))):
        for name, operator in operators[_kind(node)].items():
            if name == "ExceptionReplacer" and "." in node.get_code():
                # The operator does not support exceptions of another module.
                continue
            for index, (start, end) in enumerate(operator.mutation_positions(node)):
                if any(first <= start < last for first, last in skipped):
                    continue
                line = start[0] - 1
                span = (path, offsets[line] + start[1], offsets[end[0] - 1] + end[1])
                yield Candidate(area, path, texts[line], span, number, name, index, numbers[line], start[1])


def _operators() -> dict[str, dict[str, Any]]:
    """Return the operators for each kind of syntax node."""
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    kinds: dict[str, dict[str, Any]] = {"operator": {}, "comparison": {}, "other": {}}
    for name in provider:
        group, _, change = name.partition("_")
        if name not in _UNUSED and change in _REPLACEMENTS.get(group, (change,)):
            kinds[_KINDS.get(group, "other")][name] = provider[name]()
    for kind in ("operator", "comparison"):
        kinds[kind].update(kinds["other"])
    return kinds


def _kind(node: Any) -> str:
    return node.type if node.type in ("operator", "comparison") else "other"


def _mutate(candidate: Candidate, text: str) -> str:
    import parso
    from cosmic_ray.ast import ast_nodes

    module = parso.parse(text)
    node = next(itertools.islice(ast_nodes(module), candidate.node, None))
    operator = _operators()[_kind(node)][candidate.operator]
    parent = node.parent
    changed = operator.mutate(node, candidate.index)
    if parent is not None and changed is not node:
        child_index = next(number for number, child in enumerate(parent.children) if child is node)
        parent.children[child_index : child_index + 1] = [] if changed is None else [changed]
    return str(module.get_code())


def _annotations(text: str) -> list[tuple[Position, Position]]:
    """Return the parts that only declare types or signatures: mutating them changes nothing at run time."""
    parts = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.AnnAssign):
            annotation = node.annotation
            end = (annotation.end_lineno or annotation.lineno, annotation.end_col_offset or 0)
            parts.append(((annotation.lineno, annotation.col_offset), end))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts.append(((node.lineno, node.col_offset), (node.body[0].lineno, 0)))
    return parts


def _runs_at_import(text: str, line: int) -> bool:
    """Return whether a line is outside of every function, so that it runs at import, before all tests."""
    functions = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return not any(node.body[0].lineno <= line <= (node.end_lineno or line) for node in functions)


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _within_time(tests: list[CoveringTest]) -> list[CoveringTest]:
    """Return the first tests that fit into the time, at least one."""
    chosen: list[CoveringTest] = []
    seconds = 0.0
    server = False
    for test in tests:
        seconds += test.seconds + (SERVER_START_SECONDS if test.server and not server else 0.0)
        server = server or test.server
        if chosen and seconds > TEST_SECONDS_MAX:
            break
        chosen.append(test)
    return chosen


def _run_tests(names: list[str], seconds: float, tree: Path) -> tuple[int | None, str | None]:
    """Run tests until one fails; return pytest's status and the name of the test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = Path(folder) / "names"
        arguments.write_text("\n".join(names))
        ending, records = run_pytest(["-x", f"@{arguments}"], seconds, tree)
    failed = next((record["test"] for record in records if record["outcome"] == "failed"), None)
    return ending.status, failed
