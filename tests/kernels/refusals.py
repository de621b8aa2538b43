"""What tests of refused arguments share."""

from __future__ import annotations

import pytest

from pycollective import ConfigurationError


def refused(match, function, *arguments):
    with pytest.raises(ConfigurationError, match=match):
        function(*arguments)


def read_only(array):
    """The array itself, which nothing may write to any more."""
    array.flags.writeable = False
    return array
