"""What a machine image with pdserve's dependencies would bring: ``~/pdserve/.venv`` on a host, made in no time.

Its packages are those of the environment that runs the tests, seen read-only. pdserve itself is not: it comes from the
host's own ``~/pdserve``, where `ray up` puts it.
"""

from __future__ import annotations

import sys

from tests.cluster.host import BASE_PYTHON, HOME, Host

PROJECT = HOME / "pdserve"
"""Where the hosts see the project."""

_SCRIPTS = {"ray": "ray.scripts.scripts", "pdserve": "ops.cli.main"}


def install_environment(host: Host) -> None:
    """Make it. It is newer than the project's files, so that ``make install`` has nothing to do."""
    folder = host.home / "pdserve" / ".venv"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    # Lines of a .pth file join the path in their order, and .pth files in *those* folders count for nothing: so an
    # editable installation of pdserve among the packages is not followed.
    (packages / "host.pth").write_text(f"{PROJECT}\n{host.packages}\n")
    (folder / "pyvenv.cfg").write_text(f"home = {BASE_PYTHON.parent}\ninclude-system-site-packages = false\n")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("python", "python3", version):
        (programs / name).symlink_to(BASE_PYTHON)
    for name, module in _SCRIPTS.items():
        script = programs / name
        script.write_text(f"#!{PROJECT}/.venv/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        script.chmod(0o755)
    (folder / ".installed").touch()
