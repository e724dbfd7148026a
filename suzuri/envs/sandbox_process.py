"""The process in which code of a model runs: it shuts itself in, then runs what comes on standard
input. sandbox.py starts it, without the package, so it imports the standard library alone.

Linux only in what shuts it in; where the system does not allow that, it says so and goes on.
"""

# pyright: strict

import ctypes
import os
import platform
import resource
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator

NOTHING, NETWORK, EVERYTHING = 0, 1, 2
"""How much of the system is shut out; what `tell` is told."""
NEW_MOUNTS, NEW_IPC, NEW_USERS = 0x0002_0000, 0x0800_0000, 0x1000_0000
NEW_PROCESSES, NEW_NETWORK = 0x2000_0000, 0x4000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048
"""Of a mount: what a process without rights of its own may not take away."""
RELATIME, MS_RELATIME = 4096, 1 << 21
DETACH = 2
DEATH_SIGNAL, NO_NEW_RIGHTS = 1, 38
KILL = 9
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SEEN = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/dev/null")
"""Of the system's files; the standard library comes besides."""
FIRST_USER = 1_000_000_000
"""Users from here on have no files, and each runs one program, so that limits are its own."""
MOST_FILES = 1000


class Libc:
    """System calls that the standard library does not have. OSError where one is refused."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self, name: str, *arguments: int | bytes | None) -> None:
        # As ints they would be cut to 32 bits.
        wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
        if getattr(self._libc, name)(*wide) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")

    def pivot_root(self) -> None:
        """The folder that this process is in becomes the root; nothing of the old one is left."""
        self("syscall", PIVOT_ROOT[platform.machine()], b".", b".")
        self("umount2", b".", DETACH)

    def bind(self, source: str, target: str) -> None:
        """Shows `source` at `target` as well, to be read only."""
        self("mount", os.fsencode(source), os.fsencode(target), None, MS_BIND | MS_REC, None)
        found = os.statvfs(target).f_flag
        flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | found & KEPT_FLAGS
        flags |= MS_RELATIME if found & RELATIME else 0
        self("mount", None, os.fsencode(target), None, flags, None)


def main() -> None:
    """Arguments: seconds of processor time, bytes of memory, of a file and of all files, processes,
    the descriptor that is told how much was shut out, and whether it must be all."""
    seconds, memory, size, files, processes, tell, is_required = map(int, sys.argv[1:8])
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    shut_out, is_apart = shut_in(Libc(), files)
    os.write(tell, str(shut_out).encode())
    os.close(tell)
    if is_required and shut_out != EVERYTHING:
        sys.exit("no code is run here: the system does not let it be shut in")
    if is_apart:
        _become_the_only_one()
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    sys.argv[:] = ["-"]
    sys.excepthook = _tell
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def _tell(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """As Python does, without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def shut_in(libc: "Libc", files: int) -> tuple[int, bool]:
    """Leaves the network and other processes behind, and all files but a few to be read and an
    empty folder of `files` bytes. Gives up every right. Returns how much of that there was, and
    whether children are among processes of their own."""
    user, group = os.getuid(), os.getgid()
    rest = NEW_MOUNTS | NEW_IPC | NEW_PROCESSES | NEW_NETWORK
    is_root = os.geteuid() == 0 and _left(libc, rest)
    if not is_root and not _left(libc, rest | NEW_USERS):
        return (NETWORK if _left(libc, NEW_USERS | NEW_NETWORK) else NOTHING), False
    try:
        if not is_root:
            _map_user(user, group)
        _change_root(libc, files)
        _give_up_rights(libc, is_root)
    except (OSError, AttributeError, KeyError):
        return NETWORK, True
    return EVERYTHING, True


def _left(libc: Libc, flags: int) -> bool:
    try:
        libc("unshare", flags)
    except (OSError, AttributeError):
        return False
    return True


def _map_user(user: int, group: int) -> None:
    """Whoever creates files must be somebody."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"1000 {user} 1"),
        ("gid_map", f"1000 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _change_root(libc: Libc, files: int) -> None:
    top = os.getcwd()
    root = f"{top}/in"
    libc("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    flags = MS_NOSUID | MS_NODEV
    libc("mount", b"tmpfs", os.fsencode(top), b"tmpfs", flags, b"size=64k,mode=0755")
    for path in _seen():
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
        elif not os.path.exists(target):
            if os.path.isdir(path):
                os.mkdir(target)
            else:
                os.close(os.open(target, os.O_CREAT))
            libc.bind(path, target)
    os.makedirs(f"{root}/tmp")
    options = f"size={files},nr_inodes={MOST_FILES},mode=0777".encode()
    libc("mount", b"tmpfs", os.fsencode(f"{root}/tmp"), b"tmpfs", flags, options)
    libc("mount", None, os.fsencode(top), None, flags | MS_REMOUNT | MS_BIND | MS_RDONLY, None)
    os.chdir(top)
    libc.pivot_root()
    # Who is in a changed root can make no namespaces, in which rights would be to be had again.
    os.chroot("in")
    os.chdir("/tmp")


def _seen() -> Iterator[str]:
    """Those of `SEEN` that exist, and the standard library if it lies elsewhere."""
    found = [path for path in SEEN if os.path.lexists(path)]
    yield from found
    for name in ("stdlib", "platstdlib"):
        path = os.path.realpath(sysconfig.get_path(name))
        if not any(path.startswith(os.path.realpath(other) + "/") for other in found):
            found.append(path)
            yield path


def _give_up_rights(libc: Libc, is_root: bool) -> None:
    if is_root:
        user = FIRST_USER + os.getpid()
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    libc("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)
    version = (ctypes.c_uint32 * 2)(0x2008_0522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    libc("capset", ctypes.addressof(version), ctypes.addressof(nothing))


def _become_the_only_one() -> None:
    """Goes on as a grandchild among processes of its own. Their first ends with it, and whatever is
    left ends with the first."""
    libc = Libc()
    for is_first in (True, False):
        child = os.fork()
        if child:
            while (ended := os.wait())[0] != child:
                pass
            status = os.waitstatus_to_exitcode(ended[1])
            os._exit(status if status >= 0 else 128 - status)
        if is_first:
            libc("prctl", DEATH_SIGNAL, KILL, 0, 0, 0)


if __name__ == "__main__":
    main()
