"""The root directories of slots that are root: overlays over the sandbox's system, so a slot can't change the system.

Each failed call raises an OSError that names the call.
"""

from __future__ import annotations

import codecs
import os
import stat
import sys
from importlib.machinery import PathFinder

from ..linux import mounts, namespaces
from ..linux.mounts import is_below
from ..linux.probe import in_child
from ..linux.removal import remove_tree

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Bind = tuple[str, str, bool]

_TOPS = (*mounts.SYSTEM_DIRECTORIES, *mounts.PACKAGE_DIRECTORIES)
_SKELETON = {
    "/dev": 0o755,
    "/proc": 0o555,
    "/root": 0o700,
    "/home": 0o755,
    "/media": 0o755,
    "/mnt": 0o755,
    "/run": 0o755,
    "/run/lock": 0o1777,
    "/srv": 0o755,
    "/tmp": 0o1777,
    "/var": 0o755,
    "/var/cache": 0o755,
    "/var/lib": 0o755,
    "/var/log": 0o755,
    "/var/tmp": 0o1777,
}
"""Directories and modes for a root directory that is assembled from system directories."""
_NETWORK_FILES = ("hosts", "hostname", "resolv.conf")
"""Files in /etc that a container runtime mounts over the image. Each slot gets copies."""
_NETWORK_FILE_BYTES = 64 << 10

_FIRST_ID, _BLOCKS = 2_150_000_000, 32_000
"""Above the user ids of slots, each sandbox gets a block of `_IDS` ids. After 32,000 sandboxes, blocks are reused."""
_IDS = 65_536


class IdMap:
    """Maps the ids of a slot's user namespace to ids of the sandbox.

    Args:
        lines: the lines for uid_map and gid_map.
        root: the sandbox's id of the slot's root.
    """

    def __init__(self, lines: str, root: int) -> None:
        self.lines = lines
        self.root = root

    def outside(self, number: int) -> int:
        """Return the sandbox's id for an id in an image. Ids that are not mapped become root's."""
        return number if self.root == 0 else self.root + (number if number < _IDS else 0)


def shift_ids(first: int) -> IdMap:
    """Return a map to ids that no one else has. A slot's root is then an ordinary user outside.

    Args:
        first: the first user id of the sandbox's slots.
    """
    base = _FIRST_ID + first // 512 % _BLOCKS * _IDS
    return IdMap("0 %d %d" % (base, _IDS), base)


def same_ids() -> IdMap:
    """Return the map in which every id is itself."""
    with open("/proc/self/uid_map") as file:
        rows = [line.split() for line in file]
    return IdMap("\n".join("%s %s %s" % (inside, inside, length) for inside, _, length in rows), 0)


def id_maps(first: int, same: bool) -> list[IdMap]:
    """Return the maps to try, the best first.

    Args:
        first: the first user id of the sandbox's slots.
        same: whether a slot's root may have the id of the sandbox's root, without its capabilities. Containers need
            that, because most of their root directories are overlays, which can't be mounted with other ids.
    """
    return [shift_ids(first), *([same_ids()] if same else [])]


def import_for_slots() -> None:
    """Import all modules that slots' parents may need, because they can import none in the slot's root directory."""
    for encoding in ("ascii", "latin-1", "utf-8"):
        codecs.lookup(encoding)
    for name in ("bz2", "gzip", "lzma", "zlib"):
        try:
            __import__(name)
        except ImportError:  # this Python was built without it
            continue


def import_nothing_more() -> None:
    """Import no more modules from files: a slot that is root could have replaced them."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not PathFinder]
    sys.path[:] = []


class Layer:
    """A directory `target` of a slot's root: an overlay over directories of the sandbox, the topmost first."""

    def __init__(self, target: str, lowers: list[str], owner: tuple[int, int], mode: int) -> None:
        self.target = target
        self.lowers = lowers
        self.owner = owner
        self.mode = mode


class Layers:
    """The first content of the root directories of all slots. Made once, by `make_layers`, and never changed.

    Args:
        ids: the ids of the slots' user namespaces.
        layers: the overlays, parents first.
        binds: read-only binds that the root directories show besides the overlays.
        of_container: whether the root directories start from the root of a container, whose runtime mounts files over
            it.
    """

    def __init__(self, ids: IdMap, layers: list[Layer], binds: list[Bind], of_container: bool = False) -> None:
        self.ids = ids
        self.binds = binds
        self._layers = layers
        self._copies_network_files = of_container

    def mount(self, new_root: str, place: str) -> bool:
        """Mount a slot's root directory at `new_root`, in a mount namespace of the caller's own.

        Args:
            new_root: where to mount.
            place: the directory that holds the slot's changes.

        Returns:
            Whether a slot has used `place` before.
        """
        fresh = not os.path.isdir(place)
        if fresh:
            os.mkdir(place, 0o700)
        for number, layer in enumerate(self._layers):
            upper, work = (os.path.join(place, "%d-%s" % (number, name)) for name in ("upper", "work"))
            if not os.path.isdir(upper):
                os.mkdir(upper)
                os.chown(upper, *layer.owner)
                os.chmod(upper, layer.mode)
            remove_tree(work)  # a `volatile` overlay leaves a mark in it, and can't be mounted again with that
            os.mkdir(work)
            os.chown(work, self.ids.root, self.ids.root)
            options = "lowerdir=%s,upperdir=%s,workdir=%s,%s"
            options %= (":".join(layer.lowers), upper, work, mounts.OVERLAY_OPTIONS)
            target = new_root if layer.target == "/" else new_root + layer.target
            mounts.mount_point(new_root, layer.target, True, not fresh)
            mounts.mount("overlay", target, "overlay", mounts.MS_NODEV, options)
        if fresh and self._copies_network_files:
            self._copy_network_files(new_root + "/etc")
        return not fresh

    def _copy_network_files(self, folder: str) -> None:
        if os.path.islink(folder) or not os.path.isdir(folder):
            return
        for name in _NETWORK_FILES:
            try:
                with open("/etc/" + name, "rb") as file:
                    content = file.read(_NETWORK_FILE_BYTES)
            except OSError:
                continue
            path = os.path.join(folder, name)
            if os.path.lexists(path):
                os.unlink(path)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as copy:
                copy.write(content)
                os.fchown(copy.fileno(), self.ids.root, self.ids.root)


def make_layers(
    directory: str,
    root: str | None,
    visible: Iterable[str],
    unreadable: Sequence[str],
    places: Iterable[str],
    ids: IdMap,
) -> Layers:
    """Make the layers of the slots' root directories, and try to mount them.

    Args:
        directory: the path of a new directory for the layers, on the disk of the slots' files. Slots can't reach it.
        root: the directory that the slots' roots start from. None assembles them from the system directories here.
        visible: more paths to show, read-only.
        unreadable: files and directories in the system directories that not every user may read. They are hidden,
            because root of a slot may read everything that it sees.
        places: directories that must exist in the slots' roots, to mount on.
        ids: the ids of the slots' user namespaces. If they differ from the sandbox's, the layers are mounted with them.

    Raises:
        OSError: the kernel can't mount the layers here.
    """
    os.mkdir(directory, 0o700)
    maker = _LayerMaker(directory, ids, list(places))
    try:
        layers = maker.over_one(root, visible) if root is not None else maker.over_system(visible, unreadable)
    finally:
        maker.close()
    trial = os.path.join(directory, "trial")
    os.mkdir(trial)
    os.mkdir(trial + "/root")

    def attempt() -> None:
        namespaces.unshare(mount=True)
        mounts.make_private()
        layers.mount(trial + "/root", trial + "/changes")
        os.chroot(trial + "/root")
        if not os.path.exists("/bin/sh"):
            message = "slots would have no /bin/sh: below %s there is none, and what is mounted there is not shown"
            raise OSError(0, message % (root or "/"))

    failure = in_child(attempt)
    remove_tree(trial)
    if failure:
        raise OSError(0, failure)
    return layers


class _LayerMaker:
    """Makes the layers of one sandbox."""

    def __init__(self, directory: str, ids: IdMap, places: list[str]) -> None:
        self._directory = directory
        self._ids = ids
        self._places = places
        self._count = 0
        self._namespace = namespaces.user_namespace(ids.lines) if ids.root else None

    def close(self) -> None:
        if self._namespace is not None:
            os.close(self._namespace)

    def over_one(self, root: str, visible: Iterable[str]) -> Layers:
        """Return the layers over one directory. Mounts below it are not shown."""
        device = os.stat(root).st_dev
        binds = []
        for path in visible:
            if os.path.exists(path) and (root != "/" or os.stat(path).st_dev != device):
                binds.append((os.path.realpath(path), os.path.abspath(path), False))
        upper = self._new("places")
        self._copy_owner(root, upper)
        for path in (*self._places, "/dev", "/proc"):
            self._mount_point(root, upper, path)
        if not os.path.lexists(os.path.join(root, "tmp")):
            self._furnish(upper, "/tmp", _SKELETON["/tmp"])
        for source, path, _ in binds:
            self._mount_point(root, upper, path, os.path.isdir(source))
        return Layers(self._ids, [self._layer("/", [upper, self._with_ids(root)], root)], binds, root == "/")

    def over_system(self, visible: Iterable[str], unreadable: Sequence[str]) -> Layers:
        """Return the layers over the system's directories, with the unreadable paths hidden."""
        skeleton = self._new("skeleton")
        tops = [path for path in _TOPS if os.path.isdir(path) and not os.path.islink(path)]
        for path, mode in _SKELETON.items():
            self._furnish(skeleton, path, mode)
        for path in tops:
            self._furnish(skeleton, path, 0o755)
        for path in _TOPS:
            if os.path.islink(path):
                self._link(os.readlink(path), skeleton + path)
        for path, text in (("/var/run", "/run"), ("/var/lock", "/run/lock")):
            self._link(text, skeleton + path)
        for path in self._places:
            self._furnish(skeleton, path, 0o755)
        layers, binds = [self._layer("/", [skeleton], skeleton)], []
        for top in tops:
            hidden = self._new("hidden")
            binds += self._hide(top, hidden, unreadable)
            layers.append(self._layer(top, [hidden, self._with_ids(top)], top))
        for path in visible:
            if os.path.exists(path) and not is_below(os.path.realpath(path), tops):
                binds.append((os.path.realpath(path), os.path.abspath(path), False))
                if not is_below(os.path.abspath(path), tops):
                    self._mount_point(skeleton, skeleton, os.path.abspath(path), os.path.isdir(path))
        return Layers(self._ids, layers, binds)

    def _layer(self, target: str, lowers: list[str], like: str) -> Layer:
        info = os.stat(like)
        is_ours = is_below(like, [self._directory])  # then its owner is mapped already
        owner = (info.st_uid, info.st_gid) if is_ours else (self._outside(info.st_uid), self._outside(info.st_gid))
        return Layer(target, lowers, owner, stat.S_IMODE(info.st_mode))

    def _outside(self, number: int) -> int:
        return self._ids.outside(number)

    def _new(self, kind: str) -> str:
        self._count += 1
        path = os.path.join(self._directory, "%s-%d" % (kind, self._count))
        os.mkdir(path)
        os.chown(path, self._ids.root, self._ids.root)
        os.chmod(path, 0o755)
        return path

    def _with_ids(self, source: str) -> str:
        """Mount a directory with the slots' ids, if they differ from ours. Return where it is mounted."""
        if self._namespace is None:
            return source
        target = self._new("mapped")
        mounts.mount_with_ids(source, target, self._namespace)
        return target

    def _furnish(self, folder: str, path: str, mode: int) -> None:
        """Make a directory that belongs to the slots' root, and its parents."""
        self._mount_point(folder, folder, path)
        os.chmod(folder + path, mode)

    def _link(self, text: str, path: str) -> None:
        os.symlink(text, path)
        os.chown(path, self._ids.root, self._ids.root, follow_symlinks=False)

    def _mount_point(self, top: str, layer: str, path: str, directory: bool = True) -> None:
        """Make a mount point in a layer over `top`. If a path in `top` is a link, nothing is made."""
        names = path.strip("/").split("/")
        for number, name in enumerate(names, 1):
            top, layer = os.path.join(top, name), os.path.join(layer, name)
            if os.path.islink(top):
                return
            if os.path.lexists(layer):
                continue
            if number < len(names) or directory:
                os.mkdir(layer)
                os.chmod(layer, 0o755)
            else:
                os.close(os.open(layer, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            os.chown(layer, self._ids.root, self._ids.root)
            if os.path.isdir(top):
                self._copy_owner(top, layer)

    # --- hiding parts of a host from the root of a slot -------------------------------------------------------------

    def _hide(self, top: str, hidden: str, unreadable: Sequence[str]) -> list[Bind]:
        """Hide the paths below `top` that are masked by a tmpfs or `unreadable`, by entries in the layer `hidden`.

        Return binds for all other mounts below `top`, because an overlay shows no mounts below its lower layers.
        """
        binds = []
        self._copy_owner(top, hidden)
        masks = []
        for path, kind in mounts.mounts_below(top):
            if kind == "tmpfs":
                self._empty(top, hidden, path)
                masks.append(path)
            else:
                binds.append((path, path, False))
                self._mount_point(top, hidden, path[len(top) :], os.path.isdir(path))
        for path in unreadable:
            if is_below(path, [top]) and not is_below(path, masks):
                self._cover(top, hidden, path)
        if top == "/etc":
            self._write_shadows(hidden)
        return binds

    def _cover(self, top: str, hidden: str, path: str) -> None:
        """Hide a path by a device with the number 0: an overlay then shows nothing there."""
        try:
            target = self._parents(top, hidden, path)
        except FileNotFoundError:  # its directory was removed since the search
            return
        if not os.path.lexists(target):
            os.mknod(target, stat.S_IFCHR, 0)

    def _empty(self, top: str, hidden: str, path: str) -> None:
        """Replace a path by an empty directory."""
        target = self._parents(top, hidden, path)
        if os.path.lexists(target):
            return
        os.mkdir(target)
        os.chmod(target, 0o755)
        os.chown(target, self._ids.root, self._ids.root)
        os.setxattr(target, "trusted.overlay.opaque", b"y")

    def _parents(self, top: str, hidden: str, path: str) -> str:
        """Make the parents of a path below `top` in the layer. Return the path in the layer."""
        names = path[len(top) + 1 :].split("/")
        source, target = top, hidden
        for name in names[:-1]:
            source, target = os.path.join(source, name), os.path.join(target, name)
            if not os.path.lexists(target):
                info = os.lstat(source)
                os.mkdir(target)
                self._own(target, info)
        return os.path.join(target, names[-1])

    def _copy_owner(self, source: str, target: str) -> None:
        self._own(target, os.lstat(source))

    def _own(self, target: str, info: os.stat_result) -> None:
        os.chown(target, self._outside(info.st_uid), self._outside(info.st_gid))
        os.chmod(target, stat.S_IMODE(info.st_mode))

    def _write_shadows(self, hidden: str) -> None:
        """Write shadow files without passwords for all users and groups. Without these files, `su` and others fail."""
        for source, name, line in (("passwd", "shadow", "%s:*:19000:0:99999:7:::"), ("group", "gshadow", "%s:*::")):
            with open("/etc/" + source, encoding="utf-8", errors="surrogateescape") as file:
                names = [row.split(":")[0] for row in file if ":" in row]
            path = os.path.join(hidden, name)
            if os.path.lexists(path):
                os.unlink(path)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write("".join(line % each + "\n" for each in names).encode("utf-8", "surrogateescape"))
                os.fchown(file.fileno(), self._ids.root, self._ids.root)
