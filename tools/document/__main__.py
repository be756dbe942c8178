# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.document`: write docs/reference."""

from pathlib import Path

from tools.document import PAGES

REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference"


def main() -> None:
    """Write every page that changed."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path = REFERENCE / name
        text = page()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
