"""The child process that runs device code: JSON lines in, JSON lines out, and a diagnosis when it dies."""

import contextlib
import json
import queue
import signal
import subprocess
import tempfile
import threading
from types import TracebackType
from typing import Any

from moeplan.errors import MoeplanError

START_S = 120.0  # assumed: enough to import a GPU library on a busy machine


class ChildLostError(Exception):
    """The child died, hung or answered garbage; the text says which, with its last words."""


class Child:
    """One running child; a context manager. Raises MoeplanError where the program cannot be started."""

    def __init__(self, argv: list[str], timeout_s: float) -> None:
        """Start `argv`; every answer must come within `timeout_s` seconds, the first within START_S more."""
        self._timeout = timeout_s
        self._allowance = START_S
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the child
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as bad:
            self._errors.close()
            raise MoeplanError(f"--command {argv[0]}: cannot run: {bad.strerror or bad}") from bad
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one line, return the answer to it. Raises ChildLostError; the child is then of no more use."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message, sort_keys=True) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=self._timeout + self._allowance)
        except OSError:
            line = None
        except queue.Empty:
            self._process.kill()
            raise ChildLostError(f"no answer within {self._timeout:g} s") from None
        self._allowance = 0.0
        if line is None:
            raise ChildLostError(self._obituary())
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or answer.get("arm") != message["arm"]:
            raise ChildLostError(f"answered {line.strip()[:200]!r}, which is no answer to arm {message['arm']}")
        return answer

    def close(self) -> None:
        """End the child: it sees the end of its input, then has a second before it is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=1)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> "Child":
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, bad: BaseException | None, at: TracebackType | None) -> None:
        """Close."""
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                if line.strip():
                    self._lines.put(line)
        self._lines.put(None)

    def _obituary(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "closed its output without an answer"
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
        self._errors.seek(0)
        words = [line.strip() for line in self._errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return f"{how}: {words[-1][:300]}" if words else how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
