import numpy as np

import pycollective as pc

with pc.init() as comm:
    total = comm.reduce(np.ones(4), root=0)
    print(total.sum())  # wrong: "None"
