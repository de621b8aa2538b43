import pycollective as pc
from pycollective.compression import TopKState

with pc.init() as comm:
    TopKState({"w": (64, 64)}, comm, density=0.01, values="bfloat61")  # wrong: "values"
