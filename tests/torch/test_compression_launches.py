"""How many kernels and torch operations a bucket takes on a device, however many parameters it has.

Each costs the host 6 to 20 microseconds, and a backward has dozens of parameters.
"""

from __future__ import annotations

import pytest

from tests.torch.compressed import ranks_of
from tests.torch.launches import count_launches

two_hosts = ranks_of(__name__, 2)
four_ranks = ranks_of(__name__, 4)
MOST = {"one_bit": 12, "int8": 12, "top_k": 20}
BY_TENSOR, BY_CHUNK = {}, {"by": "chunk", "density": 0.05}
CASES = [("one_bit", {}), ("int8", {}), ("top_k", BY_TENSOR), ("top_k", BY_CHUNK)]


@pytest.mark.parametrize(("codec", "options"), CASES)
def test_a_bucket_of_many_parameters_takes_as_few_launches_as_one(two_hosts, codec, options):
    for one, many in zip(
        *(two_hosts(count_launches, codec, "2x1", many, options) for many in (1, 48)), strict=True
    ):
        assert one.total() == many.total(), (one, many)
        assert one.total() <= MOST[codec], one


@pytest.mark.parametrize(
    ("codec", "options"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.storm) for case in CASES[1:])],
)
def test_so_it_does_where_hosts_have_several_ranks(four_ranks, codec, options):
    for one, many in zip(
        *(four_ranks(count_launches, codec, "2x2", many, options) for many in (1, 48)), strict=True
    ):
        assert one.total() == many.total(), (one, many)
