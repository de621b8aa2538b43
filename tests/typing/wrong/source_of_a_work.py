import numpy as np

import pycollective as pc

with pc.init() as comm:
    source: int = comm.recv(np.empty(4), async_op=True)  # wrong: "Work[int]"
