import pycollective as pc

comm = pc.init(wire="bf17")  # wrong: "wire"
comm.close()
