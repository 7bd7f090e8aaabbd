"""Renders chat templates, each time in a process of its own; see `template_program`."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memjax.checks import short

PROGRAM = Path(__file__).with_name("template_program.py")
#: Of the process: seconds of a CPU, and bytes.
CPU_SECONDS, MEMORY = 3, 2**29
#: It may wait for a busy machine.
WALL_SECONDS = 60
#: Characters of a text, besides those of the messages, which may come several times.
LONGEST, TIMES = 2**20, 4


def render(
    source: str,
    conversations: Sequence[tuple[Sequence[Mapping[str, Any]], bool]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """The texts of conversations, as transformers' `apply_chat_template` writes them.

    Args:
        source: of the template.
        conversations: messages, and whether the prompt for an answer follows them.
        special_tokens: texts by names, such as "bos_token".
        tools: JSON schemas of functions that the model may call.

    Raises:
        ValueError: in one line, if the template fails or exceeds a limit.
    """
    values = [
        {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompts,
            **special_tokens,
        }
        for messages, prompts in conversations
    ]
    size = len(json.dumps(values, ensure_ascii=False))
    request = {
        "source": source,
        "values": values,
        "longest": LONGEST + TIMES * size,
        "limits": {"RLIMIT_CPU": CPU_SECONDS, "RLIMIT_AS": MEMORY + 50 * size},
    }
    try:
        done = subprocess.run(
            # No script's folder on the path: a module there is nobody's.
            [sys.executable, "-P", str(PROGRAM)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=WALL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise _refusal(f"it takes more than {WALL_SECONDS} seconds") from error
    if done.returncode == -signal.SIGXCPU:
        raise _refusal(f"it takes more than {CPU_SECONDS} seconds of a CPU")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise _refusal("".join(last) or f"its process ended with {done.returncode}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise _refusal(answer["error"])
    return answer["texts"]


def _refusal(reason: str) -> ValueError:
    line = " ".join(str(short(ValueError(reason))).split())
    return ValueError(f"the chat template cannot be used: {line}")
