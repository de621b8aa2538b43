"""How a missing piece is installed, for messages: this project is installed from its sources."""

FROM_SOURCE = "in pycollective's source folder: pip install --no-build-isolation"

PLOT = "pip install matplotlib"
# The extra `torch` would come too late: the backend is built before its dependencies are installed.
BACKEND = f"{FROM_SOURCE} ."
TORCH = f"pip install 'torch>=2.11,<3', then {BACKEND}"
MPI = "pip install mpi4py beside the MPI whose mpiexec it is"
