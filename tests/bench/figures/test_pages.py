"""Pages of the report and of a sweep in a real browser: offline, drawn, with words to hover."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="pages: pip install pycomm[bench]")

from pycomm.bench.common.tables import RESULTS
from pycomm.bench.figures import report as report_page
from pycomm.bench.figures.catalogue import FIGURES
from pycomm.charts import Chart
from pycomm.plan import draw
from pycomm.plan.__main__ import main as plan

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SWEEP = ["sweep", "350M", "--link", "100gbe", "--compute", "300ms", "--codec", "int8,int4"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="browsers: pip install pycomm[dev]")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser on PATH: one of {', '.join(BROWSERS)}")
    with driver.sync_playwright() as playwright:
        # Its sandbox wants rights that containers rarely have; the pages are our own.
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


def look(browser: Any, path: Path, charts: list[Chart]) -> None:
    """Open a page without a network and hold what is on it to its charts."""
    page = browser.new_page(offline=True)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    for i, chart in enumerate(charts):
        lines = [s for panel in chart.panels for s in (*panel.guides, *panel.series)]
        drawn = page.locator(f"#chart{i} .scatterlayer .trace")
        drawn.last.wait_for()
        assert drawn.count() == len(lines), chart.title
        names = page.locator(f"#chart{i} .legend .legendtext").all_text_contents()
        assert sorted(names) == sorted({line.label for line in lines}), chart.title
        assert hovered(page, i) in {words for line in lines for words in line.hover}, chart.title
    assert {url for url in asked if not url.startswith("data:")} == {path.as_uri()}
    assert said == []
    page.close()


def hovered(page: Any, index: int) -> str:
    """What the page says of the last point of a chart's last line, on which nothing else lies."""
    point = page.locator(f"#chart{index} .scatterlayer .trace").last.locator(".point").last
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = page.locator(f"#chart{index} .hoverlayer .hovertext")
    label.first.wait_for()
    return str(label.first.text_content())


def test_report_is_one_page_that_needs_nothing(browser, tmp_path):
    page = tmp_path / "report.html"
    assert report_page.main(["--html", str(page)]) == 0
    look(browser, page, [figure.of(RESULTS) for figure in FIGURES])


def test_sweep_is_one_page_that_needs_nothing(browser, tmp_path, monkeypatch):
    shown: list[Chart] = []
    of_sweep = draw.of_sweep
    monkeypatch.setattr(draw, "of_sweep", lambda found: shown.append(of_sweep(found)) or shown[0])
    page = tmp_path / "sweep.html"
    assert plan([*SWEEP, "--html", str(page)]) == 0
    look(browser, page, shown)


def test_report_has_what_there_is_and_says_what_is_missing(tmp_path, capsys):
    page, pictures, results = (tmp_path / name for name in ("x.html", "pictures", "results"))
    results.mkdir()
    options = ["--results", str(results), "--html", str(page), "--png", str(pictures)]
    assert report_page.main(options) == 1
    said = capsys.readouterr().err
    for figure in FIGURES:
        assert not figure.table or f"{figure.table}: {figure.command}" in said
    assert not page.exists()

    there = next(figure for figure in FIGURES if figure.name == "error")
    shutil.copy(RESULTS / there.table, results)
    assert report_page.main(options) == 0
    assert there.command in page.read_text()
    assert {path.name for path in pictures.iterdir()} == {"error.png", "predictions.png"}
    assert there.table not in capsys.readouterr().err
