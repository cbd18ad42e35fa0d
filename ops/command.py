"""The entry point of the `pdserve` command, also as ``python -m ops.command``."""

from __future__ import annotations

import importlib

from pdserve.core.errors import ConfigError


def main() -> None:
    """Run the command line. SystemExit says what to do in a client-only installation (``pip install pdserve``), and
    which plug-in cannot be loaded."""
    try:
        command = importlib.import_module("ops.cli.main")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"error: this installation of pdserve is a client ({error.name} is missing); the pdserve command needs the "
            "extra `service`: pip install 'pdserve[service]'"
        ) from None
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    command.main()


if __name__ == "__main__":
    main()
