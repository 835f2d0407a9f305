"""Opening a store, for writing or for reading, and what to say when that fails."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ._schema import APPLICATION_ID, SCHEMA, VERSION, migration

FilePath = str | os.PathLike[str]
_PATIENCE = 5.0  # seconds for a lock to be released; nobody waits for a step yet


class StoreError(ValueError):
    """A store that cannot be opened or read, or does not hold what was asked for."""


_ADVICE = {  # a part of SQLite's message: what to do
    "not a database": "it is not a store; choose another file",
    "malformed": "it is damaged; choose another file",
    "locked": "close the program that holds it",
    "full": "free space on its disk",
    "readonly": "make the file and its folder writable, or copy it (with its -wal) elsewhere",
    "unable to open": "check that the file and its folder may be read and written",
}


def advice(error: sqlite3.Error) -> str:
    """What to do about an error of SQLite's."""
    matching = (advice for part, advice in _ADVICE.items() if part in str(error))
    return next(matching, "check the disk and the permissions of the file and its folder")


@contextmanager
def opening(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection in autocommit mode to a store, made if there is none; closed on an error."""
    if not path.parent.is_dir():
        raise StoreError(f"the folder {path.parent} does not exist: make it, or correct the path")
    with _explained(path):
        # Steps may end in another thread than the one that opened; Store has a lock.
        connection = sqlite3.connect(
            path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
        )
        try:
            if _pragma(connection, "schema_version") == 0:
                connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
            _check(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            if migration(connection):
                with transaction(connection):  # looked at again: another process may have done it
                    for statement in migration(connection):
                        connection.execute(statement)
            yield connection
        except BaseException:
            connection.close()
            raise


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that can only read, in one transaction: one moment of a store in use."""
    if not path.exists():
        raise StoreError(f"there is no store at {path}: check the path")
    with _explained(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_PATIENCE, isolation_level=None
        )
        try:
            connection.execute("BEGIN")
            _check(connection, path)
            yield connection
        finally:
            connection.close()


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is written inside, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # After some errors SQLite has rolled back by itself; a second one must not hide the first.
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    if path.is_dir():
        raise StoreError(f"{path} is a folder; a store is a file, such as {path / 'run.db'}")
    try:
        yield
    except sqlite3.Error as error:
        message = f"the store {path} cannot be opened ({error}): {advice(error)}"
        raise StoreError(message) from error


def _check(connection: sqlite3.Connection, path: Path) -> None:
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise StoreError(f"{path} is no store of levelhead's; choose another file")
    version = _pragma(connection, "user_version")
    if version > VERSION:
        raise StoreError(
            f"{path} was written by a newer levelhead (schema {version}, this one knows "
            f"{VERSION}): upgrade levelhead, or choose another file"
        )


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)
