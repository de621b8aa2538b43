"""How long a turn is."""

import pytest

from pycollective.bench.measurement import calls_a_block


@pytest.mark.parametrize(
    ("seconds", "calls"),
    [
        (1e-9, 20_000),
        (1e-6, 4_000),  # five blocks fill the 20 ms
        (1e-3, 10),  # 4 would fill them
        (6e-3, 8),  # no turn above 0.25 s
        (0.04, 1),
        (1.0, 1),
    ],
)
def test_calls_a_block(seconds, calls):
    assert calls_a_block(seconds, round_seconds=0.02) == calls
