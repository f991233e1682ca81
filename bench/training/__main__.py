"""`python -m pycomm.bench.training`: one training, of which train.py has the code."""

import sys

from pycomm.bench.training.train import main

if __name__ == "__main__":
    sys.exit(main())
