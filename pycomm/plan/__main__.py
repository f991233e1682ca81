"""The planner's command line.

python -m pycomm.plan 25M --ranks 8 --link 1gbit --compute 120ms
python -m pycomm.plan probe --out probe.json
python -m pycomm.plan 7B --ranks 64 --probe probe.json --compute 1.4s
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pycomm.plan import options, show
from pycomm.plan.advice import ERROR, advise
from pycomm.plan.prediction import best_of_each, predict


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["probe"]:
        from pycomm.plan.probe import cli  # needs the native build

        return cli.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.plan",
        description="Predicts a training step with each codec, and says which to use, or none. "
        "`plan probe` measures links and codecs.",
    )
    options.add_what(parser)
    given = parser.parse_args(argv)
    try:
        model, cluster = options.model(given), options.cluster(given, given.ranks)
    except ValueError as error:
        parser.error(str(error))
    found = predict(model, cluster, options.chosen(given))
    limit = ERROR if given.max_error is None else given.max_error
    advice = advise(cluster, found, error=limit)
    show.table(show.HEAD, [show.row(p) for p in best_of_each(found)], show.describe(model, cluster))
    show.advice(advice)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
