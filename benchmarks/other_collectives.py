"""How fast are reduce-scatter, all-gather and broadcast?"""

from benchmarks.question import KI, MI, PEERS, Question, main
from pycollective.bench.settings import Settings, ladder

QUESTION = Question(
    "reduce-scatter, all-gather, broadcast, 2 ranks: how fast beside Gloo, MPICH and Open MPI?",
    {
        f"{operation}_2_ranks": Settings(
            operation, tuple(ladder(KI, 64 * MI, 0, 4)), ranks=2, peers=PEERS
        )
        for operation in ("reduce_scatter", "all_gather", "broadcast")
    },
)

if __name__ == "__main__":
    main(QUESTION)
