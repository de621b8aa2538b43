"""How many ranks there can be."""

MAX_RANKS_PER_HOST = 64  # the width of the masks in shared memory: kMaxMembers
# Of a world, on however many hosts: what is tested. Native code checks only what its numbers can
# count, which is more: kCountableRanks (csrc/types.h).
MAX_RANKS = 4096
