"""A rank process of `pycollective bench`, and what driver and ranks share.

Runs in any environment with NumPy: nothing here imports the package, except library_own.py and,
through torch, library_torch.py. An MPI peer's ranks run in that MPI's own environment, started as
`python -m ranks` with this package's parent folder on PYTHONPATH.

Between measurements a rank blocks in a read of its control channel, so that the ranks of the other
libraries have the cores for themselves.
"""
