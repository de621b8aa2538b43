"""Do arrays on a GPU give the CPU's digest of the conformance table?

Usage: python -m benchmarks.gpu.same_digest RANKS [further options of `pycollective verify`]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys


def main() -> None:
    """Verify on both; status 1 where either is wrong or the digests differ."""
    ranks, *options = sys.argv[1:]
    digests = {}
    for device in ("cuda", "cpu"):
        command = [sys.executable, "-m", "pycollective", "verify", "-n", ranks]
        done = subprocess.run([*command, "--device", device, *options], stdout=subprocess.PIPE)
        said = done.stdout.decode()
        print("\n".join(line for line in said.splitlines() if not line.startswith("ok")))
        if done.returncode != 0:
            sys.exit(done.returncode)
        [digests[device]] = set(re.findall(r"^digest of .*: (\w+) \(", said, re.MULTILINE))
    print(json.dumps({"ranks": int(ranks), **digests}))
    if digests["cuda"] != digests["cpu"]:
        sys.exit("the digests differ")


if __name__ == "__main__":
    main()
