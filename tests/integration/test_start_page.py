# SPDX-License-Identifier: Apache-2.0
"""The tutorial: its snippets run as written, one after the other."""

import os
from pathlib import Path

import pytest

from tests.support.spark.cluster import JVM_OPTIONS
from tests.support.suite.fixture_types import MissingPart
from tools.package.tutorial import follow
from tools.servers import PartMissing


@pytest.mark.deep(guard="tests/unit/test_site.py::test_translation_has_the_snippets_of_its_original")
@pytest.mark.slow
def test_snippets_of_the_tutorial_run_as_written(missing_part: MissingPart, tmp_path: Path) -> None:
    try:
        # The session of Spark is too short to repay the optimizing compiler.
        printed = follow(tmp_path, os.environ | {"JAVA_TOOL_OPTIONS": JVM_OPTIONS})
    except PartMissing as problem:
        missing_part("the tutorial", str(problem))
    for shown in ("shop.payments: equal, ", "0 errors", "李小龍", "update_postimage", "sound", "rows up to"):
        assert shown in printed
