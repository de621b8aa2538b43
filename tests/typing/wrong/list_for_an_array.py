import pycollective as pc

with pc.init() as comm:
    comm.all_reduce([1.0, 2.0])  # wrong: "list[float]"
