"""Coordinator and node as compose.yaml calls them, by a user without rights, on a root that cannot be written: what the
image promises, without the image.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE_S, ROOT, result_of, wide

HAS_ALL = os.name == "posix" and os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip")))
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not HAS_ALL, reason="a root that cannot be written needs root here, unshare and ip"),
    pytest.mark.skipif(not (ROOT / ".engines").exists(), reason="make test-engines tries the containers' commands"),
    pytest.mark.skipif(ROOT.is_relative_to("/tmp"), reason="a container has a /tmp of its own: this clone lies there"),
]
HOST = """\
set -e
ip link set lo up
mount -t tmpfs none {base}
cd {base}
mkdir upper work root
mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root
echo "127.0.0.1 coordinator" >> root/etc/hosts
mkdir -p root/job root/keys root/pool root/run/wide root/home/wide
touch root/pool/invite
for folder in {folders}; do chmod o+x root/"$folder"; done
mount -o remount,ro root

container() {{
    unshare -m bash -c '
        set -e
        for mount in $1; do mount --bind "${{mount%%:*}}" "root${{mount#*:}}"; done
        mount --rbind /dev root/dev
        mount --rbind /proc root/proc
        mount -t tmpfs -o mode=1777 none root/tmp
        mount -t tmpfs -o mode=1777 none root/home/wide
        shift
        exec chroot --userspec={user} root env -i PATH=/usr/bin:/bin HOME=/home/wide PYTHONPATH={code} \
            PYTHONDONTWRITEBYTECODE=1 "$@"
    ' container "$@"
}}

container "{files}/code:/job {files}/keys:/keys {files}/run:/run/wide" {python} -m wide {serve} & pool=$!
container "{files}/keys/invite:/pool/invite" {python} -m wide {join} & node=$!
wait $node && wait $pool
"""


def test_a_pool_in_containers_with_a_root_that_cannot_be_written(tmp_path):
    digits, files, base = ROOT / "examples" / "digits.py", tmp_path / "files", tmp_path / "host"
    code, _, err = wide("launch", "compose", digits, "--out", files, cwd=tmp_path)
    assert code == 0, err
    base.mkdir()
    text = (files / "compose.yaml").read_text()
    serve, join = (
        shlex.join(re.findall(r'"(.*?)"', command)) for command in re.findall(r"(?m)^    command: \[(.*)\]$", text)
    )
    python, real = Path(sys.executable), Path(sys.executable).resolve()
    folders = [folder.relative_to("/") for one in (python, real, ROOT / "wide") for folder in one.parents]
    script = HOST.format(
        base=base,
        folders=" ".join(f"'{folder}'" for folder in folders),
        user="10001:10001",
        code=ROOT,
        files=files,
        python=python,
        serve=serve,
        join=join,
    )
    words = ["unshare", "-m", "-n", "-p", "-f", "--kill-child", "--mount-proc", "bash", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    plain = result_of("run", digits, "--nodes", 0, cwd=tmp_path)
    assert f"weights {plain['weights_sha256'][:12]}" in done.stderr
    assert "wide1_" not in done.stdout + done.stderr
    assert (files / "run" / "pool" / "run.db").stat().st_uid == 10001
