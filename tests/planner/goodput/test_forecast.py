"""When a run ends: worse conditions never make it end sooner, and another spare never later."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from meshplan.planner.goodput.conditions import FailureRate
from meshplan.planner.goodput.forecast import Ending, ending
from meshplan.planner.goodput.run import RunSetting

DAY = 86_400.0
DEVICES, TRAINING_S = 512, 20.0 * DAY
# Probabilities are told in whole per cent; chance is taken as lognormal, and its tails may cross by less.
TAILS = 0.01
NOTHING = 1e-6
SETTINGS = st.builds(
    RunSetting,
    rate=st.floats(1e-3, 0.3).map(
        lambda rate: FailureRate(per_node_day=rate, low=rate / 2, high=2 * rate, source="drawn")
    ),
    devices_per_node=st.sampled_from([1, 8]),
    restart_s=st.floats(30.0, 3600.0),
    broken_share=st.floats(0.0, 1.0),
    repair_s=st.floats(3600.0, 3 * DAY),
    spares=st.integers(0, 6),
    late_share=st.just(0.0),
    late_s=st.just(0.0),
    slowdown=st.floats(1.0, 1.3),
    state_bytes=st.just(1e12),
    store_bytes_per_s=st.floats(1e9, 1e11),
    snapshot_bytes_per_s=st.sampled_from([None, 12e9]),
    finish_by_s=st.floats(20.0, 60.0).map(lambda days: days * DAY),
)


def end_of(setting: RunSetting) -> Ending:
    return ending(setting, DEVICES, TRAINING_S, spread=1.1)


def is_no_sooner(later: Ending, sooner: Ending) -> bool:
    assert later.by_date is not None
    assert sooner.by_date is not None
    return later.mean_s >= sooner.mean_s * (1 - NOTHING) and later.by_date <= sooner.by_date + TAILS


@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(SETTINGS, st.floats(1.05, 3.0))
def test_worse_conditions_never_end_a_run_sooner(setting: RunSetting, times: float) -> None:
    usual, rate = end_of(setting), setting.rate
    rate = replace(rate, **{name: times * getattr(rate, name) for name in ("per_node_day", "low", "high")})
    for worse in (
        replace(setting, rate=rate),
        replace(setting, restart_s=times * setting.restart_s),
        replace(setting, repair_s=times * setting.repair_s),
        replace(setting, slowdown=times * setting.slowdown),
        replace(setting, store_bytes_per_s=setting.store_bytes_per_s / times),
    ):
        assert is_no_sooner(end_of(worse), usual)
    assert is_no_sooner(usual, end_of(replace(setting, spares=setting.spares + 1)))


@settings(max_examples=6, deadline=None)
@given(SETTINGS)
def test_its_parts_agree(setting: RunSetting) -> None:
    found = end_of(setting)
    assert found.low_s <= found.high_s
    assert found.ratio_low <= found.ratio_high
    assert found.by_date is not None
    assert 0.0 <= found.by_date <= 1.0
    # Nobody ends before a run that nothing interrupts, at the fastest step that is believed.
    early = replace(setting, finish_by_s=0.99 * TRAINING_S * setting.slowdown / 1.1**2)
    assert end_of(early).by_date == 0.0
