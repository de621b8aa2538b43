"""What if there are more ranks than cores (four on two, say)?"""

from benchmarks.question import PEERS, SIZES, Question, main
from pycollective.bench.settings import Settings

QUESTION = Question(
    "all-reduce, 4 ranks: what if there are more ranks than cores?",
    {
        f"all_reduce_4_ranks_{dtype}": Settings(
            "all_reduce", SIZES, ranks=4, dtype=dtype, peers=PEERS
        )
        for dtype in ("float32", "bfloat16")
    },
)

if __name__ == "__main__":
    main(QUESTION)
