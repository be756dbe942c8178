# SPDX-License-Identifier: Apache-2.0
"""The differing rows of a comparison as a file.

JSON has one value per row, with the row's key and its images in source and target. CSV has one line per
column. It is unknown whether a masked column differs, so its line says false.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from penstock.console.changed_cells import changed_cells
from penstock.console.lists import FORMATS, csv_cell
from penstock.errors import OptionInvalid

_COLUMNS = ("table", "kind", "key", "column", "source", "target", "is_different")


def export_differences(name: str, differences: Sequence[Mapping[str, Any]], file_format: str) -> Response:
    """Return a file of differing rows, whose masked values were removed. Raises OptionInvalid."""
    if file_format not in FORMATS:
        raise OptionInvalid(f"there is no format {file_format[:64]!r}", hint=f"Use {', '.join(FORMATS)}")
    rows = [_parsed(difference) for difference in differences]
    text = json.dumps(rows, ensure_ascii=False, indent=1) if file_format == "json" else _csv_of(rows)
    headers = {"Content-Disposition": f'attachment; filename="{name}.{file_format}"'}
    return Response(text, media_type=FORMATS[file_format], headers=headers)


def _parsed(difference: Mapping[str, Any]) -> dict[str, Any]:
    images = {part: json.loads(difference[part] or "null") for part in ("key", "source", "target")}
    return {**difference, **images}


def _csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    lines = csv.writer(out)
    lines.writerow(_COLUMNS)
    for row in rows:
        key = json.dumps(row["key"], ensure_ascii=False)
        images = {"before": row["source"], "after": row["target"], "masked": row.get("masked", ())}
        for column, source, target, is_different in changed_cells(images):
            is_alone = None in (row["source"], row["target"]) and column not in images["masked"]
            differs = str(is_different or is_alone).lower()
            values = (row["table"], row["kind"], key, column, source, target, differs)
            lines.writerow([csv_cell(value) for value in values])
    return out.getvalue()
