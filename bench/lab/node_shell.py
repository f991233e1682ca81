"""A replacement for ssh that Open MPI uses when its nodes are namespaces (netlab.py).

    python node_shell.py 10.77.0.2 COMMAND...

runs a command line on the node of that address; `NETLAB_NODES` maps each address, as JSON, to the
command that enters the node.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    address, *command = sys.argv[1:]
    enter = json.loads(os.environ["NETLAB_NODES"])[address]
    os.execvp(enter[0], [*enter, "sh", "-c", " ".join(command)])


if __name__ == "__main__":
    main()
