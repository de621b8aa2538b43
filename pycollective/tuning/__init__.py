"""Measured times, for `algorithm="auto"`: their tables, and the one that a rank goes by."""
