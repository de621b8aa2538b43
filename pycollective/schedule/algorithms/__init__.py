"""The algorithms: which rank hands which shard to whom in each step, a file each."""
