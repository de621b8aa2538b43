"""Ledgers: the digests of what each step reduced, and where two runs part (ledger.md)."""
