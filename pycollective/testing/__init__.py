"""Inputs and arrays for tests, the benchmark and `pycollective verify`."""
