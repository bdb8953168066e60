"""Two hosts on one machine: a network namespace each, a cable (veth) between them, names of their own.

`refusal()` says why that is not possible here; `on_two_hosts` runs a program on both at once. Nothing
is left behind: the namespaces end with the processes in them. Ordinary users get them inside a user
namespace, where the system permits that.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_SETUP = """
set -eu
mount -t tmpfs none /run
for n in 0 1; do
  ip netns add "host$n"
  ip -n "host$n" link set lo up
done
ip link add cable0 netns host0 type veth peer name cable1 netns host1
for n in 0 1; do
  ip -n "host$n" address add "10.77.0.$((n + 1))/24" dev "cable$n"
  ip -n "host$n" link set "cable$n" up
done
"""


def refusal() -> str:
    """Return why there cannot be two hosts on this machine; empty where there can."""
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"two hosts need `{program}`, which is not installed"
    ping = "ip netns exec host0 unshare --uts true"
    done = subprocess.run(_isolated(ping), capture_output=True, text=True, check=False)
    return f"two hosts are not permitted: {done.stderr.strip()}" if done.returncode else ""


def on_two_hosts(
    programs: Sequence[Sequence[str]], *, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run one program on each host at once; the exit status is 0 if both succeed.

    gloo is told which interface to use: neither host's name resolves to an address.
    """
    lines = [
        f"GLOO_SOCKET_IFNAME=cable{n} ip netns exec host{n} unshare --uts sh -c "
        + shlex.quote(f'echo host{n} > /proc/sys/kernel/hostname; exec "$@"')
        + f" start {shlex.join(program)} & pid{n}=$!"
        for n, program in enumerate(programs)
    ]
    ends = ["code=0", "wait $pid0 || code=$?", "wait $pid1 || code=$?"]
    return subprocess.run(
        _isolated("\n".join([*lines, *ends])),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def _isolated(script: str) -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    # The first process of a PID namespace takes all others with it when it ends.
    return [
        *("unshare", *user, "--mount", "--net", "--pid", "--fork", "--kill-child"),
        *("--mount-proc", "sh", "-c", f"{_SETUP}\n{script}\nexit ${{code:-0}}"),
    ]
