"""What kernels of compression are told of a whole bucket: tables of segments.

A *segment* is a part of one parameter that lies side by side in memory, and in one message. A table
has a row of int64 for each, with the columns below; kernels of CPUs and of GPUs take the same.
Addresses are of memory that the caller keeps, and has looked at: kernels trust them.

What a call finds is in an array of int32, `found`, which all its kernels are given. Of a call about
n parameters:

    [BAD]                  1 where something is not finite, or ranks differ: results are NaN
    [DIFFERS]              1 where a message does not fit, or cannot be read
    [NONZERO + item]       1 where this rank's part of a parameter's gradient is not all zero
    [zero_at(n) + item]    1 where all hosts' parts are all zero
    [unused_at(n) + item]  1 where an average is all zero, to which an error was to be added

(Words 2 and 3 are free.) Behind these lie the headers that came, for the host to look at, and what
other ranks have told in the end: [BAD] and [DIFFERS] of each.
"""

from __future__ import annotations

# Columns.
ADDRESS = 0  # of the first element of the gradient, or of what becomes its average
DTYPE = 1  # of these: a number of `DTYPES`
COUNT = 2  # elements
ITEM = 3  # the parameter's number in the call
AT = 4  # its first byte in a message; of top-k, unless K is 0, the place of its first element
K = 5  # 0: goes as it is, in fp32. Of top-k how many are taken (by chunk: of each chunk), else 1
HELD = 6  # the address of the old residual, fp32; 0: nothing is held
LEFT = 7  # the address of the new one, fp32
ENTRY = 8  # of top-k, where its first place and value go; of what came, its local shard
COLUMNS = 9

DTYPES = ("float32", "float16", "bfloat16")

# Of what a call finds.
BAD, DIFFERS, NONZERO = 0, 1, 4


def zero_at(items: int) -> int:
    """Where the parameters that are all zero on all hosts begin in `found`."""
    return NONZERO + items


def unused_at(items: int) -> int:
    """Where the averages that are all zero begin in `found`."""
    return NONZERO + 2 * items


def heads_at(items: int) -> int:
    """Where the headers that came begin in the bytes of `found`."""
    return 4 * (NONZERO + 3 * items)
