"""The program `memjax`: what needs no JAX is answered before it is imported.

JAX, flax and the presets take seconds to import. A command that joins other hosts runs
in a child: where one of them is lost, JAX ends the others from inside its native code,
with a stack trace and no exit code of ours. This process makes one line of it.
"""

import ctypes
import importlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from memjax.cli.help import quick_answer

#: Set for the child.
SUPERVISED = "MEMJAX_SUPERVISED"
#: What is passed on to it.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
#: The services that watch the other hosts; what they write is held back for a while.
NATIVE = re.compile(
    rb"[WEF]\d{4} .*\b(preemption_sync_manager|coordination_service\w*|client)\.(cc|h):"
)
LOST = b"JAX distributed service detected fatal errors"
#: Seconds that output is held back for the end of the process.
PATIENCE = 20.0


def main(argv: list[str] | None = None) -> None:
    """Answers --help and --version, and gives any other line to `memjax.cli.main`."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        try:
            if answer := quick_answer(argv):
                print(answer)
            elif joins_hosts(argv) and SUPERVISED not in os.environ:
                command = [sys.executable, "-m", "memjax.cli.entry", *argv]
                sys.exit(supervise(command))
            else:
                if SUPERVISED in os.environ:
                    _end_with_parent()
                importlib.import_module("memjax.cli.main").main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Who read the output, as `head`, has ended. Python flushes again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


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
    words = " ".join(argv).replace("--distributed=", "--distributed ")
    chosen = re.search(r"--distributed (\w+)", words)
    how = chosen[1] if chosen else "auto"
    trains = argv[:1] in (["train"], ["finetune"])
    return trains and (how == "on" or (how == "auto" and several_hosts()))


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
    if code == -signal.SIGABRT and LOST in held:
        print(f"memjax: {socket.gethostname()}: {_lost(held)}", file=sys.stderr)
        return os.EX_TEMPFAIL
    os.write(2, held)
    return code if code >= 0 else 128 - code


def _relay(child: subprocess.Popen[bytes]) -> bytes:
    """Passes on what the child writes to stderr; returns what was held back at its end.

    From the first line of the watching services on, lines are held back until the child
    ends, or passed on when it does not.
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
            if not held and NATIVE.match(line):
                since = time.monotonic()
            if held or NATIVE.match(line):
                held += text
            else:
                os.write(2, text)
        # A bar or a question has no end of line.
        if rest and not held and not re.match(rb"[WEF]\d", rest):
            os.write(2, rest)
            rest = b""
        if not read:
            return held


def _lost(held: bytes) -> str:
    """Which processes were lost, as far as JAX's service says it."""
    said = rb"unhealthy \(stopped sending heartbeats\):\s*([\d\s]*\d)"
    found = re.search(said, held)
    numbers = found[1].decode().split() if found else ["0"]
    which = f"process {' and '.join(numbers)}"
    return (
        f"{which} has ended or is not reached any more; run the same command again "
        "on all hosts to go on from the newest checkpoint"
    )


def _end_with_parent() -> None:
    """On Linux, a parent that is killed takes this process with it."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
