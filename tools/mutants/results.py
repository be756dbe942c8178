# SPDX-License-Identifier: Apache-2.0
"""The verdicts on mutants, saved as they are reached, and the report on them."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.mutants.mutant import Mutant
from tools.mutants.places import ROOT, WORK

RESULTS = WORK / "results.json"
HARMLESS = Path(__file__).with_name("harmless.toml")
# Verdicts that count toward the sample. Mutants with other verdicts are replaced by the sample's next
# mutants.
COUNTED = ("killed", "survived")
_CARGO_TEST = "cargo test: "


@dataclass(frozen=True)
class Verdict:
    """The verdict on a mutant: killed, survived, unbuildable, or undecided if the judge itself failed.

    `tier` and `test` identify the test that killed the mutant. A timeout counts as a kill, without a test.
    """

    outcome: str
    tier: str = ""
    test: str = ""
    detail: str = ""
    timeout: bool = False


@dataclass(frozen=True)
class Harmless:
    """A survivor that a person has judged to be harmless: the mutation does not lose, duplicate or change any
    row.
    """

    path: str
    line: str
    change: str
    reason: str

    def matches(self, result: dict[str, Any]) -> bool:
        """Return whether this judgement applies to a mutant. It applies to every equal line of the file."""
        return (self.path, self.line, self.change) == (result["path"], result["line_text"], result["change"])


class Results:
    """A file of verdicts. Each added verdict replaces the file atomically, so that a run that is killed loses
    at most one mutant.
    """

    def __init__(self, path: Path = RESULTS) -> None:
        self._path = path
        self._verdicts: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._verdicts = {result["key"]: result for result in json.loads(path.read_text())}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._verdicts.values())

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the verdict on a mutant, or None."""
        return self._verdicts.get(key)

    def add(self, mutant: Mutant, verdict: Verdict, diff: str, seconds: float) -> dict[str, Any]:
        """Save a verdict, replacing an earlier verdict on the same mutant; return it in its stored form."""
        fields = {
            name: getattr(mutant, name)
            for name in ("language", "area", "path", "line", "line_text", "change")
        }
        result = {"key": mutant.key, **fields, **asdict(verdict), "seconds": round(seconds, 1), "diff": diff}
        # Two runs, one for each language, may add to the file.
        if self._path.exists():
            self._verdicts |= {stored["key"]: stored for stored in json.loads(self._path.read_text())}
        self._verdicts[mutant.key] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(list(self._verdicts.values()), indent=1))
        temporary.replace(self._path)
        return result


def judgements(path: Path = HARMLESS) -> list[Harmless]:
    """Return the survivors that were judged as harmless."""
    return [Harmless(**entry) for entry in tomllib.loads(path.read_text()).get("harmless", [])]


def is_outdated(result: dict[str, Any], root: Path = ROOT) -> bool:
    """Return whether a verdict's line is no longer in its file, or its test no longer exists."""
    return not _holds_line(root / result["path"], result["line_text"]) or not has_test(result["test"], root)


def has_test(test: str, root: Path = ROOT) -> bool:
    """Return whether the test of a verdict exists. An empty name stands for no test, and counts as existing.

    Tests are searched for by function name, without parameters.
    """
    if not test:
        return True
    if test.startswith(_CARGO_TEST):
        function = rf"\bfn {re.escape(test.removeprefix(_CARGO_TEST).rpartition('::')[2])}\b"
        return any(re.search(function, path.read_text()) for path in root.glob("native/kernel/**/*.rs"))
    file, _, inside = test.partition("::")
    if not (root / file).is_file():
        return False
    function = rf"\bdef {re.escape(inside.partition('[')[0].rpartition('::')[2])}\b"
    return not inside or re.search(function, (root / file).read_text()) is not None


def stale(entries: Iterable[Harmless], root: Path = ROOT) -> list[str]:
    """Return the judgements whose line is no longer in its file. Their code has changed, so they must be
    judged again.
    """
    return [
        f"{entry.path}: {entry.line}" for entry in entries if not _holds_line(root / entry.path, entry.line)
    ]


def report(results: Iterable[dict[str, Any]], entries: list[Harmless], root: Path = ROOT) -> list[str]:
    """Return the lines of the report: scores by area and tier, survivors, and undecided mutants.

    Outdated verdicts do not count.
    """
    all_results = list(results)
    present = [result for result in all_results if not is_outdated(result, root)]
    counted = [result for result in present if result["outcome"] in COUNTED]
    lines = [f"{'area':<16}{'mutants':>8}{'killed':>8}{'everyday':>10}{'timeout':>9}{'score':>8}"]
    for language in ("kernel", "python"):
        chosen = [result for result in counted if result["language"] == language]
        areas = sorted({result["area"] for result in chosen})
        lines += [_score(area, [result for result in chosen if result["area"] == area]) for area in areas]
        if chosen:
            lines.append(_score(language, chosen))
    if counted:
        lines.append(_score("all", counted))
    for result in sorted(counted, key=lambda result: (result["path"], result["line"])):
        if result["outcome"] == "survived":
            reason = next((entry.reason for entry in entries if entry.matches(result)), None)
            verdict = (
                f"harmless: {reason}" if reason else "not judged: write a test, or say why it is harmless"
            )
            lines += ["", f"survived: {result['path']}:{result['line']}: {verdict}", f"  {result['detail']}"]
            lines += [f"  {line}" for line in result["diff"].splitlines()[2:]]
    for result in sorted(present, key=lambda result: (result["path"], result["line"])):
        if result["outcome"] == "undecided":
            change = f"{result['line_text']} => {result['change']}"
            lines += ["", f"undecided: {result['path']}:{result['line']}: {result['detail']}", f"  {change}"]
    if len(present) < len(all_results):
        lines += [
            "",
            f"{len(all_results) - len(present)} verdicts do not count: their line or their test is gone",
        ]
    lines += [f"\nstale in {HARMLESS.name}: {name}" for name in stale(entries, root)]
    return lines


def _score(name: str, results: list[dict[str, Any]]) -> str:
    killed = [result for result in results if result["outcome"] == "killed"]
    everyday = sum(result["tier"] == "everyday" for result in killed)
    timeouts = sum(result["timeout"] for result in killed)
    score = 100 * len(killed) / len(results)
    return f"{name:<16}{len(results):>8}{len(killed):>8}{everyday:>10}{timeouts:>9}{score:>7.0f}%"


def _holds_line(path: Path, line: str) -> bool:
    return path.exists() and line in (text.strip() for text in path.read_text().splitlines())
