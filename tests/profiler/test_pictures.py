"""Pictures: every link is in them, nothing is loaded from elsewhere, names cannot break out."""

from __future__ import annotations

from itertools import permutations
from xml.etree import ElementTree as ET

from meshplan.catalogs.measurements.types import ClusterProfile, MeasuredLink, Measurement, Metric, ProfileRun, Spread
from meshplan.profiler.pictures import cluster_page, device_page, terminal_matrix

NAMES = ("a", "<b>", "c&d")


def profile() -> ClusterProfile:
    links = tuple(
        MeasuredLink(
            source=source,
            target=target,
            rail="eth0",
            bandwidth_bytes_per_s=Spread(value=10.0**number, low=10.0**number, high=10.0**number, n=1),
            latency_s=Spread(value=1e-5, low=1e-5, high=1e-5, n=1),
        )
        for number, (source, target) in enumerate(permutations(NAMES, 2), start=6)
        if (source, target) != ("a", "<b>")
    )
    return ClusterProfile(
        name="lab",
        run_id="1",
        measured_at="2026-11-21T00:00:00+00:00",
        endpoints=NAMES,
        links=links,
        unmeasured=(("a", "<b>"),),
        findings=("slow link a -> <b>",),
    )


def svgs(page: str) -> list[ET.Element]:
    parts = page.split("<svg")[1:]
    return [ET.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in parts]


def test_the_heat_map_has_every_link_and_no_other_address() -> None:
    page = cluster_page(profile())
    (picture,) = svgs(page)
    titles = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 5
    assert "c&d → a: 10.0 GB/s" in titles
    assert "<b>" not in page.replace("&lt;b&gt;", "")
    for outside in ("<script", "href", "src=", "@import", "url("):
        assert outside not in page


def test_the_terminal_shows_shades_and_what_is_missing() -> None:
    text = terminal_matrix(profile())
    lines = text.splitlines()
    assert "·" in lines[2]
    assert "█" in text
    assert lines[-1] == "slow link a -> <b>"


def test_curves_of_a_device() -> None:
    rows = [
        Measurement(
            probe="gemm",
            device="cpu",
            dtype="fp32",
            parameters={"m": size, "n": size, "k": size},
            metric=Metric.FLOPS_PER_S,
            spread=Spread(value=size * 1e9, low=size * 9e8, high=size * 1.2e9, n=5),
            source="test",
            host="h",
            measured_at="2026-11-21T00:00:00+00:00",
        )
        for size in (128, 256, 512)
    ]
    run = ProfileRun(run_id="1", kind="device", host="h", environment={}, protocol={}, started_at="2026-11-21")
    (chart,) = svgs(device_page(run, rows))
    assert len(list(chart.iter("{http://www.w3.org/2000/svg}circle"))) == 3
