"""Starts ranks on this host: what is behind `pycollective run`."""
