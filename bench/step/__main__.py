"""Makes `python -m pycomm.bench.step` a program."""

import sys

from pycomm.bench.step.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
