"""How a missing piece is installed, for messages: true of a wheel and of an editable install."""

PLOT = "pip install matplotlib"
TORCH = "pip install 'torch>=2.12,<2.15'"
BACKEND = "pycollective build-torch"
MPI = "pip install mpi4py beside the MPI whose mpiexec it is"
