"""torchrun's own launcher, started by `wide run --on torchrun`: it places the ranks and watches over them. What it says
of itself is left out, because rank 0 has told what there is to tell.
"""

from __future__ import annotations

import logging
import os
import sys

from wide.launch.signals import STARTER, end_with_starter


def main() -> int:
    end_with_starter(int(os.environ.pop(STARTER, "0")))  # before torch, which takes its time
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    os.environ[STARTER] = str(os.getpid())
    logging.disable(logging.CRITICAL)
    count, *words = sys.argv[1:]
    try:
        torchrun(["--standalone", "--nproc-per-node", count, "-m", "--", "wide.engine", *words])
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
