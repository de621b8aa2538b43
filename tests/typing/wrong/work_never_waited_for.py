import numpy as np

import pycollective as pc

with pc.init() as comm:
    y = comm.all_reduce(np.ones(4), async_op=True)
    print(y.sum())  # wrong: "Work[
