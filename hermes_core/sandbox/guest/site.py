"""The state that the slots of a sandbox share: how they are isolated, their users, and where their files are."""

from __future__ import annotations

import os
import resource
import signal
import sys

from ..linux import namespaces, removal, users
from ..linux.probe import probe_process, system_identity
from . import layers, masking, workspace
from .connection import Outlet
from .housekeeping import Trash, WritableSearch, complain
from .wire import Refusal
from .workspace import PREPARE, uid_offset

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .loop import Loop
    from .workspace import Workspace

SHARED, USER, NAMESPACE, PRIVATE_ROOT, DEDICATED = range(5)
_NO_USER_IDS = "its backend has reserved no user ids for the slots (Sandbox.uid_base)"
_UNREADABLE = "unreadable"
"""A file in the state directory: the paths of the host's system that not every user may read, each ended by a NUL."""
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash", "/bin/sh")


class Site:
    """The state that all slots of a sandbox share."""

    def __init__(self, loop: Loop, state_dir: str) -> None:
        self.loop = loop
        self.outlet = Outlet()
        self.scratch = os.path.join(state_dir, "scratch")
        self._layers_place = os.path.join(state_dir, "layers-")
        self._unreadable = os.path.join(state_dir, _UNREADABLE)
        self.layers: layers.Layers | None = None
        """With the mechanism `root`: the layers that the slots' root directories start from."""
        self.shell = _shell_below("")
        self.soft_files = _raise_file_limit()
        self.instance = os.urandom(8).hex()
        self.config: dict[str, Any] = {}
        self.masked: tuple[bytes, ...] = ()
        """The secrets that are masked in the output of commands."""
        self.base = ""
        self.mechanism = "shared"
        self.single_user = False
        self.lists: users.Lists | None = None
        """The system's lists of users and groups; None if they can't be read."""
        self.takes_pipes = False
        """Whether slots' parents make the pipes of commands, because slots with our own user id can make it impossible
        for us to send descriptors (see `Parent._pipes`)."""
        self.workspaces: dict[int, Workspace] = {}
        """The workspaces of the slots by index."""
        self._search = WritableSearch(loop)
        self._trash: Trash | None = None

    @property
    def is_configured(self) -> bool:
        """Return whether `configure` and `open_trash` have succeeded."""
        return self._trash is not None

    def configure(self, config: dict[str, Any]) -> None:
        """Choose how slots are isolated, and make the directories. Raises Refusal, OSError."""
        self.mechanism, self.single_user = _choose_mechanism(config)
        self.takes_pipes = self.single_user and namespaces.has_capability(namespaces.SYS_PTRACE)
        self.config = config
        self.masked = masking.values_of(config.get("secrets", ()), os.environb)
        self.base = config["workspace_base"]
        if config.get("restored"):
            workspace.adopt(self.base, self.uid_of(PREPARE))
        workspace.prepare_base(self.base)
        os.makedirs(self.scratch, exist_ok=True)
        if self.mechanism == "root":
            self.layers = self._make_layers()
        self._name_users()
        if self.mechanism == "user":
            self._search.begin({"/proc", "/sys", "/dev/pts", self.base})

    def _name_users(self) -> None:
        """Give the slots' users names if possible. Slots work without names too."""
        if self.mechanism == "shared":
            return
        config = self.config
        try:
            if self.mechanism == "user" and self.owns_system:
                users.write_system(workspace.slot_users(self.base, config["uid_base"], config["slots"]))
        except OSError as error:  # the root is read-only, for example
            complain("the slots' users get no names: %s" % error)
        try:
            self.lists = users.read()
        except OSError as error:
            complain("the slots' users may have no names: %s" % error)

    @property
    def is_dedicated(self) -> bool:
        """Return whether the whole sandbox belongs to its one slot."""
        return bool(self.config["isolation"] == DEDICATED and self.config["slots"] == 1)

    @property
    def owns_system(self) -> bool:
        """Return whether only the sandbox uses its system."""
        # Some providers run sandboxes on the driver's own host. Then the /etc that we see is the driver's.
        return bool(self.config.get("own_system")) and system_identity() != self.config["driver_etc"]

    def _make_layers(self) -> layers.Layers:
        """Make the layers of the slots' root directories. Raises Refusal."""
        own_system = self.owns_system
        root = self.config.get("slot_root") or ("/" if own_system else None)
        self.shell = _shell_below((root or "").rstrip("/"))
        system_paths = [sys.base_prefix, os.path.realpath("/etc/resolv.conf")] if root is None else []
        visible = [*self.config["visible_paths"], *system_paths]
        unreadable = [] if root is not None else self._read_unreadable()
        places = workspace.places(self.base)
        reasons = []
        for ids in layers.id_maps(self.config["uid_base"], own_system):
            try:
                directory = self._layers_place + os.urandom(4).hex()
                slot_layers = layers.make_layers(directory, root, visible, unreadable, places, ids)
            except OSError as error:
                reasons.append(": ".join(filter(None, (error.filename, error.strerror or str(error)))))
            else:
                layers.import_for_slots()
                return slot_layers
        raise Refusal("policy", "isolation", "the sandbox can't give its slots roots: %s" % "; ".join(reasons))

    def _read_unreadable(self) -> list[str]:
        try:
            with open(self._unreadable, "rb") as file:
                return [os.fsdecode(path) for path in file.read().split(b"\0") if path]
        except FileNotFoundError:
            message = "no root for its slots is known: its backend sets neither Sandbox.slot_root nor own_system"
            raise Refusal("policy", "isolation", message) from None

    def open_trash(self) -> None:
        """Open the trash. From now on, discarded directories are removed."""
        self._trash = Trash(workspace.trash(self.base), lambda: workspace.make_spares(self.base))

    def uid_of(self, index: int) -> int | None:
        """Return the user id of a slot's processes outside its namespaces; None if it is the guest's own."""
        first = self.config["uid_base"]
        if self.mechanism == "shared" or self.single_user or first is None:
            return None
        return int(first) + uid_offset(index)

    def mechanism_of(self, index: int) -> str:
        """Return how a slot is isolated: `shared`, `user`, `namespace` or `root`. The slot in which files are
        prepared (`PREPARE`) has `namespace` if the others have `root`."""
        return "namespace" if self.mechanism == "root" and index == PREPARE else self.mechanism

    def owner_of(self, index: int) -> int | None:
        """Return the user id of a slot's files as the guest sees it; None if it is the guest's own."""
        if self.layers is not None and index != PREPARE:
            return self.layers.ids.root
        return self.uid_of(index)

    @property
    def world_writable(self) -> list[str]:
        """Return the directories outside the workspaces that slots can write to; none if each has its own root."""
        return self._search.paths

    def when_searched(self, call: Callable[[], object]) -> None:
        """Call a function when `world_writable` is complete, or at once if it already is."""
        self._search.when_done(call)

    def kill_user(self, uid: int) -> None:
        """Kill every process of a slot's user. We don't fork for that, because the process table may be full.

        Our real uid becomes the reserved one and our effective uid the slot's. With these, the kernel lets `kill(-1)`
        reach the slot's processes and no others. It reaches all of them in one call.
        """
        os.setresuid(self.config["uid_base"] + 1, uid, 0)
        try:
            os.kill(-1, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        finally:
            os.setresuid(0, 0, 0)

    def empty_trash(self) -> None:
        """Start to remove the directories that slots discarded."""
        try:
            if self._trash is not None:
                self._trash.empty()
        except OSError as error:  # we can't fork now; the next call removes them
            complain("the trash was not emptied: %s" % error)

    def stop(self) -> None:
        """Stop the search for world-writable directories."""
        self._search.stop()

    def remove_rest(self, uids: list[int]) -> None:
        """Remove the files that these users left outside their workspaces, and then the base directory."""
        removal.sweep(self.world_writable, uids)
        if self._trash is not None:
            self._trash.close()
            workspace.remove_base(self.base)


def _choose_mechanism(config: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the mechanism that isolates slots, and whether all slots have the guest's own user id outside their
    namespaces. Raises Refusal."""
    level, slots, first = config["isolation"], config["slots"], config["uid_base"]
    users = os.geteuid() == 0 and first is not None and _has_users(first, slots + 2)
    if level == SHARED:
        return "shared", False
    if level == USER and users:
        return "user", False
    probe = probe_process()
    # A user namespace with one user maps the slot's user to ours. We never do that as root of the whole system.
    ordinary = os.geteuid() != 0 or not _has_users(0, 1 << 31)
    if users and probe["namespaces"]:
        return ("root" if level == PRIVATE_ROOT else "namespace"), False
    if level != PRIVATE_ROOT and ordinary and (probe["namespaces"] or probe["user_namespaces"]):
        return "namespace", True
    if level == DEDICATED and slots == 1:
        return ("user" if users else "shared"), False
    reason = probe["reason"] or ("only root can do that" if ordinary else _NO_USER_IDS)
    raise Refusal("policy", "isolation", "the sandbox can't keep its slots apart: %s" % reason)


def _shell_below(root: str) -> str:
    """Return the path of the best shell below a root directory."""
    paths = [path for path in _SHELLS if os.path.lexists(root + path) and (root or os.access(path, os.X_OK))]
    return paths[0] if paths else "sh"


def _has_users(first: int, count: int) -> bool:
    """Return whether our user namespace has `count` user ids from `first` on."""
    with open("/proc/self/uid_map") as file:
        for line in file:
            inside, _, length = map(int, line.split())
            if inside <= first and first + count <= inside + length:
                return True
    return False


def _raise_file_limit() -> int:
    """Raise our soft limit on descriptors to the hard limit, as every command takes some. Return the old soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass
    return soft
