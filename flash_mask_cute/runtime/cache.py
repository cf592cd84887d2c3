"""Compile cache: one dictionary per process, one directory per user.

A compiled kernel is found by an identity, not by a file name. The identity consists of the caller's
key (everything that changes the generated code), the architecture, the option string, this
package's sources, the versions of the compiler, and the environment variables that affect it. Its
canonical JSON text is hashed for the file names and stored beside the object file, so a loaded
entry is compared with the request.

    <directory>/v1/<name>-<sha256>.o      object file with one TVM-FFI function
    <directory>/v1/<name>-<sha256>.json   identity, checksum of the .o, the builder's meta facts
    <directory>/v1/<name>-<sha256>.lock   there only while a process compiles this entry

The directory is $FLASH_MASK_CUTE_CACHE_DIR, else $XDG_CACHE_HOME/flash_mask_cute, else
~/.cache/flash_mask_cute. "0" or "off" turns the disk part off. Object files are code: the v1 folder
must belong to the calling user and be writable by nobody else, and so must the entries.

A disk problem never fails a call: the kernel is compiled, not stored, and one warning gives the
reason. Importing this module imports neither cutlass nor torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import stat
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flash_mask_cute.runtime.packages import tells_what_to_install

DIRECTORY_VARIABLE = "FLASH_MASK_CUTE_CACHE_DIR"
DEFAULT_MAX_BYTES = 2 << 30
DEFAULT_LOCK_TIMEOUT_S = 600.0

_LAYOUT = "v1"
_POLL_S = 0.02
_STALE_TEMPORARY_S = 3600.0
_TEMPORARY_PREFIX = ".tmp-"
_UNSTORED_SYMBOL = "flash_mask_cute_unstored"
# Settings of the DSL that choose what is printed, logged, dumped or cached, never the code.
_NEUTRAL_DSL_VARIABLES = re.compile(
    r"CUTE_DSL_(CACHE_DIR|DISABLE_FILE_CACHING|DUMP_DIR|ENABLE_OPTIMIZATION_WARNINGS"
    r"|FILTER_STACKTRACE|JIT_CACHE_MAX_ELEMS|JIT_TIME_PROFILING|KEEP(_\w+)?|LOG_\w+|NO_CACHE"
    r"|PRINT_\w+|SHOW_STACKTRACE|WARNINGS_IGNORE)"
)


class Compiled(NamedTuple):
    """A compiled kernel.

    function takes positional arguments only. A builder returns the object that `cute.compile` made
    with the option --enable-tvm-ffi, which needs no engine to run in. The cache returns the
    function loaded from the exported object file, which has half the call overhead.
    meta holds JSON values about the generated code, such as registers, smem bytes and spills.
    """

    function: Callable[..., Any]
    meta: Mapping[str, Any]


class CacheUsage(NamedTuple):
    """Disk usage of a cache.

    folder: of the entries, which may not exist; None if the disk is not used. kernels: number of
    entries. num_bytes: size of all their files.
    """

    folder: Path | None
    kernels: int = 0
    num_bytes: int = 0


class CompileCache:
    """Maps a key to a `Compiled`, building each at most once.

    Args:
        directory: where entries live; None means the environment decides, at each miss.
        max_bytes: when storing exceeds this total, the least recently used entries are deleted.
        lock_timeout_s: how long to wait for another process that compiles the same key.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        self._max_bytes = max_bytes
        self._lock_timeout_s = lock_timeout_s
        self._memory: dict[Hashable, Compiled] = {}
        self._has_warned = False

    def get(
        self,
        name: str,
        key: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        build: Callable[[], Compiled],
        *,
        arch: str,
        options: str,
        token: Hashable | None = None,
    ) -> Compiled:
        """Return the kernel of `key`: from memory, else from disk, else from `build()`.

        Args:
            name: short name of the kernel kind, letters, digits, - and _; begins the file names.
            key: JSON-able mapping of everything that changes the generated code, or a function that
                makes it, called only on a miss if `token` is given.
            build: compiles the kernel. It runs under `compile_lock()`, at most once per key among
                all processes that share the directory; its exceptions reach the caller.
            arch: target architecture, such as "sm_90a".
            options: the option string given to the compiler.
            token: a hashable equivalent of `key`. With it a hit costs one dictionary look-up;
                without it the key is written as JSON on each call.

        Raises:
            TypeError, ValueError: `key` holds something that JSON cannot express.
        """
        if token is None:
            key = key() if callable(key) else key
            token = _canonical(key)
        memory_key = (name, arch, options, token)
        found = self._memory.get(memory_key)
        if found is not None:
            return found
        return self._miss(
            memory_key, name, key() if callable(key) else key, build, arch=arch, options=options
        )

    def clear_memory(self) -> None:
        """Forget the kernels of this process; the entries on disk stay."""
        self._memory.clear()

    def usage(self) -> CacheUsage:
        """The current disk usage of the cache. No folder is made."""
        try:
            root = self._root()
        except RuntimeError:  # there is no home directory
            root = None
        if root is None:
            return CacheUsage(None)
        folder = root / _LAYOUT
        kernels = num_bytes = 0
        with contextlib.suppress(OSError):  # not there, or not readable
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another process evicts
                    num_bytes += path.lstat().st_size
                    kernels += path.suffix == ".o"
        return CacheUsage(folder, kernels, num_bytes)

    @tells_what_to_install()
    def _miss(
        self,
        memory_key: Hashable,
        name: str,
        key: Mapping[str, Any],
        build: Callable[[], Compiled],
        *,
        arch: str,
        options: str,
    ) -> Compiled:
        folder = self._folder()
        entry = None
        if folder is not None:
            entry = _Entry(folder, name, _canonical(_identity(name, key, arch, options)))
        deadline = time.monotonic() + self._lock_timeout_s
        while True:
            # Not held while another process compiles: other threads may go on meanwhile.
            with compile_lock():
                found = self._memory.get(memory_key)
                if found is None:
                    found = self._attempt(entry, build, time.monotonic() >= deadline)
                if found is not None:
                    self._memory[memory_key] = found
                    return found
            time.sleep(_POLL_S)

    def _attempt(
        self, entry: _Entry | None, build: Callable[[], Compiled], out_of_time: bool
    ) -> Compiled | None:
        """Load or build; None while another process compiles this entry."""
        if entry is None:
            return _load_unstored(_count(build()))
        found = entry.load()
        if found is not None:
            return found
        try:
            lock = entry.try_lock()
        except OSError as error:
            self._warn(f"cannot lock {entry.lock_path}: {error}")
            return _load_unstored(_count(build()))
        if lock is None:
            if not out_of_time:
                return None
            self._warn(f"{entry.lock_path} has been held for more than {self._lock_timeout_s:g} s")
            return _load_unstored(_count(build()))
        with _released(entry.lock_path, lock):
            found = entry.load()  # written between the first look and the lock
            if found is not None:
                return found
            entry.discard()
            return self._store(entry, _count(build()))

    def _store(self, entry: _Entry, compiled: Compiled) -> Compiled:
        try:
            entry.store(compiled)
            _evict(entry.folder, self._max_bytes, keep=entry.stem)
        except Exception as error:  # mostly a full disk
            self._warn(f"cannot store {entry.object_path}: {error}")
        return entry.load() or _load_unstored(compiled)

    def _root(self) -> Path | None:
        """The directory, which may not exist; None if the disk is not used.

        Raises:
            RuntimeError: it would be in the home directory, and there is none.
        """
        if self._directory is not None:
            return self._directory
        value = os.environ.get(DIRECTORY_VARIABLE, "")
        if value.lower() in ("0", "off"):
            return None
        return Path(value) if value else _default_root()

    def _folder(self) -> Path | None:
        """Return the folder of the entries, made if necessary; None if the disk is not used."""
        try:
            root = self._root()
            if root is None:
                return None
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = root / _LAYOUT
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            self._warn(f"cannot use its directory: {error}")
            return None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            self._warn(f"{folder} is not a directory that belongs to the current user")
            return None
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            self._warn(f"{folder} can be written by other users (mode {status.st_mode & 0o777:o})")
            return None
        return folder

    def _warn(self, reason: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"flash_mask_cute compiles without its disk cache: {reason}. Set "
            f"{DIRECTORY_VARIABLE} to a private writable directory, or to 'off'.",
            RuntimeWarning,
            stacklevel=2,
        )


# -- one entry on disk --------------------------------------------------------------------------


class _Entry:
    """The files of one identity. An entry that fails any check counts as absent."""

    def __init__(self, folder: Path, name: str, identity: str) -> None:
        digest = hashlib.sha256(identity.encode()).hexdigest()
        self.folder = folder
        self.stem = f"{name}-{digest}"
        self.object_path = folder / f"{self.stem}.o"
        self.sidecar_path = folder / f"{self.stem}.json"
        self.lock_path = folder / f"{self.stem}.lock"
        self._identity = json.loads(identity)
        self._symbol = f"flash_mask_cute_{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{digest[:16]}"

    def load(self) -> Compiled | None:
        try:
            sidecar = json.loads(_read_own(self.sidecar_path))
            checksum = hashlib.sha256(_read_own(self.object_path)).hexdigest()
            if sidecar["identity"] != self._identity or sidecar["object_sha256"] != checksum:
                return None
            found = Compiled(_load(str(self.object_path), self._symbol), dict(sidecar["meta"]))
        except Exception:  # absent, unreadable, corrupt, or refused by the loader: all mean rebuild
            return None
        with contextlib.suppress(OSError):
            os.utime(self.sidecar_path)  # eviction goes by this time; atime is often not kept
        return found

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.sidecar_path.unlink(missing_ok=True)
            self.object_path.unlink(missing_ok=True)

    def store(self, compiled: Compiled) -> None:
        """Write the object first: a sidecar always describes an object that is complete."""
        temporary = self.folder / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        part_object, part_sidecar = temporary.with_suffix(".o"), temporary.with_suffix(".json")
        try:
            function: Any = compiled.function
            function.export_to_c(str(part_object), function_name=self._symbol)
            part_object.chmod(0o600)
            sidecar = {
                "identity": self._identity,
                "object_sha256": hashlib.sha256(part_object.read_bytes()).hexdigest(),
                "meta": dict(compiled.meta),
            }
            part_sidecar.touch(mode=0o600)
            part_sidecar.write_text(json.dumps(sidecar, indent=1, sort_keys=True))
            os.replace(part_object, self.object_path)
            os.replace(part_sidecar, self.sidecar_path)
        finally:
            part_object.unlink(missing_ok=True)
            part_sidecar.unlink(missing_ok=True)

    def try_lock(self) -> int | None:
        """Return a file descriptor that holds the lock of this entry, None while another has it.

        The holder deletes the file before it releases the lock, so lock files do not accumulate. A
        process that then gets the lock of a deleted file has locked nothing, and tries again.
        """
        while True:
            descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_still(self.lock_path, descriptor):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _load(path: str, symbol: str) -> Callable[..., Any]:
    from cutlass.cute.runtime import load_module

    function: Callable[..., Any] = getattr(load_module(path, enable_tvm_ffi=True), symbol)
    return function


def _load_unstored(compiled: Compiled) -> Compiled:
    """A builder's result, loaded from an object file that is only in memory."""
    exported: Any = compiled.function
    with os.fdopen(os.memfd_create(_UNSTORED_SYMBOL), "rb") as file:
        path = f"/proc/self/fd/{file.fileno()}"
        exported.export_to_c(path, function_name=_UNSTORED_SYMBOL)
        return Compiled(_load(path, _UNSTORED_SYMBOL), compiled.meta)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _released(path: Path, descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            # Explicit, because a child forked meanwhile keeps the descriptor open.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _read_own(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a regular file of the current user")
        return file.read()


def _evict(folder: Path, max_bytes: int, *, keep: str) -> None:
    """Delete the least recently used entries until the rest fits `max_bytes`; `keep` stays."""
    sizes: dict[str, int] = {}
    used: dict[str, float] = {}
    now = time.time()
    for path in folder.iterdir():
        if path.suffix not in (".o", ".json"):
            continue
        try:
            status = path.lstat()
        except FileNotFoundError:  # another process evicts too
            continue
        if path.name.startswith(_TEMPORARY_PREFIX):
            if now - status.st_mtime > _STALE_TEMPORARY_S:  # left by a process that was killed
                path.unlink(missing_ok=True)
            continue
        sizes[path.stem] = sizes.get(path.stem, 0) + status.st_size
        used[path.stem] = max(used.get(path.stem, 0.0), status.st_mtime)
    total = sum(sizes.values())
    for stem in sorted(sizes, key=used.__getitem__):
        if total <= max_bytes:
            break
        if stem != keep:
            (folder / f"{stem}.json").unlink(missing_ok=True)
            (folder / f"{stem}.o").unlink(missing_ok=True)
            total -= sizes[stem]


# -- identity -----------------------------------------------------------------------------------


def _canonical(value: Mapping[str, Any]) -> str:
    """Write canonical JSON: equal mappings give equal text in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _identity(name: str, key: Mapping[str, Any], arch: str, options: str) -> dict[str, Any]:
    return {
        "name": name,
        "key": dict(key),
        "arch": arch,
        "options": options,
        "sources": source_fingerprint(),
        "toolchain": _toolchain(),
        "environment": {
            variable: value
            for variable, value in os.environ.items()
            if variable.startswith("CUTE_DSL_") and not _NEUTRAL_DSL_VARIABLES.fullmatch(variable)
        },
    }


@functools.cache
def source_fingerprint() -> str:
    """SHA-256 of all Python sources of this package, read once per process."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def _toolchain() -> dict[str, str]:
    import cutlass
    import tvm_ffi

    cuda = cutlass.CUDA_VERSION
    return {
        "cutlass": cutlass.__version__,
        "cuda": f"{cuda.major}.{cuda.minor}",
        "tvm_ffi": tvm_ffi.__version__,
        "machine": platform.machine(),
    }


def _default_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "flash_mask_cute"


# -- process-wide state -------------------------------------------------------------------------

_lock = threading.RLock()
_builds = 0


def compile_lock() -> threading.RLock:
    """The lock under which this process compiles.

    Two threads in `cute.compile` at once abort the process. So code that compiles without a
    `CompileCache` takes this lock too.
    """
    return _lock


def compile_count() -> int:
    """Number of kernels that this process has built, without cache hits; a forked child starts at
    0."""
    return _builds


def _count(compiled: Compiled) -> Compiled:
    global _builds
    _builds += 1
    return compiled


def _start_afresh() -> None:
    """In a forked child: the thread that held the lock does not exist here."""
    global _lock, _builds
    _lock = threading.RLock()
    _builds = 0


os.register_at_fork(after_in_child=_start_afresh)
