# SPDX-License-Identifier: Apache-2.0
"""Templates rendered as HTML. Every value is escaped; no template marks a value as safe."""

import functools
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

from starlette.responses import HTMLResponse, Response

from penstock.console.streams import Stream, StreamResponse
from penstock.console.words import LANGUAGES, translate
from penstock.errors import DependencyMissing
from penstock.sizes import size_text
from penstock.source.shown_values import shown_text

if TYPE_CHECKING:
    import jinja2

# Quoted values are cached, because a page has thousands of links but only a few distinct values.
_quoted = functools.lru_cache(8192)(quote_plus)
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_UNITS = {"en": ("d", "h", "min", "s"), "zh": ("天", "小时", "分钟", "秒")}


class Renderer:
    """Renders pages below a base path. Raises DependencyMissing if Jinja2 is missing."""

    def __init__(self, base_path: str) -> None:
        self._base_path = base_path
        self._environment = _environment()

    def response(self, template: str, language: str, status: int, values: Mapping[str, Any]) -> Response:
        """Return a page."""
        text = self._environment.get_template(template).render(self._all(language, values))
        return HTMLResponse(text, status)

    def stream(
        self, template: str, language: str, stream: Stream | None, values: Mapping[str, Any]
    ) -> Response:
        """Return a page that includes the parts of a stream, which are read while the page is sent."""
        # Do not buffer the page, because the next value may take a long time to arrive.
        pieces = self._environment.get_template(template).generate(
            self._all(language, {**values, "is_stream": True})
        )
        return StreamResponse(pieces, stream, "text/html; charset=utf-8")

    def _all(self, language: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "t": partial(translate, language),
            "url": self._url,
            "language": language,
            "languages": LANGUAGES,
            "now": time.time(),
            "is_stream": False,
            **values,
        }

    def _url(self, path: str, **query: object) -> str:
        """Return the URL of a page of the console."""
        fields = "&".join([f"{name}={_quoted(str(value))}" for name, value in query.items()])
        return f"{self._base_path}{path}{'?' if query else ''}{fields}"


def import_templates() -> None:
    """Import the template engine now, so that a missing package is reported early. Raises
    DependencyMissing.
    """
    try:
        import jinja2  # noqa: F401
    except ImportError as problem:
        raise DependencyMissing(
            f"the console needs a package: {problem}", hint="pip install 'penstock[console]'"
        ) from problem


@functools.cache
def _environment() -> "jinja2.Environment":
    import_templates()
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("penstock.console"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": known_size_text,
        "span": jinja2.pass_context(lambda context, seconds: span_text(seconds, context["language"])),
        "iso": iso_text,
        "utc": utc_text,
        "until": jinja2.pass_context(lambda context, time_us: until_text(time_us, context["language"])),
        "ago": jinja2.pass_context(lambda context, time_us: ago_text(time_us, context["language"])),
        "number": number_text,
        "decimal": decimal_text,
        "clock": clock_text,
        "value": shown_text,
    }
    return environment


def known_size_text(size: float | None) -> str:
    """Return a number of bytes for people; a dash if it is unknown."""
    return "–" if size is None else size_text(size)


def span_text(seconds: float | None, language: str = LANGUAGES[0]) -> str:
    """Return a duration for people; a dash if it is unknown."""
    if seconds is None:
        return "–"
    *longer, second = _UNITS[language]
    for size, name in zip((_DAY, _HOUR, _MINUTE), longer, strict=True):
        if seconds >= size:
            return f"{seconds / size:,.{1 if seconds < 100 * size else 0}f} {name}"
    return f"{seconds:.1f} {second}"


def iso_text(time_us: int | None) -> str:
    """Return a time in microseconds UTC since 1970 as ISO 8601; a dash if it is unknown."""
    if not time_us:
        return "–"
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(sep=" ", timespec="milliseconds")


def utc_text(time_us: int | None) -> str:
    """Return a time in microseconds UTC since 1970 for people; a dash if it is unknown."""
    if not time_us:
        return "–"
    return f"{datetime.fromtimestamp(time_us / 1e6, UTC):%Y-%m-%d %H:%M:%S}.{time_us // 1000 % 1000:03d} UTC"


def ago_text(time_us: int | None, language: str = LANGUAGES[0]) -> str:
    """Return how long ago a time is; a dash if it is unknown."""
    return "–" if not time_us else span_text(max(0.0, time.time() - time_us / 1e6), language)


def until_text(time_us: int | None, language: str = LANGUAGES[0]) -> str:
    """Return how long it is until a time; a dash if it is unknown."""
    return "–" if not time_us else span_text(max(0.0, time_us / 1e6 - time.time()), language)


def number_text(number: float | None) -> str:
    """Return a number with separators; a dash if it is unknown."""
    return "–" if number is None else f"{number:,.0f}"


def decimal_text(number: float | None) -> str:
    """Return a number with separators, and with one decimal if it is below 10; a dash if it is unknown."""
    return number_text(number) if number is None or number >= 10 or number == int(number) else f"{number:.1f}"


def clock_text(time_us: int) -> str:
    """Return the hour and minute of a time in microseconds UTC since 1970."""
    return f"{datetime.fromtimestamp(time_us / 1e6, UTC):%H:%M}"
