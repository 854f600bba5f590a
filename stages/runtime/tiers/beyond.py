"""A device with the tiers beyond it, opened for one plan."""

from __future__ import annotations

from pathlib import Path

from stages.artifacts.plan import Plan
from stages.device.interface import Device, Streams
from stages.runtime.tiers.disk import DiskFile
from stages.runtime.tiers.host import HostPool
from stages.runtime.tiers.links import DiskLink, Home, HostLink, Link


class Tiers:
    """What an engine moves its buffers between.

    Args:
        device: On which the plan runs.
        folder: Where the disk tier may make its file.
        late: Whether an accelerator's copies wait as long as they may (tests).

    Attributes:
        streams: The device's queues; None where what returns has run.
        homes: Where buffers wait, as the host sees it between steps, by name ("host", "disk").
        links: The same as lanes see it within a step.

    Raises:
        StorageError: A tier has no room for what the plan puts there.
    """

    def __init__(self, device: Device, plan: Plan, folder: Path, *, late: bool) -> None:
        self.device = device
        self.streams: Streams | None = device.streams(late=late)
        self.homes: dict[str, Home] = {}
        self.links: dict[str, Link] = {}
        self._disk_link: DiskLink | None = None
        pin = device.target.type == "cuda"
        try:
            self._open(plan, folder, pin=pin)
        except BaseException:  # also an interrupt must not leave memory or space taken
            self.close()
            raise

    def _open(self, plan: Plan, folder: Path, *, pin: bool) -> None:
        if plan.disk_bytes:
            disk = DiskFile(folder, plan.disk_bytes)
            self.homes["disk"] = self.links["disk"] = disk
            if self.streams is not None:
                self._disk_link = DiskLink(disk, self.streams, pin=pin)
                self.links["disk"] = self._disk_link
        if plan.host_pool_bytes:
            assert self.streams is not None, "a plan with a host tier is for an accelerator"
            pool = HostPool(plan.host_pool_bytes, pin=pin)
            self.homes["host"] = pool
            self.links["host"] = HostLink(pool, self.streams)

    def close(self) -> None:
        """Gives host memory and disk back. Safe to call twice."""
        if self._disk_link is not None:
            self._disk_link.close()
        for home in self.homes.values():
            home.close()
