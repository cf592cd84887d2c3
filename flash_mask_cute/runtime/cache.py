"""Compile cache: the kernels used last per process, one directory per user.

docs/host.md says what identifies a kernel, where entries are, and who may own them. The canonical
JSON text of the identity is hashed for the file names and stored beside the object file, so a
loaded entry is compared with the request.

    <directory>/v1/<name>-<sha256>.o      object file with one TVM-FFI function
    <directory>/v1/<name>-<sha256>.json   identity, checksum of the .o, the builder's meta facts
    <directory>/v1/<name>-<sha256>.lock   there only while a process compiles this entry

Importing this module imports neither cutlass nor torch.
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
from flash_mask_cute.runtime.process_state import close_end, count_build, pipe, say_build
from flash_mask_cute.runtime.process_state import compile_count as compile_count
from flash_mask_cute.runtime.process_state import compile_lock as compile_lock
from flash_mask_cute.runtime.recent import Recent
from flash_mask_cute.runtime.sources import SOURCES

DIRECTORY_VARIABLE = "FLASH_MASK_CUTE_CACHE_DIR"
DEFAULT_MAX_BYTES = 2 << 30
DEFAULT_MAX_IN_MEMORY = 512
DEFAULT_LOCK_TIMEOUT_S = 600.0

_LAYOUT = "v1"
_POLL_S = 0.02
_STALE_TEMPORARY_S = 3600.0
_TEMPORARY_PREFIX = ".tmp-"
_REMEDY = f" Set {DIRECTORY_VARIABLE} to a private writable directory, or to 'off'."
_UNSTORED_SYMBOL = "flash_mask_cute_unstored"
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# Settings of the DSL that choose what is printed, logged, dumped or cached, never the code.
_NEUTRAL_DSL_VARIABLES = re.compile(
    r"CUTE_DSL_(CACHE_DIR|DISABLE_FILE_CACHING|DUMP_DIR|ENABLE_OPTIMIZATION_WARNINGS"
    r"|FILTER_STACKTRACE|JIT_CACHE_MAX_ELEMS|JIT_TIME_PROFILING|KEEP(_\w+)?|LOG_\w+|NO_CACHE"
    r"|PRINT_\w+|SHOW_STACKTRACE|WARNINGS_IGNORE)"
)


class Compiled(NamedTuple):
    """A compiled kernel.

    function takes positional arguments only. That of a builder is what `cute.compile` made with
    --enable-tvm-ffi. That of the cache is loaded from the object file, and called in half the time.
    meta holds JSON values about the generated code, such as registers, smem bytes and spills.
    """

    function: Callable[..., Any]
    meta: Mapping[str, Any]


class CacheUsage(NamedTuple):
    """Disk usage of a cache. folder: of the entries, which may not exist; None if the disk is not
    used. kernels: number of entries. num_bytes: size of all their files."""

    folder: Path | None
    kernels: int = 0
    num_bytes: int = 0


class CompileCache:
    """Maps a key to a `Compiled`, building each at most once as long as it is kept.

    Args:
        directory: where entries live; None means the environment decides, at each miss.
        max_bytes: when storing exceeds this total, the least recently used entries are deleted.
        max_in_memory: how many kernels the process keeps, as `Recent`; others come from the disk.
        lock_timeout_s: how long to wait for another process that compiles the same key.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_in_memory: int = DEFAULT_MAX_IN_MEMORY,
        lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        self._max_bytes = max_bytes
        self._lock_timeout_s = lock_timeout_s
        self._memory: dict[Hashable, Compiled] = Recent(max_in_memory)
        self._has_warned = False

    def get(
        self,
        name: str,
        key: Callable[[], Mapping[str, Any]],
        build: Callable[[], Compiled],
        *,
        arch: str,
        options: str,
        token: Hashable,
    ) -> Compiled:
        """Return the kernel of `key`: from memory, else from disk, else from `build()`.

        name: letters, digits, - and _, which file names begin with. key: makes a mapping of
        everything that changes the generated code; called on a miss. build: runs under
        `compile_lock()`, at most once per key among all processes that share the directory; its
        exceptions reach the caller. options: of the compiler. token: a hashable equivalent of the
        key. Raises TypeError, ValueError: the key has something that JSON cannot express."""
        memory_key = (name, arch, options, token)
        found = self._memory.get(memory_key)
        if found is not None:
            return found
        return self._miss(memory_key, lambda: self._entry(name, key(), arch, options), build)

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
        with contextlib.suppress(OSError):  # missing, or not readable
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another process evicts
                    num_bytes += path.lstat().st_size
                    kernels += path.suffix == ".o"
        return CacheUsage(folder, kernels, num_bytes)

    @tells_what_to_install()
    def _miss(
        self,
        memory_key: Hashable,
        entry_of: Callable[[], _Entry | None],
        build: Callable[[], Compiled],
    ) -> Compiled:
        entry = entry_of()
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

    def _entry(self, name: str, key: Mapping[str, Any], arch: str, options: str) -> _Entry | None:
        """Where the disk has the kernel; None if the disk is not used."""
        folder = self._folder()
        if folder is None:
            return None
        try:
            sources = SOURCES.fingerprint()
        except LookupError as error:
            self._warn(str(error), remedy="")
            return None
        return _Entry(folder, name, _canonical(_identity(name, key, arch, options, sources)))

    def _attempt(
        self, entry: _Entry | None, build: Callable[[], Compiled], out_of_time: bool
    ) -> Compiled | None:
        """Load or build; None while another process compiles this entry."""
        if entry is None:
            return _unstored(_built(build))
        found = entry.load()
        if found is not None:
            return found
        try:
            lock = entry.try_lock()
        except OSError as error:
            self._warn(f"cannot lock {entry.lock_path}: {error}")
            return _unstored(_built(build))
        if lock is None:
            if not out_of_time:
                return None
            self._warn(f"{entry.lock_path} has been held for more than {self._lock_timeout_s:g} s")
            return _unstored(_built(build))
        with _released(entry.lock_path, lock):
            found = entry.load()  # written between the first look and the lock
            if found is not None:
                return found
            entry.discard()
            return self._store(entry, _built(build))

    def _store(self, entry: _Entry, compiled: Compiled) -> Compiled:
        content = _exported(compiled, entry.symbol)
        try:
            SOURCES.fingerprint()  # the compiler has read the kernel's sources meanwhile
            entry.store(content, compiled.meta)
            _evict(entry.folder, self._max_bytes, keep=entry.stem)
        except LookupError as error:
            self._warn(str(error), remedy="")
        except Exception as error:  # mostly a full disk
            self._warn(f"cannot store {entry.object_path}: {error}")
        return Compiled(_load(content, entry.symbol), compiled.meta)

    def _root(self) -> Path | None:
        """The directory, which may not exist; None if the disk is not used. Raises RuntimeError: it
        would be in the home directory, and there is none."""
        if self._directory is not None:
            return self._directory
        value = os.environ.get(DIRECTORY_VARIABLE, "")
        if value.lower() in ("0", "off"):
            return None
        if value:
            return Path(value).expanduser()
        base = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "flash_mask_cute"

    def _folder(self) -> Path | None:
        """The folder of the entries, made if necessary; None if the disk is not used."""
        try:
            root = self._root()
            if root is None:
                return None
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            above = root.stat()
            folder = root / _LAYOUT
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            self._warn(f"cannot use its directory: {error}")
            return None
        user = os.geteuid()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != user:
            self._warn(f"{folder} is not a directory that belongs to the current user")
            return None
        if status.st_mode & _WRITTEN_BY_OTHERS:
            self._warn(f"{folder} can be written by other users (mode {status.st_mode & 0o777:o})")
            return None
        if above.st_uid not in (user, 0):
            self._warn(f"{root} belongs to another user")
            return None
        if above.st_mode & _WRITTEN_BY_OTHERS and not above.st_mode & stat.S_ISVTX:
            self._warn(
                f"{root} can be written by other users (mode {above.st_mode & 0o777:o}); a folder "
                "in it that does not exist yet is made private"
            )
            return None
        return folder

    def _warn(self, reason: str, remedy: str = _REMEDY) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"flash_mask_cute compiles without its disk cache: {reason}.{remedy}",
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
        self.symbol = f"flash_mask_cute_{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{digest[:16]}"

    def load(self) -> Compiled | None:
        try:
            sidecar = json.loads(_read_own(self.sidecar_path))
            content = _read_own(self.object_path)
            checksum = hashlib.sha256(content).hexdigest()
            if sidecar["identity"] != self._identity or sidecar["object_sha256"] != checksum:
                return None
            found = Compiled(_load(content, self.symbol), dict(sidecar["meta"]))
        except Exception:  # absent, unreadable, corrupt, or refused by the loader: all mean rebuild
            return None
        with contextlib.suppress(OSError):
            os.utime(self.sidecar_path)  # eviction goes by this time; atime is often not kept
        return found

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.sidecar_path.unlink(missing_ok=True)
            self.object_path.unlink(missing_ok=True)

    def store(self, content: bytes, meta: Mapping[str, Any]) -> None:
        """Write the object first: a sidecar always describes an object that is complete."""
        temporary = self.folder / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        part_object, part_sidecar = temporary.with_suffix(".o"), temporary.with_suffix(".json")
        sidecar = {
            "identity": self._identity,
            "object_sha256": hashlib.sha256(content).hexdigest(),
            "meta": dict(meta),
        }
        try:
            _write_private(part_object, content)
            _write_private(part_sidecar, json.dumps(sidecar, indent=1, sort_keys=True).encode())
            os.replace(part_object, self.object_path)
            os.replace(part_sidecar, self.sidecar_path)
        finally:
            part_object.unlink(missing_ok=True)
            part_sidecar.unlink(missing_ok=True)

    def try_lock(self) -> int | None:
        """A file descriptor that holds the lock of this entry; None while another has it.

        The holder deletes the file before it releases the lock. A process that then gets the lock
        of a deleted file has locked nothing, and tries again.
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


def _built(build: Callable[[], Compiled]) -> Compiled:
    say_build()
    compiled = build()
    count_build()
    return compiled


# The DSL takes paths, and reads and writes them in one piece. A pipe has a path, and no limit on
# the size of files (`ulimit -f`), which holds in memory, too.


def _exported(compiled: Compiled, symbol: str) -> bytes:
    """The object file of a builder's result, with one function of this name."""
    function: Any = compiled.function
    content: list[bytes] = []
    with pipe() as (reading, writing):

        def drain() -> None:
            with open(reading, "rb", closefd=False) as file:
                content.append(file.read())

        reader = threading.Thread(target=drain, name="flash_mask_cute export")
        reader.start()
        try:
            function.export_to_c(f"/proc/self/fd/{writing}", function_name=symbol)
        finally:
            close_end(writing)
            reader.join()
    return content[0]


def _load(content: bytes, symbol: str) -> Callable[..., Any]:
    """The function of this name in an object file."""
    from cutlass.cute.runtime import load_module

    with pipe() as (reading, writing):

        def feed() -> None:
            with contextlib.suppress(BrokenPipeError), open(writing, "wb", closefd=False) as file:
                file.write(content)
            close_end(writing)

        writer = threading.Thread(target=feed, name="flash_mask_cute load")
        writer.start()
        try:
            module = load_module(f"/proc/self/fd/{reading}", enable_tvm_ffi=True)
        finally:
            close_end(reading)
            writer.join()
    function: Callable[..., Any] = getattr(module, symbol)
    return function


def _unstored(compiled: Compiled) -> Compiled:
    """A builder's result, loaded from an object file that is only in memory."""
    return Compiled(_load(_exported(compiled, _UNSTORED_SYMBOL), _UNSTORED_SYMBOL), compiled.meta)


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
    # opening a pipe that somebody left there does not wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a regular file of the current user")
        if status.st_mode & _WRITTEN_BY_OTHERS:
            raise PermissionError(f"{path} can be written by other users")
        return file.read()


def _write_private(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)


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


def _identity(
    name: str, key: Mapping[str, Any], arch: str, options: str, sources: str
) -> dict[str, Any]:
    return {
        "name": name,
        "key": dict(key),
        "arch": arch,
        "options": options,
        "sources": sources,
        "toolchain": _toolchain(),
        "environment": {
            variable: value
            for variable, value in os.environ.items()
            if variable.startswith("CUTE_DSL_") and not _NEUTRAL_DSL_VARIABLES.fullmatch(variable)
        },
    }


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
