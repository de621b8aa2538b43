import numpy as np

import pycollective as pc

with pc.init() as comm:
    comm.all_reduce(np.ones(4), op="mean")  # wrong: "str"
