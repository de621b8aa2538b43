"""Leaves that are micro-batches: who gives which, their sums, and the reductions of these."""
