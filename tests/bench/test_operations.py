"""nccl-tests' definitions, with numbers worked out by hand."""

import pytest

from pycollective import ConfigurationError
from pycollective.bench.operations import bandwidths, find_operation


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("reduce_scatter", 4, 0.75),
        ("all_gather", 2, 0.5),
        ("all_gather", 8, 0.875),
        ("broadcast", 2, 1.0),
        ("broadcast", 8, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bandwidths(name, ranks, factor):
    # 3 GB in 2 s.
    algbw, busbw = bandwidths(find_operation(name), 3_000_000_000, 2.0, ranks)
    assert algbw == 1.5
    assert busbw == pytest.approx(1.5 * factor)


def test_count_is_of_the_message_or_of_one_shard():
    assert find_operation("all_reduce").count(4096, 4, 4) == 1024
    assert find_operation("broadcast").count(4096, 2, 4) == 2048
    assert find_operation("all_gather").count(4096, 4, 4) == 256
    assert find_operation("reduce_scatter").count(4096, 4, 4) == 256


def test_sizes_with_shards_round_down_to_equal_ones():
    assert find_operation("all_gather").whole(1024, 4, 3) == 1020
    assert find_operation("reduce_scatter").whole(65536, 2, 3) == 65532
    assert find_operation("all_reduce").whole(1024, 4, 3) == 1024


def test_bytes_that_a_rank_touches():
    assert find_operation("all_reduce").touched(4) == 2
    assert find_operation("all_gather").touched(4) == 1.25
    assert find_operation("reduce_scatter").touched(2) == 1.5
    assert find_operation("broadcast").touched(2) == 1


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("all_reduce", 1022, "not whole elements of 4 bytes"),
        ("all_gather", 8, "-b 12 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(name, size, words):
    with pytest.raises(ConfigurationError, match=words):
        find_operation(name).whole(size, 4, 3)


def test_an_unknown_operation_is_an_error_that_lists_those_there_are():
    with pytest.raises(ConfigurationError, match=r"'allreduce'.*all_reduce, reduce_scatter"):
        find_operation("allreduce")
