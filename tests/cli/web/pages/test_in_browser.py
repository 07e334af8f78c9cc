"""The pages in a browser: nothing breaks, nothing is kept from anybody, and a whole story from question to files."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("pages")
NARROW, WIDE = 340, 1180
# Name → path, with plans by their names.
PAGES = {
    "ask": "/?example=training",
    "text": "/?text_of=allocation",
    "answer of training": "/plans/{large}",
    "answer of serving": "/plans/{serving}",
    "answer of a mapping": "/plans/{mapping}",
    "plans": "/plans",
    "compare": "/compare?plans={small},{large}",
    "choose": "/compare",
    "measured": "/compare?plans={large}",
    "what if": "/plans/{serving}/what-if",
    "runs": "/runs",
    "catalog": "/catalog",
    "prices": "/catalog/prices",
    "entry": "/catalog/devices/h100-sxm-80gb",
    "model": "/catalog/models/llama-3.1-8b",
    "nothing": "/plans/none",
}
WAIT_MS = 90_000  # a search on a machine that others use takes a while


# Tables of the pages that people read on a telephone; those of figures behind "details" scroll.
READ = ("answer of training", "answer of serving", "plans", "compare")
HIDDEN = """() => [...document.querySelectorAll("main .scroll")]
  .filter(one => one.querySelector("table") && one.clientWidth > 0 && one.scrollWidth > one.clientWidth + 1)
  .map(one => one.getAttribute("aria-label"))"""


@pytest.fixture
def opened(chromium: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end nothing may have been complained of."""
    contexts, complaints = [], []

    def open_page(path: str, *, width: int = WIDE, scheme: str = "light", scripts: bool = True) -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts
        )
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{path}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"{path}: {error}"))
        page.goto(f"{address}{path}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    # That a page says 404, or 422 of a question that is none, is what was asked for.
    refused = ("status of 404", "status of 422")
    assert [one for one in complaints if not any(words in one for words in refused)] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_page_can_be_used_by_everybody(
    opened: Callable[..., Any], plans: dict[str, str], accessibility: str, name: str
) -> None:
    page = opened(PAGES[name].format(**plans))
    assert page.locator("h1").inner_text().strip()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(accessibility) == [], scheme
    page.set_viewport_size({"width": NARROW, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")


@pytest.mark.parametrize("name", READ)
def test_no_table_hides_a_column(opened: Callable[..., Any], plans: dict[str, str], name: str) -> None:
    """Why not, for one, is the last of them."""
    page = opened(PAGES[name].format(**plans), width=NARROW)
    assert page.evaluate(HIDDEN) == []
    page.set_viewport_size({"width": WIDE, "height": 900})
    assert page.evaluate(HIDDEN) == []


def test_the_keyboard_reaches_everything_and_shows_where_it_is(
    opened: Callable[..., Any], plans: dict[str, str]
) -> None:
    page = opened(f"/plans/{plans['serving']}")
    visited = []
    for _ in range(400):
        page.keyboard.press("Tab")
        focus = page.evaluate(
            """() => { const one = document.activeElement; const style = getComputedStyle(one);
            return [one.tagName, one.getAttribute("href") ?? one.textContent.slice(0, 30),
                    style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2]; }"""
        )
        if focus[0] == "BODY":
            break
        visited.append(tuple(focus))
    assert [one for one in visited if not one[2]] == []
    assert visited[0] == ("A", "#main", True)
    links = page.locator("a[href]").count() - page.locator("details:not([open]) a[href]").count()
    assert sum(tag in {"A", "a"} for tag, _, _ in visited) == links


def test_a_question_becomes_files(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened("/?example=training")
    page.get_by_label("GPUs").fill("1xdgx-h100")
    page.get_by_label("Model").fill("llama-3.1-8b")
    page.get_by_label("Batch of a step").fill("64")
    page.get_by_label("Tokens of a sequence").fill("4096")
    page.locator("#yaml", has_text="global_batch_size: 64").wait_for()
    assert "gpus=1xdgx-h100" in page.url
    page.get_by_role("button", name="Find the best plan").first.click()
    page.wait_for_url("**/plans/*")
    assert page.locator("h1").inner_text().startswith("8 GPUs = ")
    assert "A step takes about" in page.locator(".lede").inner_text()
    chosen = page.locator(".candidates tr.chosen")
    assert chosen.get_by_role("img", name="chosen").count() == 1
    plan_id = page.url.rpartition("/")[2]
    with page.expect_download() as download:
        page.locator("#files ~ ul a", has_text="megatron").first.click()
    download.value.save_as(tmp_path / "files.zip")
    with zipfile.ZipFile(tmp_path / "files.zip") as archive:
        assert "launch.sh" in archive.namelist()
    page.get_by_role("link", name="Compare with TP8").click()
    page.wait_for_url("**/instead?choice=*")
    assert page.locator("h1").inner_text() == "With tensor_parallel=8"
    assert "step time" in page.locator(".lede").inner_text()
    row = page.locator("table.compared tr", has_text="step time").inner_text()
    assert "worse" in row or "better" in row
    page.get_by_role("link", name="Back to the plan").click()
    assert page.url.endswith(plan_id)


def test_the_form_says_what_is_wrong_at_its_field(opened: Callable[..., Any]) -> None:
    page = opened("/?example=serving")
    page.get_by_label("Model").fill("llama-3.1-70x")
    page.locator("#errors-model", has_text="did you mean").wait_for()
    assert page.get_by_label("Model").get_attribute("aria-invalid") == "true"
    page.get_by_label("Latency limits").fill("ttft_p99=fast")
    page.locator("#errors-slo li").wait_for()
    page.get_by_role("button", name="Find the best plan").first.click()
    page.locator("#errors-slo li").wait_for()
    assert page.get_by_label("Model").input_value() == "llama-3.1-70x"


def test_the_editor_begins_with_the_form_and_checks_what_is_written(opened: Callable[..., Any]) -> None:
    page = opened("/?example=serving")
    page.get_by_role("tab", name="Form").press("ArrowRight")
    editor = page.get_by_label("A spec of any kind")
    assert "kind: serving" in editor.input_value()
    editor.fill("kind: serving\nmodel: 7")
    page.locator("#text-errors li").first.wait_for()


def test_sliders_move_the_figures_and_the_address(opened: Callable[..., Any], plans: dict[str, str]) -> None:
    page = opened(f"/plans/{plans['serving']}/what-if")
    cost = page.locator("#figures tr", has_text="cost of a million output tokens").locator("td").nth(1)
    before = cost.inner_text()
    page.get_by_label("Price of a GPU", exact=True).fill("8")
    page.wait_for_url("**price=8**")
    figures = page.locator("#figures tr", has_text="cost of an hour")
    figures.locator("td.strong", has_text="$8.00").wait_for()
    assert cost.inner_text() != before
    page.reload()
    assert page.get_by_label("Price of a GPU", exact=True).input_value() == "8"
    page.get_by_role("button", name="Back to the plan").click()
    page.locator("#figures tr", has_text="cost of a million output tokens").locator(f"td:has-text('{before}')").nth(
        1
    ).wait_for()


def test_a_point_of_the_front_leads_to_its_row(opened: Callable[..., Any], plans: dict[str, str]) -> None:
    page = opened(f"/plans/{plans['serving']}")
    page.locator(".plot a").first.click()
    row = page.locator("#front-1")
    row.wait_for(state="visible")
    assert row.evaluate("(row) => row === document.activeElement")


def test_the_search_can_be_stopped_and_keeps_its_best(opened: Callable[..., Any], address: str) -> None:
    page = opened("/?text_of=serving")
    page.get_by_label("A spec of any kind").fill(
        "kind: training\nmodel: llama-3.1-405b\ncluster: {nodes: [{type: dgx-h100, count: 1280}]}\n"
        "workload: {sequence_length: 8192, global_batch_size: 2560}\n"
    )
    page.locator("#text button[type=submit]").click()
    page.wait_for_url("**/jobs/*")
    stop = page.get_by_role("button", name="Stop, and keep the best so far")
    page.locator("h1", has_text="Searching").wait_for()
    assert page.locator("[aria-live]").count() >= 1
    stop.click()
    page.locator("h1", has_text=re.compile("GPUs = |Cancelled")).wait_for()


def test_pages_work_without_scripts(opened: Callable[..., Any], plans: dict[str, str]) -> None:
    page = opened("/?example=serving", scripts=False)
    assert "kind: serving" in page.locator("#yaml").inner_text()
    page.get_by_label("Model").fill("nobody-knows-me")
    page.get_by_role("button", name="Find the best plan").first.click()
    page.locator("#errors-model li").wait_for()
    figures = opened(f"/plans/{plans['serving']}/what-if?price=8", scripts=False)
    assert figures.get_by_role("button", name="Estimate").is_visible()


def test_the_page_prints(opened: Callable[..., Any], plans: dict[str, str]) -> None:
    page = opened(f"/plans/{plans['large']}")
    page.emulate_media(media="print")
    assert not page.locator(".actions").first.is_visible()
    assert page.locator("h1").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_other_choices_stay_out_of_reach_of_other_sites(chromium: Any, address: str) -> None:
    page = chromium.new_page()
    page.set_content(
        f'<form method="post" action="{address}/ask"><input name="model" value="x"><button>go</button></form>'
    )
    page.get_by_role("button").click()
    page.locator("li", has_text="another site").wait_for()
    page.close()
