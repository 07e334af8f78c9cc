"""Rows of expert tables that cannot be what they are called are found by physics; sound ones are kept."""

from __future__ import annotations

import pytest

from meshplan.profiler.shipped.expert_tables import Kernel, Row, Times, plausible, slower_when_balanced, unsplit

QWEN3 = (4096.0, 1536.0, 8.0, 128.0)
DEEPSEEK_V3 = (7168.0, 2048.0, 8.0, 256.0)
MIXTRAL = (4096.0, 14336.0, 2.0, 8.0)
Curve = dict[int, float]


def rows(model: tuple[float, float, float, float], curve: Curve, *, skew: float = 0.0, tokens: float = 8192.0) -> Times:
    return {Row(tokens, *model, float(devices), skew): 1e-3 * ms for devices, ms in curve.items()}


# Times in ms of the wheel's tables, H200, 8192 tokens; fp8_block, but Mixtral's are B200.
SOUND = rows(QWEN3, {1: 4.95, 2: 2.51, 4: 1.3, 8: 0.67, 16: 0.37, 32: 0.2})
CARRIED_OVER = rows(QWEN3, {1: 4.01, 2: 3.84, 4: 3.77, 8: 3.79, 16: 1.98, 32: 0.95})
MIXTRAL_CARRIED_OVER = rows(MIXTRAL, {1: 5.8, 2: 5.795, 4: 2.898, 8: 1.458})
# A large share of this kernel's time does not depend on the degree, but the rest is shared.
OVERHEAD = rows(DEEPSEEK_V3, {1: 11.73, 2: 6.89, 4: 4.36, 8: 2.96, 16: 2.44, 32: 2.13})
TIES = rows(DEEPSEEK_V3, {2: 9.95, 4: 7.3, 8: 5.96, 16: 5.18, 32: 4.99, 64: 4.71, 128: 2.45, 256: 1.28})
SKEWED = rows(DEEPSEEK_V3, {2: 7.92, 4: 5.03, 8: 3.46, 16: 2.39, 32: 2.09, 64: 1.9, 128: 1.77, 256: 0.94}, skew=1.01)


@pytest.mark.parametrize("times", [CARRIED_OVER, MIXTRAL_CARRIED_OVER])
def test_devices_that_take_as_long_as_one_did_not_share(times: Times) -> None:
    assert unsplit(times)


@pytest.mark.parametrize(
    "times", [SOUND, OVERHEAD, TIES, {}, rows(QWEN3, {1: 4.95}), rows(QWEN3, {1: 1, 8: 1}, tokens=64)]
)
def test_devices_that_share_are_believed(times: Times) -> None:
    assert not unsplit(times)


def test_balanced_routing_that_is_slower_than_skewed_is_not_balanced() -> None:
    assert slower_when_balanced(TIES | SKEWED)
    assert not slower_when_balanced(OVERHEAD | rows(DEEPSEEK_V3, {2: 8.06, 4: 5.13, 8: 3.59}, skew=1.01))
    assert not slower_when_balanced(TIES)


def test_the_ties_of_the_router_explain_what_was_measured() -> None:
    # Half of the choices fall on the first four experts, the others on the first half of all: (4 + 8/ep)/8 of them for
    # 4 ≤ ep ≤ 64. Relative to two devices, where the first has all.
    for row, time_s in TIES.items():
        if 4 <= row.devices <= 64:
            assert time_s / 9.95e-3 == pytest.approx((4.0 + 8.0 / row.devices) / 8.0, rel=0.1)


def test_what_is_left_out_of_a_kernel() -> None:
    def kernel(name: str, model: tuple[float, float, float, float]) -> Kernel:
        return ("fp8_block", name, model[0], model[2], model[3])

    tables = {
        kernel("new", QWEN3): SOUND,
        kernel("new", DEEPSEEK_V3): TIES | SKEWED,
        kernel("old", QWEN3): CARRIED_OVER,
        kernel("old", MIXTRAL): MIXTRAL_CARRIED_OVER,
        kernel("old", DEEPSEEK_V3): OVERHEAD,  # sound in itself, but of a kernel whose models mostly are not
    }
    left = plausible(tables)
    assert left[kernel("new", QWEN3)] == SOUND
    assert left[kernel("new", DEEPSEEK_V3)] == SKEWED
    assert {row.devices for name in (QWEN3, MIXTRAL, DEEPSEEK_V3) for row in left[kernel("old", name)]} == {1.0}
