"""The benchmarks' command line.

python -m pycomm.bench all_reduce -b 8 -e 64M -f 4 -p 2 --backend pycomm,gloo
python -m pycomm.bench codecs
python -m pycomm.bench time_to_loss
"""

from __future__ import annotations

import sys

from pycomm.bench import collectives


def main() -> int:
    argv = sys.argv[1:]
    if argv[:1] == ["codecs"]:
        from pycomm.bench import codecs  # needs torch, which collectives of the core do not

        return codecs.main(argv[1:])
    if argv[:1] == ["time_to_loss"]:
        from pycomm.bench import time_to_loss

        return time_to_loss.main(argv[1:])
    return collectives.main(argv)


if __name__ == "__main__":
    sys.exit(main())
