"""What `pycollective bench` measures, and how.

settings.py     what the user asked for, checked; sizes as text
operations.py   what is measured, with order-sensitive inputs and the reference's answer
libraries.py    what is compared: how each library's ranks are started
group.py        one library's rank processes, as the driver sees them
ranks/          the rank process itself; runs in any environment with NumPy
machine.py      what the machine is, and its limits: streaming, copies and latency
phase.py        whether caches are near or far, and turns of one phase
measurement.py  the interleaved run
record.py       its results, and the JSON file
table.py        a run on the console, in the columns of nccl-tests
plot.py         its results as a picture
codec.py        `--codec`: a codec beside dense calls
tune.py         `--tune`: every algorithm, for a table that `init` reads
"""
