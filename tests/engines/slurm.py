"""A real Slurm of three machines on this one, the first of which has two cores: munged, slurmctld and three slurmd, in a PID namespace that ends with the
test, all their files in one folder. Knows Debian's packages, installed or unpacked in .engines/slurm
(`make slurm-packages`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
UNPACKED = ROOT / ".engines" / "slurm" / "root"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
UP_S = 60.0
CONFIGURATION = """\
ClusterName=three
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
MinJobAge={min_job_age_s}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1_port} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2_port} CPUs=1
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={n3_port} CPUs=1
PartitionName=debug Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
PartitionName=two Nodes=n[1-2] MaxTime=INFINITE State=UP
"""
CGROUPS = (
    "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\nConstrainSwapSpace=no\n"
)
UNSEEN = "unseen"  # a folder that is another one for its machines
START = """\
set -e
cd {folder}
mount -t tmpfs none {folder}/{unseen}
{sbin}/munged --foreground --force --num-threads=1 --key-file=munge.key --socket={folder}/munge.socket \
    --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munged.seed &
until [ -S munge.socket ]; do sleep 0.05; done
{slurmctld} -D -c -i -f slurm.conf &
for node in n1 n2 n3; do {slurmd} -D -N $node -f {folder}/slurm.conf -d {slurmstepd} & done
wait
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty, if there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "a Slurm of its own needs root"
    if shutil.which("unshare") is None:
        return "a Slurm of its own needs unshare (util-linux)"
    missing = [name for name in ("munged", "slurmctld", "slurmd", "slurmstepd") if _program(name) is None]
    return f"no {', '.join(missing)} here: make slurm-packages" if missing else ""


def _program(name: str) -> Path | None:
    """Debian calls them slurmctld-wlm and so on."""
    places = (UNPACKED, Path("/"))
    candidates = (root / "usr/sbin" / full for root in places for full in (f"{name}-wlm", name))
    return next((path for path in candidates if path.exists()), None)


class Slurm:
    """`environment`: how its commands find it."""

    def __init__(self, folder: Path, min_job_age_s: int = 300) -> None:
        folder.mkdir(mode=0o755)
        (folder / "state").mkdir()
        (folder / UNSEEN).mkdir()
        self.folder = folder
        programs = {name: _program(name) for name in ("slurmctld", "slurmd", "slurmstepd", "munged")}
        root = UNPACKED if UNPACKED in programs["slurmctld"].parents else Path("/")
        key = os.open(folder / "munge.key", os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(key, os.urandom(128))
        os.close(key)
        ports = dict(zip(("ctld_port", "n1_port", "n2_port", "n3_port"), _free_ports(4), strict=True))
        plugins = root / LIBRARIES / "slurm-wlm"
        configuration = CONFIGURATION.format(
            host=socket.gethostname(), folder=folder, plugins=plugins, min_job_age_s=min_job_age_s, **ports
        )
        (folder / "slurm.conf").write_text(configuration)
        (folder / "cgroup.conf").write_text(CGROUPS)
        self.environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{root / 'usr/bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{root / LIBRARIES}:{plugins}",
        }
        script = START.format(folder=folder, unseen=UNSEEN, sbin=programs["munged"].parent, **programs)
        self._process = subprocess.Popen(
            ["unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc", "bash", "-c", script],
            env=os.environ | self.environment,
            stdout=(folder / "out.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Slurm:
        deadline = time.monotonic() + UP_S
        try:
            while self.ask("sinfo", "-h", "-N", "-p", "debug", "-o", "%t", check=False).split() != ["idle"] * 3:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise AssertionError(f"Slurm did not come up: {self.told()}")
                time.sleep(0.2)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The namespace's first process dies, and with it every other."""
        self._process.kill()
        self._process.wait()

    def ask(self, *words: str, check: bool = True) -> str:
        """What one of Slurm's commands says."""
        environment = os.environ | self.environment
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def told(self) -> str:
        """The daemons' last words."""
        logs = [self.folder / "out.log", *self.folder.glob("*.log")]
        with contextlib.suppress(OSError):
            return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)
        return ""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
