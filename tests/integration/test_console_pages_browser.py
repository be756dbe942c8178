# SPDX-License-Identifier: Apache-2.0
"""Every page of the console in a real browser: behind a reverse proxy, in both languages and both themes."""

from pathlib import Path
from urllib.parse import urlencode

import pytest

from penstock.console import pages, words
from penstock.pipeline.settings import load_pipeline
from tests.integration.test_console_browser import PICTURES, browser  # noqa: F401
from tests.support.daemon.console import console_of
from tests.support.daemon.reverse_proxy import proxied
from tests.support.daemon.served_log import INSTANCE, captured_log, serving
from tests.support.pipeline.local_runs import notes_pipeline, run_here
from tests.support.pipeline.rejected_rows import reject_row
from tests.support.suite.nonempty import each
from tools.chromium import Chromium

BASE = "/penstock"
ACCOUNTS = [{"name": "boss", "token": "boss-token", "admin": True}]

# Finds texts with less contrast than WCAG's level AA requires.
FAINT = """
(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] > 0.99) return color;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, style = getComputedStyle(element);
    if (!node.textContent.trim() || !element.getClientRects().length || element.closest("title")) continue;
    const color = parse(element.namespaceURI.includes("svg") ? style.fill : style.color);
    const [a, b] = [light(color), light(ground(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(node.textContent.trim());
  }
  return faint;
})()
"""
# Finds elements that the keyboard cannot reach, and fields without a name.
UNREACHABLE = """
[...document.querySelectorAll("a, button, input:not([type=hidden]), select, textarea")]
  .filter((e) => e.tabIndex < 0 || (e.matches("input, select, textarea") && !e.closest("label")))
  .map((e) => e.outerHTML)
"""
# Collects the texts of elements without child elements, except texts that come from data.
LEAVES = """
[...document.querySelectorAll("body *:not(option):not(.mono)")]
  .filter((e) => !e.children.length && e.getClientRects().length).map((e) => e.textContent.trim())
"""


def check_page(page: Chromium, path: str, language: str) -> None:
    """Check that the page fits the window, is readable in both themes, is operable by keyboard, and is in its
    language.
    """
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth"), path
    assert page.run("document.querySelector('.question').textContent.trim().length") > 5, path
    assert page.run(UNREACHABLE) == [], path
    for scheme in ("dark", "light"):
        page.prefer(scheme)
        assert page.run(FAINT) == [], f"{path} {scheme}"
        page.save_picture(
            PICTURES / f"pages/{path.strip('/').replace('/', '-') or 'overview'}-{language}-{scheme}.png"
        )
    if language == "zh":
        english = {text for text, chinese in words.CHINESE.items() if text != chinese}
        # Chinese pages show the names of settings, tables, accounts and fields of log lines as they are.
        assert set(page.run(LEAVES)) & english - {"admin", "test", "token"} == set(), path


@pytest.mark.deep(guard="tests/unit/test_console.py::test_every_page_is_complete_without_javascript")
def test_every_page_is_usable_in_both_languages_and_themes_behind_a_proxy(
    browser: Chromium,  # noqa: F811
    tmp_path: Path,
) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    file = tmp_path / "notes.yaml"
    file.write_text(
        f"name: notes\nstate: {settings.state}\nsource: {{path: {tmp_path}/log, name: shop}}\nsink: stdout\n"
    )
    query = {
        "instance": INSTANCE,
        "reader": "x",
        "store": "0",
        "name": "notes",
        "sink": "",
        "table": "fuzzed.t",
    }
    query |= {"entry": reject_row(load_pipeline(file)), "key": "1"}
    with (
        captured_log() as log,
        serving(log, {"token": "a-token"}, ACCOUNTS) as daemon,
        console_of(daemon, stores=(settings.state,), base_path=BASE, pipeline_files=(file,)) as served,
        proxied(served.port, BASE) as proxy,
    ):
        query |= {"daemon": f"http://127.0.0.1:{daemon.port()}", "at": str(daemon.log.visible)}
        browser.open(f"{proxy.url}/alerts")
        assert (
            browser.run("location.pathname + location.search") == f"{BASE}/login?next=%2Fpenstock%2Falerts%3F"
        )
        browser.run("document.querySelector('input[name=token]').value = 'boss-token'")
        browser.click("main form button")
        assert browser.run("location.pathname") == f"{BASE}/alerts"
        for language in words.LANGUAGES:
            for path in each(pages.PAGES):
                browser.open(f"{proxy.url}{path}?{urlencode({**query, 'lang': language})}")
                check_page(browser, path, language)
        _follow_links(browser, proxy.url)
        browser.click("header form button")
        assert browser.run("location.pathname") == f"{BASE}/login"
    assert browser.errors == []
    assert proxy.refused == []
    assert [address for address in browser.requested if not address.startswith(f"{proxy.url}/")] == []
    assert all(f"Path={BASE};" in f"{cookie};" for cookie in each(proxy.cookies))


def _follow_links(page: Chromium, url: str) -> None:
    """Links, exports, refreshes and streams work when the console is served below a path."""
    page.open(f"{url}/")
    page.run("document.querySelector('h1').textContent = 'stale'")
    page.wait_until("document.querySelector('h1').textContent !== 'stale'")
    for link in ("export=json", "export=csv"):
        address = f"document.querySelector('.exports a[href*=\"{link}\"]').href"
        assert page.run(f"fetch({address}).then(response => response.status)") == 200
    page.click("td a")
    assert page.run("location.pathname") == f"{BASE}/instance"
    page.begin_to_open(f"{url}/tail?follow=1")
    # The proxy passes on each part of the response as the console sends it.
    page.wait_until("document.getElementById('begin') !== null")
    page.open(f"{url}/")
