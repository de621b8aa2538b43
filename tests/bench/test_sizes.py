import pytest

from pycollective import ConfigurationError
from pycollective.bench.settings import format_size, ladder, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("64K", 65536),
        ("64k", 65536),
        ("64KiB", 65536),
        ("1.5M", 3 << 19),
        (" 2G ", 2 << 30),
        ("8B", 8),
    ],
)
def test_suffixes_are_binary(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "12X", "-4", "1e3", "0.3K", "4 K 5"])
def test_what_is_no_size_is_an_error_that_quotes_it(text):
    with pytest.raises(ConfigurationError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 65536, 3 << 19, 5 << 30])
def test_formatting_is_undone_by_parsing(size):
    assert parse_size(format_size(size)) == size


def test_a_factor_climbs_to_the_end_and_includes_it():
    assert ladder(1024, 16384, 0, 2) == [1024, 2048, 4096, 8192, 16384]
    assert ladder(1000, 9999, 0, 3) == [1000, 3000, 9000]


def test_a_step_climbs_evenly():
    assert ladder(100, 450, 100, 0) == [100, 200, 300, 400]


def test_a_factor_that_rounds_to_nothing_still_climbs():
    assert ladder(1, 4, 0, 1.1) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("begin", "end", "step", "factor"), [(0, 8, 0, 2), (8, 4, 0, 2), (4, 8, 0, 1), (4, 8, 0, 0)]
)
def test_a_ladder_that_leads_nowhere_is_an_error(begin, end, step, factor):
    with pytest.raises(ConfigurationError):
        ladder(begin, end, step, factor)
