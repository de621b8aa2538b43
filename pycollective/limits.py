"""How many ranks there can be."""

MAX_RANKS_PER_HOST = 64  # the width of the masks in shared memory: kMaxMembers
MAX_RANKS = 4096  # of a world, on however many hosts
