"""`suzuri chat`: config.py says what can be asked, loop.py what happens then."""

import os
import sys

from suzuri.tools.chat.backend import Backend
from suzuri.tools.chat.config import ChatConfig, parse_effort
from suzuri.tools.chat.display import Display
from suzuri.tools.chat.lines import PipedLines, TerminalLines
from suzuri.tools.chat.loop import ChatLoop
from suzuri.tools.chat.remote import RemoteBackend


def run_chat(config: ChatConfig) -> int:
    """Talk until the input ends. Returns the exit code, as ChatConfig says.

    Raises ValueError, before weights are read, for a model or a server that cannot be used.
    """
    try:
        is_typed = sys.stdin is not None and os.isatty(sys.stdin.fileno())
    except (OSError, ValueError):
        is_typed = False
    if sys.stdin is None:
        raise ValueError("standard input is closed; give lines to it, or a terminal")
    display = Display(sys.stdout, sys.stderr)
    backend = _backend(config, display)
    if is_typed:
        context = "" if backend.max_context is None else f", context {backend.max_context} tokens"
        display.note(f"{backend.name}{context}, effort {config.effort}; /help lists the commands")
    loop = ChatLoop(
        backend,
        display,
        TerminalLines() if is_typed else PipedLines(),
        params=config.sampling(),
        tools=config.tool_list(),
        effort=parse_effort(config.effort),
        system=config.system,
    )
    return loop.run()


def _backend(config: ChatConfig, display: Display) -> Backend:
    if config.url is not None:
        return RemoteBackend(config.server_url(), config.key(), config.model, display)
    from suzuri.tools.chat.local import LocalBackend

    return LocalBackend(config, display)
