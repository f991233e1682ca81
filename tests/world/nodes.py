"""Virtual nodes: network namespaces with host names, which know each other's names."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from pycomm.bench.netlab import Netlab


class Nodes:
    """Nodes 0, 1, ... at 10.77.0.1, 10.77.0.2, ... on one switch without a limit."""

    def __init__(self, folder: Path, names: Sequence[Sequence[str]]) -> None:
        """
        Args:
            folder: for the file of hosts.
            names: of each node; the first is its host name.

        Raises:
            Unavailable: network namespaces are not possible here; the text says why.
        """
        self.names = [list(own) for own in names]
        self.lab = Netlab(len(names), "unlimited")
        self._hosts = folder / "hosts"
        lines = [f"10.77.0.{n} {' '.join(own)}" for n, own in enumerate(names, start=1)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def wrap(self, node: int, mounts: Mapping[str, Path] | None = None) -> list[str]:
        """Return the words that run a command on a node.

        Args:
            node: its number, from 0.
            mounts: folders that the command sees below /mnt, by their names there.
        """
        lines = [
            f"hostname {self.names[node][0]}",
            f"mount --bind {shlex.quote(str(self._hosts))} /etc/hosts",
        ]
        if mounts:
            lines.append("mount -t tmpfs tmpfs /mnt")
        for name, folder in (mounts or {}).items():
            lines += [f"mkdir /mnt/{name}", f"mount --bind {shlex.quote(str(folder))} /mnt/{name}"]
        script = "\n".join([*lines, 'exec "$@"'])
        own = ["unshare", "--mount", "--uts", "sh", "-ec", script, "sh"]
        return [*self.lab.wrap(node), *own]

    def close(self) -> None:
        self.lab.close()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
