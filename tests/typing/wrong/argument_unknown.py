import pycollective as pc

comm = pc.Communicator(0, 4)  # wrong: Too many arguments
