# SPDX-License-Identifier: Apache-2.0
from types import ModuleType

import pydantic
import pytest

from penstock.sinks.delta import sink as delta
from penstock.sinks.files import sink as files
from penstock.sinks.iceberg import sink as iceberg


@pytest.mark.parametrize("target", [delta, files, iceberg], ids=lambda target: target.__name__)
def test_empty_path_is_refused(target: ModuleType) -> None:
    with pytest.raises(pydantic.ValidationError, match="path"):
        target.Settings(path="")
    assert target.Settings(path="lake").path == "lake"
