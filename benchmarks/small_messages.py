"""What does a small call cost: in C++, from Python, and through torch.distributed?"""

from benchmarks.question import KI, PEERS, Question, main
from pycollective.bench.libraries import find_peers
from pycollective.bench.settings import Settings

QUESTION = Question(
    "small all-reduces, 2 ranks: what does a call cost in C++, from Python, through torch?",
    {
        "small_messages": Settings(
            "all_reduce",
            (16, 64, 256, KI, 4 * KI, 16 * KI),
            ranks=2,
            peers=(*find_peers("native,torch"), *PEERS),
            rounds=11,
        )
    },
)

if __name__ == "__main__":
    main(QUESTION)
