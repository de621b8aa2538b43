"""What `pycollective bench` measures, and how.

One file an idea:

    settings.py     what the user asked for, checked
    sizes.py        sizes with suffixes, and the ladder of sizes between -b and -e
    operations.py   what is measured: bus-bandwidth factors, shards, bytes touched
    problem.py      order-sensitive inputs and the oracle's answer, in shared memory
    libraries.py    what is compared: how each library's ranks are started
    group.py        one library's rank processes, as the driver sees them
    ranks/          the rank process itself; runs in any environment with NumPy
    limits.py       what the machine allows: streaming, core-to-core copies and latency
    machine.py      what the machine is
    measurement.py  the interleaved run
    record.py       its results, and the JSON file
    table.py        its results in the columns of nccl-tests
    plot.py         its results as a picture
    console.py      a run on the console, with its progress line
"""
