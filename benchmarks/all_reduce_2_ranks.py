"""How fast is all-reduce on two ranks, beside Gloo and the MPIs, and how near to the limit?"""

from benchmarks.question import SIZES, Question, main
from pycollective.bench.libraries import find_peers
from pycollective.bench.settings import Settings

# Without cross-memory attach Open MPI is faster on some sizes and slower on others: both are shown.
PEERS = tuple(find_peers("gloo,mpich,openmpi,openmpi-nocma"))

QUESTION = Question(
    "all-reduce, 2 ranks: how fast beside Gloo, MPICH and Open MPI, and how near to the limit?",
    {
        f"all_reduce_2_ranks_{dtype}": Settings(
            "all_reduce", SIZES, ranks=2, dtype=dtype, peers=PEERS
        )
        for dtype in ("float32", "bfloat16", "float16")
    },
)

if __name__ == "__main__":
    main(QUESTION)
