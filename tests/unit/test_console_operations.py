# SPDX-License-Identifier: Apache-2.0
"""The operations of the console: shown first, with the token of the browser, for administrators, recorded."""

import ast
from pathlib import Path

from penstock.console import operation, words
from penstock.console.operations import OPERATIONS
from tests.support.suite.nonempty import each

CONSOLE = Path(operation.__file__).parent


def texts_of_code() -> set[str]:
    """Return the texts that the code of the console says on pages."""
    texts = set()
    for file in each(CONSOLE.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "say":
                texts.add(ast.literal_eval(node.args[0]))
    return texts


def test_every_text_of_an_operation_has_a_translation() -> None:
    texts = texts_of_code()
    for known in each(OPERATIONS):
        texts |= {known.title, known.question}
        texts |= {shown.label for shown in known.inputs}
        texts |= {label for shown in known.inputs for label in shown.choices.values()}
    assert texts - words.CHINESE.keys() == set()


def test_every_operation_has_a_page_that_is_linked_from_another() -> None:
    templates = "".join(path.read_text() for path in (CONSOLE / "templates").glob("*.html"))
    assert [known.path for known in OPERATIONS if f"url('{known.path}'" not in templates] == []
