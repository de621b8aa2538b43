"""How fast is all-reduce on two ranks, beside Gloo and the MPIs, and how near to the limit?"""

from benchmarks.question import PEERS, SIZES, Question, main
from pycollective.bench.settings import Settings

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
