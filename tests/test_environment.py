"""What a pool's processes find in their environment, and what they give back."""

from __future__ import annotations

import sys

import pytest

from tests.processes import python
from wide.launch.environment import _only_read

SMAPS = """7f00-7f10 r-xp 00000000 fd:00 12  /lib/libread.so
Rss:                 64 kB
Anonymous:            0 kB
7f10-7f20 r--p 00010000 fd:00 12  /lib/librelocated.so
Anonymous:            4 kB
7f20-7f30 rw-p 00020000 fd:00 12  /lib/libwritable.so
Anonymous:            0 kB
7f30-7f40 r--p 00000000 00:00 0
Anonymous:            0 kB
7f40-7f50 r--p 00000000 00:00 0 [vvar]
Anonymous:            0 kB
""".splitlines()


def test_only_what_a_file_still_has_is_given_back():
    assert list(_only_read(SMAPS)) == [(0x7F00, 0x7F10)]


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="there is nothing to give back elsewhere")
def test_a_process_goes_on_with_less_memory(tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, psutil\n"
        "from wide.launch.environment import give_back_what_was_only_read\n"
        "before = psutil.Process().memory_info().rss\n"
        "give_back_what_was_only_read()\n"
        "print(psutil.Process().memory_info().rss < before - 20e6)\n"
        "print(float((torch.ones(64, 64) @ torch.ones(64, 64)).sum()))\n"
    )
    done = python("script.py", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("True\n262144.0\n", 0), done.stderr
