"""Imported by the forkserver, and only there: what is in memory here is shared by all children that fork from it."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)  # they are the parent's business, from the first moment on
if hasattr(signal, "pthread_sigmask"):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # held while this was started
gc.disable()  # importing torch is a fifth quicker without it
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a job may ask for CUDA here, and children still use it
os.dup2(2, 1)  # what the user's code prints goes to stderr: stdout is for the result alone

import numpy.random  # noqa: E402, F401
import torch  # noqa: E402

import wide.launch.child  # noqa: E402, F401
from wide.errors import WideError  # noqa: E402
from wide.job.compiler import put_off  # noqa: E402
from wide.job.loading import load_ahead  # noqa: E402
from wide.launch.environment import give_back_what_was_only_read  # noqa: E402
from wide.launch.processes import JOB_VARIABLE  # noqa: E402
from wide.telemetry.log import log  # noqa: E402

put_off()
torch.set_num_threads(1)  # threads do not survive a fork, and neither would a CUDA context
if (spec := os.environ.pop(JOB_VARIABLE, "")) and torch.version.cuda is None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            load_ahead(spec)  # its imports may take longer than torch's
    except WideError:
        log.debug("the job could not be loaded ahead; the children will say why")
    else:
        os.write(2, said.getvalue().encode())
gc.collect()
gc.freeze()  # the collector would otherwise write to every shared page
gc.enable()
give_back_what_was_only_read()
