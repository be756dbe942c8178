# SPDX-License-Identifier: Apache-2.0
from types import ModuleType

import pydantic
import pytest

from penstock.sinks.targets import delta, files, iceberg


@pytest.mark.parametrize("target", [delta, files, iceberg], ids=lambda target: target.__name__)
def test_empty_path_is_refused(target: ModuleType) -> None:
    with pytest.raises(pydantic.ValidationError, match="path"):
        target.Settings(path="")
    assert target.Settings(path="lake").path == "lake"
