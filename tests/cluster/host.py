"""One host of `hosts.Hosts`: a set of namespaces with an sshd, and a cable to the bridge."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import psutil

HOME = Path(pwd.getpwuid(0).pw_dir)
"""Where each host sees its own home."""

OUTSIDE = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin", "LANG": "C.UTF-8"}
INSIDE = {
    "HOME": str(HOME),
    "USER": "root",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
BASE_PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")

_INIT = Path(__file__).with_name("host_init.py")
_OPEN_PORTS, _CLOSED_PORTS = 100, 50  # priorities of routing rules: the lower one counts first
_NAMESPACES = ("net", "pid", "mount", "ipc", "uts")
_LISTEN = "0A"


def outside(*command: str, feed: str | None = None, timeout_s: float = 20.0) -> str:
    """A command of this machine that must succeed; returns what it printed."""
    done = subprocess.run(
        command, input=feed, capture_output=True, text=True, timeout=timeout_s, check=False, env=OUTSIDE
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """``state`` is the folder of all hosts, with their client key ``id``; ``bridge`` the switch on this machine, with
    the address ``gateway``. Processes see a monotonic clock that is ``clock_ahead_s`` ahead of this machine's. ``core``
    is the only one they have (-1: all)."""

    def __init__(
        self, name: str, address: str, gateway: str, bridge: str, state: Path, clock_ahead_s: int, core: int
    ) -> None:
        self.name = name
        self.address = address
        self.kv_address = address.replace("10.88.", "10.99.")
        """On a second network, of the same cable."""
        self.home = state / name / "home"
        """What the host sees at `HOME`, seen from outside; it stays when the power fails."""
        self.link = f"{bridge}-{address.rpartition('.')[2]}"
        """The bridge's end of its cable."""
        self.packages = state / "packages"
        """Where it sees the packages that are installed for the tests."""
        self.pid = 0
        """Its first process, as the outside sees it."""
        self._gateway, self._bridge, self._state = gateway, bridge, state
        self._clock_ahead_s = clock_ahead_s
        self._core = core
        self._power: subprocess.Popen[str] | None = None
        self._write_files()

    @property
    def running(self) -> bool:
        """Whether its power is on."""
        return self._power is not None

    def boot(self) -> None:
        """Switch it on; returns when its sshd listens."""
        assert not self.running, f"{self.name} is on"
        command = ["taskset", "--cpu-list", str(self._core)] if self._core >= 0 else []
        command += ["unshare", *(f"--{kind}" for kind in _NAMESPACES), "--fork", "--kill-child"]
        if self._clock_ahead_s:
            command += ["--time", f"--monotonic={self._clock_ahead_s}", f"--boottime={self._clock_ahead_s}"]
        folders = {"state": self._state, "home": self.home, "python": sys.base_prefix}
        spec = {"name": self.name, "packages": sysconfig.get_path("purelib")} | {k: str(v) for k, v in folders.items()}
        with (self.home.parent / "init.log").open("ab") as log:
            self._power = subprocess.Popen(
                [*command, str(BASE_PYTHON), "-I", "-S", str(_INIT), json.dumps(spec)],
                env=INSIDE | OUTSIDE,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is the tests', not the hosts'
            )
        assert self._power.stdin is not None
        assert self._power.stdout is not None
        self.pid = int(self._power.stdout.readline() or 0)
        if self._power.stdout.readline() != "ready\n":
            self.kill()
            raise RuntimeError(f"{self.name} did not start: {(self.home.parent / 'init.log').read_text()}")
        self._plug_in()
        self._power.stdin.write("\n")
        self._power.stdin.flush()
        deadline_s = time.monotonic() + 10
        while 22 not in self.listening():
            assert time.monotonic() < deadline_s, f"{self.name}: no sshd; see {self.home.parent / 'sshd.log'}"
            time.sleep(0.01)

    def kill(self) -> None:
        """Its power fails: the cable goes first, so that nobody is told. Its home stays; `boot` starts it again."""
        power, self._power = self._power, None
        if power is None:
            return
        subprocess.run(["ip", "link", "del", self.link], env=OUTSIDE, capture_output=True, timeout=20, check=False)
        if self.pid and power.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # its end is that of every process in there
        if power.stdin is not None and power.stdout is not None:
            power.stdin.close()
            power.stdout.close()
        power.wait(20)

    def run(
        self, command: str, *, timeout_s: float = 60.0, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """A shell command inside, whatever its network does: started from its home, with ``env`` besides `INSIDE`.
        AssertionError if it fails, unless not ``check``; what it left running after ``timeout_s`` is killed."""
        inside = ["nsenter", f"--target={self.pid}", *(f"--{kind}" for kind in _NAMESPACES)]
        inside += ["--time"] if self._clock_ahead_s else []
        return _finish([*inside, f"--wd={HOME}", "bash", "-c", command], INSIDE | env, self.name, timeout_s, check)

    def ssh(self, command: str, *, timeout_s: float = 60.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A shell command over its sshd, as a user of this machine would; else like `run`."""
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "BatchMode=yes")
        client = ["ssh", "-F", "none", "-i", str(self._state / "id"), *(f"-o{option}" for option in options)]
        return _finish([*client, f"root@{self.address}", command], OUTSIDE, self.name, timeout_s, check)

    def processes(self) -> list[psutil.Process]:
        """What runs there besides its first process and its sshd, by the process ids of this machine."""
        own = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter(["pid"]):
            try:
                if os.stat(f"/proc/{process.pid}/ns/pid").st_ino != own or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.pid != self.pid and not (process.name() == "sshd" and process.ppid() == self.pid):
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # it has ended meanwhile
        return found

    def listening(self) -> set[int]:
        """TCP ports that something there listens on."""
        ports = set()
        for version in ("tcp", "tcp6"):
            path = Path(f"/proc/{self.pid}/net/{version}")
            for line in path.read_text().splitlines()[1:] if path.exists() else ():
                _, local, _, status = line.split()[:4]
                if status == _LISTEN:
                    ports.add(int(local.rpartition(":")[2], 16))
        return ports

    def rate(self, mbit: float | None) -> None:
        """Let through ``mbit`` Mbit/s in each direction, or (None) all there is."""
        for device, where in ((self.link, ()), ("eth0", self._network)):
            if mbit is None:
                has_one = "tbf" in outside(*where, "tc", "qdisc", "show", "dev", device)
                if has_one:
                    outside(*where, "tc", "qdisc", "del", "dev", device, "root")
            else:
                shape = ("tbf", "rate", f"{mbit:g}mbit", "burst", "80kb", "latency", "50ms")
                outside(*where, "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def partition(self) -> None:
        """Nothing passes to or from it any more. Neither side is told: no connection is closed."""
        outside("ip", "link", "set", self.link, "down")

    def heal(self) -> None:
        """Undo `partition`."""
        outside("ip", "link", "set", self.link, "up")

    def close_port(self, port: int, *, silently: bool = True) -> None:
        """Like a firewall before its TCP ``port``: packets to it vanish, or are refused if not ``silently``."""
        action = "blackhole" if silently else "prohibit"
        # A host tells what it prohibits only if it could be a router.
        outside(*self._network, "sh", "-c", f"echo {int(not silently)} >/proc/sys/net/ipv4/ip_forward")
        rule = ("pref", str(_CLOSED_PORTS), "iif", "eth0", "ipproto", "tcp", "dport", str(port), action)
        outside(*self._network, "ip", "rule", "add", *rule)

    def open_ports(self) -> None:
        """Undo every `close_port`."""
        outside(*self._network, "ip", "rule", "flush", "pref", str(_CLOSED_PORTS))

    @property
    def _network(self) -> tuple[str, ...]:
        """Begins a command of this machine that concerns the host's network."""
        return ("nsenter", f"--target={self.pid}", "--net")

    def _plug_in(self) -> None:
        mac = "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))  # the same after each boot
        far_end = ("name", "eth0", "address", mac, "netns", str(self.pid))
        outside("ip", "link", "add", self.link, "type", "veth", "peer", *far_end)
        outside("ip", "link", "set", self.link, "master", self._bridge, "up")
        network = (
            "link set lo up",
            f"addr add {self.address}/24 dev eth0",
            f"addr add {self.kv_address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self._gateway}",
            # Addresses of its own are looked up only after the rules that close ports.
            f"rule add pref {_OPEN_PORTS} lookup local",
            "rule del pref 0",
        )
        outside(*self._network, "ip", "-batch", "-", feed="\n".join(network))

    def _write_files(self) -> None:
        self.home.mkdir(parents=True)
        (self.home / ".bashrc").write_text("")
        folder = self.home.parent
        outside("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(folder / "hostkey"))
        settings: dict[str, Any] = {
            "HostKey": folder / "hostkey",
            "AuthorizedKeysFile": self._state / "id.pub",
            "StrictModes": "no",
            "PermitRootLogin": "yes",
            "PidFile": "none",
            "UsePAM": "no",
            "MaxStartups": 100,
        }
        (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))


def _finish(
    command: list[str], env: dict[str, str], name: str, timeout_s: float, check: bool
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; if that takes too long, kill its process group, which reaches into a host too."""
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    assert not check or done.returncode == 0, f"{name}: {command[-1]}: exit code {done.returncode}\n{out}{err}"
    return done
