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
SEVERAL = {"one_bit": 12, "int8": 12, "top_k": 26}
BY_TENSOR, BY_CHUNK = {}, {"by": "chunk", "density": 0.05, "chunk": 2048}
CASES = [("one_bit", {}), ("int8", {}), ("top_k", BY_TENSOR), ("top_k", BY_CHUNK)]


MANY = 48


@pytest.mark.parametrize(("codec", "options"), CASES)
def test_a_bucket_of_many_parameters_takes_as_few_launches_as_one(two_hosts, codec, options):
    for one, all_of, mixed in zip(
        *(
            two_hosts(count_launches, codec, "2x1", *each, options)
            for each in [(1, 0), (MANY, 0), (MANY // 2, MANY // 2)]
        ),
        strict=True,
    ):
        assert one.total() == all_of.total(), (one, all_of)
        assert mixed.total() <= MOST[codec], mixed


@pytest.mark.parametrize(("codec", "options"), CASES)
def test_so_it_does_where_hosts_have_several_ranks(four_ranks, codec, options):
    """But for uploads of tables, since what a host adds up lies in other memory each time, and for
    a copy to where there is room for the longest message."""
    for one, many in zip(
        *(four_ranks(count_launches, codec, "2x2", many, 0, options) for many in (1, MANY)),
        strict=True,
    ):
        for each in (one, many):
            each.pop("aten.clone.default", None)
            each.pop("aten.copy_.default", None)
        assert one == many
        assert one.total() <= SEVERAL[codec], one
