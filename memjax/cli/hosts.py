"""Supervision of a command that joins other hosts; needs no JAX.

Where a host is lost, JAX ends the processes of the others from inside its native code,
with a stack trace and an exit code of its own. So the command runs in a child, and its
parent makes one line of that. tests/training/test_pods.py holds the phrases of JAX.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

#: Set for the child.
SUPERVISED = "MEMJAX_SUPERVISED"
#: Signals that are passed on to it.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
#: Log lines of JAX's services that watch the other hosts; they are held back.
LEVELS = (b"W", b"E", b"F")
SERVICES = (b"preemption_sync_manager", b"coordination_service", b"client.")
FATAL = b"JAX distributed service detected fatal errors"
LOST = b"unhealthy (stopped sending heartbeats):"
#: Seconds that output is held back for the end of the process.
PATIENCE = 20.0


def several_hosts() -> bool:
    """Whether GKE, Slurm or Open MPI, or JAX's own variable, name several hosts."""
    return (
        "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
        or int(os.environ.get("SLURM_NTASKS", "1")) > 1
        or int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1
        or "JAX_COORDINATOR_ADDRESS" in os.environ
    )


def joins_hosts(argv: Sequence[str]) -> bool:
    """Whether a command is to join other hosts."""
    words = [part for word in argv for part in word.split("=", 1)]
    at = words.index("--distributed") + 1 if "--distributed" in words else len(words)
    how = words[at] if at < len(words) else "auto"
    trains = argv[:1] in (["train"], ["finetune"])
    return trains and (how == "on" or (how == "auto" and several_hosts()))


def is_supervised() -> bool:
    """Whether this process is the child."""
    return SUPERVISED in os.environ


def supervise(command: Sequence[str]) -> int:
    """Runs a command, and says in one line when it ended because a host was lost.

    Signals are passed on to it. Returns its exit code; 75 where a host was lost; 128
    and the number of a signal that ended it.
    """
    child = subprocess.Popen(
        command,
        env=os.environ | {SUPERVISED: "1"},
        stderr=subprocess.PIPE,
        # Ctrl-C would else reach it twice.
        process_group=0,
    )
    for number in SIGNALS:
        # `nohup` starts a program with SIGHUP ignored.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: child.send_signal(number))
    held = _relay(child)
    code = child.wait()
    if code == -signal.SIGABRT and FATAL in held:
        print(f"memjax: {socket.gethostname()}: {_lost(held)}", file=sys.stderr)
        return os.EX_TEMPFAIL
    os.write(2, held)
    return code if code >= 0 else 128 - code


def _relay(child: subprocess.Popen[bytes]) -> bytes:
    """Passes the child's stderr on; returns the text held back at its end.

    From the first line of the services on, lines are held back until the child ends, or
    passed on when it does not.
    """
    assert child.stderr is not None
    pipe, rest, held, since = child.stderr.fileno(), b"", b"", 0.0
    while True:
        if held and time.monotonic() - since > PATIENCE:
            os.write(2, held)
            held = b""
        if not select.select([pipe], [], [], 1.0)[0]:
            continue
        read = os.read(pipe, 65536)
        *lines, rest = (rest + read).split(b"\n")
        if not read:
            lines, rest = [rest], b""
        for line in lines:
            text = line + b"\n" if read else line
            if not held and _is_of_services(line):
                since = time.monotonic()
            if held or _is_of_services(line):
                held += text
            else:
                os.write(2, text)
        # A bar or a question has no end of line.
        if rest and not held and not _is_of_log(rest):
            os.write(2, rest)
            rest = b""
        if not read:
            return held


def _is_of_log(line: bytes) -> bool:
    """Whether a line begins as one of a native log, such as "W1125 10:28:08.8"."""
    return line.startswith(LEVELS) and line[1:2].isdigit()


def _is_of_services(line: bytes) -> bool:
    return _is_of_log(line) and any(service in line for service in SERVICES)


def _lost(held: bytes) -> str:
    """The processes that were lost, as far as JAX's service names them."""
    words = held.partition(LOST)[2].decode(errors="replace").split()
    end = next((i for i, word in enumerate(words) if not word.isdigit()), len(words))
    which = f"process {' and '.join(words[:end] or ['0'])}"
    return (
        f"{which} has ended or is not reached any more; run the same command again "
        "on all hosts to go on from the newest checkpoint"
    )
