"""Whether Triton runs as its CPU interpreter (TRITON_INTERPRET=1), and a repair of that interpreter.

Triton 3.9's interpreter wraps every language builtin once more at each call of a helper function, so that a
kernel with helpers becomes slower with every call. The outer launch has wrapped them already; helpers need not.
"""

import os
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def repair() -> None:
    """Let helper functions run without wrapping the language again; does nothing where the interpreter is off."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpretedFunction

    original, wrapped = InterpretedFunction.__call__, set[str]()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in wrapped:  # its own view of the language: once is enough
            wrapped.add(module)
            return original(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    if hasattr(InterpretedFunction, "rewrite"):
        InterpretedFunction.__call__ = call
