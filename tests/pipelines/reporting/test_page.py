"""The page in a real headless Chromium: nothing fetched, nothing complained of, nothing wider than a phone."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from headless_browser import Browser, find_browser
from synthetic_events import COSTS, LOADS, evaluation, full_report, labels, simulate

from dspark.calibration import SlotCalibration
from dspark.decoding.scheduling import threshold
from dspark.serving import mean_field
from pipelines.evaluation.round_log import completion_table, event_table
from pipelines.evaluation.serving import recording_of
from pipelines.reporting.report import ReportInputs, build_report, write_report

CONTRAST = """
(() => {
  const channel = v => { v /= 255; return v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4); };
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const c = parse(getComputedStyle(node).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll('h1,h2,h3,p,li,dt,dd,td,th,summary,span,b,small,svg text,label,a')) {
    if (!node.textContent.trim() || !node.getClientRects().length || node.classList.contains('skip')) continue;
    const style = getComputedStyle(node);
    const front = parse(node instanceof SVGElement ? style.fill : style.color), back = behind(node.parentElement && node
      instanceof SVGElement ? node.closest('svg').parentElement : node);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(node.tagName + '.' + node.getAttribute('class') + ' ' + ratio.toFixed(2));
  }
  return [...new Set(low)];
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium, or set CHROMIUM to its path")
    opened = Browser(path, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    long = "unbreakable" * 30
    single = simulate("one", rate=0.5, tokens=9)
    inputs = {
        "empty": ReportInputs(),
        "single": ReportInputs(
            title=long,
            events=event_table(single, labels(domain=long)),
            completions=completion_table(single, labels(domain=long)),
            prompts={"one": long},
            provenance={"command": [long], "settings": {long: long}},
            conversations={"prompts_sha256": "0" * 64, long: long, "excerpt": {"prompt": long, "answer": long}},
        ),
        "plain only": ReportInputs(
            events=pa.concat_tables([event_table(simulate("a", rate=0.5, block=0), labels("plain"))])
        ),
    }
    folder = tmp_path_factory.mktemp("reports")
    reports = {"full": full_report(), **{name: build_report(one) for name, one in inputs.items()}}
    for name, report in reports.items():
        write_report(report, folder / name)
    return {name: folder / name / "index.html" for name in reports}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["full", "empty", "single", "plain only"])
@pytest.mark.parametrize("width", [375, 1200])
def test_quiet_offline_and_no_wider_than_the_screen(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.open(pages[name], width=width, dark=dark)
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [pages[name].resolve().as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    browser.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable(browser: Browser, pages: dict[str, Path], dark: bool) -> None:
    """Contrast of at least 4.5 to 1 (WCAG AA)."""
    browser.open(pages["full"], dark=dark)
    assert browser.evaluate(CONTRAST) == []


def test_light_and_dark_differ(browser: Browser, pages: dict[str, Path]) -> None:
    colours = []
    for dark in (False, True):
        browser.open(pages["full"], dark=dark)
        colours.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]
    browser.open(pages["full"], dark=True, media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_the_threshold_recomputes_from_the_recorded_data(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["full"])
    found = browser.evaluate(
        """(() => {
          const box = document.querySelector('[data-sweep]'), slider = box.querySelector('input');
          const rows = JSON.parse(document.getElementById('thresholds').textContent)[+box.dataset.sweep];
          return [0, 17, rows.length - 1].map(at => {
            slider.value = at; slider.dispatchEvent(new Event('input'));
            const shown = [...box.querySelectorAll('[data-field]')].map(cell => cell.textContent);
            return [shown, rows[at], box.querySelector('.cursor').getAttribute('x1')];
          });
        })()"""
    )
    for (level, scheduled, length, _), row, _ in found:
        assert level == f"{row['threshold']:.2f}"
        assert float(scheduled) == pytest.approx(row["scheduled"], abs=0.006)
        assert float(length) == pytest.approx(row["accepted_length"], abs=0.006)
    assert len({cursor for *_, cursor in found}) == 3


def page_threshold(level: float, users: int) -> list[float]:
    """What the page should show at a threshold: tokens a second, of one user, drafts, tokens a step."""
    rounds = full_report()["serving"]["rounds"]
    confidence, accepted = np.array(rounds["confidence"]) / 1000, np.array(rounds["accepted"])
    recording = recording_of(evaluation()[0], 1.0, SlotCalibration((2.0,) * 7))
    assert recording is not None
    part = type(recording)(accepted, None, recording.first[:1], recording.rounds[:1], recording.tokens[:1], 7)
    point = mean_field(part, COSTS, threshold(confidence, level), users)
    return [point.tokens_per_second, point.tokens_per_second_user, point.drafts, point.accepted_length]


@pytest.mark.parametrize(("load", "level"), [(0, 0.0), (4, 0.37), (7, 0.9)])
def test_load_and_threshold_recompute_throughput(
    browser: Browser, pages: dict[str, Path], load: int, level: float
) -> None:
    browser.open(pages["full"])
    shown = browser.evaluate(
        f"(([load, level]) => {{ const wanted = [['users', {load}], ['threshold', {level}]];"
        """
          const box = document.getElementById('load');
          for (const [name, value] of wanted) {
            const slider = box.querySelector(`[data-control=${name}]`);
            slider.value = value; slider.dispatchEvent(new Event('input'));
          }
          return Object.fromEntries([...box.querySelectorAll('[data-policy]')].map(row =>
            [row.dataset.policy, [...row.querySelectorAll('[data-field]')].map(cell => +cell.textContent)]));
        })([])"""
    )
    assert shown["threshold"] == pytest.approx(page_threshold(level, LOADS[load]), abs=0.06)
    replayed = {p["policy"]: p for p in full_report()["serving"]["replayed"] if p["users"] == LOADS[load]}
    for name in ("none", "full", "scheduler"):
        fields = ("tokens_per_second", "tokens_per_second_user", "drafts", "accepted_length")
        assert shown[name] == pytest.approx([replayed[name][field] for field in fields], abs=0.06)
    assert browser.evaluate("document.querySelector('#load [data-out=users]').textContent") == str(LOADS[load])
    assert browser.evaluate("document.querySelectorAll('#load .best').length") == 1


def test_a_round_says_what_was_drafted(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["full"])
    said = browser.evaluate(
        """(() => {
          const sample = document.querySelector('.sample'), text = sample.querySelector('.text');
          text.focus();
          text.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}));
          text.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}));
          return sample.querySelector('.inspector').textContent;
        })()"""
    )
    assert said.startswith("Round 2:")
    assert "drafted" in said
    hidden = "getComputedStyle(document.querySelector('.sample .no')).display"
    assert browser.evaluate(hidden) == "none"
    browser.evaluate("document.getElementById('drafts').click()")
    assert browser.evaluate(hidden) == "inline"


def test_charts_have_names_and_headings_are_in_order(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["full"])
    assert browser.evaluate("document.querySelectorAll('svg[role=img]:not([aria-label])').length") == 0
    assert browser.evaluate("document.querySelectorAll('svg[role=img]').length") > 15
    assert browser.evaluate("document.querySelectorAll('h1').length") == 1
    levels = browser.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(node => +node.tagName[1])")
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = browser.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(ids) == len(set(ids))
    dead = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.querySelector(a.hash)).length"
    assert browser.evaluate(dead) == 0
