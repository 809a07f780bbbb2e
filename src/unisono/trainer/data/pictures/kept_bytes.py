"""Bytes of pictures that are not files of their own: those that rows hold, and those that are
fetched from a URL, are kept in the cache by their digest, so that training only reads files.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import xxhash

from unisono.base.errors import UnfitError, UsageError, cache_remedy, storage_reason, storage_words
from unisono.base.files import whole_file
from unisono.base.named_hosts import DEADLINE_S, MOST_BYTES, FetchError, NamedHosts
from unisono.base.text import one_line

_AT_ONCE = 16
_SILENT = 32  # pictures in a row that a host did not give in time; then it is not asked again
_SHOWN = 120


@dataclass(frozen=True)
class KeptBytes:
    """Files in the cache.

    Attributes:
        directory: with `inline/DIGEST`, and for each URL `urls/SHA256`, which holds a digest.
    """

    directory: Path

    def keep(self, data: bytes) -> Path:
        """The file with these bytes.

        Raises:
            UnfitError: if the cache cannot be written.
        """
        file = self.directory / "inline" / xxhash.xxh3_128(data).hexdigest()
        if not file.is_file():
            _write(file, data)
        return file

    def of_url(self, url: str) -> Path | None:
        """The file with what a URL gave; None if it is not kept."""
        try:
            file = self.directory / "inline" / self._note(url).read_text(encoding="ascii")
        except (OSError, ValueError):
            return None
        return file if file.is_file() else None

    def keep_url(self, url: str, data: bytes) -> Path:
        """The file with what a URL gave, from now on.

        Raises:
            UnfitError: if the cache cannot be written.
        """
        file = self.keep(data)
        _write(self._note(url), file.name.encode())
        return file

    def forget_url(self, url: str) -> None:
        """From now on, what the URL gave is not kept."""
        self._note(url).unlink(missing_ok=True)

    def _note(self, url: str) -> Path:
        return self.directory / "urls" / hashlib.sha256(url.encode()).hexdigest()


def fetch_all(urls: Iterable[str], hosts: NamedHosts, kept: KeptBytes) -> dict[str, Path | str]:
    """For each URL the file with its bytes, which is fetched unless it is kept; or why there is
    none, in one line.

    Raises:
        UsageError: if a package is missing.
        UnfitError: if the cache cannot be written.
    """
    results: dict[str, Path | str] = {}
    missing = []
    for url in dict.fromkeys(urls):
        file = kept.of_url(url)
        if file is None:
            missing.append(url)
        else:
            results[url] = file
    if missing:
        _need_h11(hosts)
        results |= asyncio.run(_fetched(missing, hosts, kept))
    return results


async def _fetched(urls: Iterable[str], hosts: NamedHosts, kept: KeptBytes) -> dict[str, Path | str]:
    free = asyncio.Semaphore(_AT_ONCE)
    silent: Counter[str] = Counter()

    async def fetch(url: str) -> Path | str:
        host = urlsplit(url).netloc
        async with free:
            if silent[host] >= _SILENT:
                return f"{_SILENT} other pictures of {host} could not be fetched within {DEADLINE_S:g} s each"
            try:
                async with asyncio.timeout(DEADLINE_S):
                    data = await hosts.fetch(url, most_bytes=MOST_BYTES)
            except TimeoutError:
                silent[host] += 1
                return f"it could not be fetched within {DEADLINE_S:g} s"
            except (FetchError, ValueError) as error:
                return one_line(str(error), limit=_SHOWN)
            silent[host] = 0
            return await asyncio.to_thread(kept.keep_url, url, data)

    listed = list(urls)
    return dict(zip(listed, await asyncio.gather(*map(fetch, listed)), strict=True))


def _need_h11(hosts: NamedHosts) -> None:
    if find_spec("h11") is None:
        raise UsageError.of(
            "the rows have URLs of pictures, and h11 is not installed",
            where=hosts.key,
            why="pictures are fetched with it",
            fix="pip install 'unisono[vision]'",
        )


def _write(file: Path, data: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise UnfitError.of(
            f"the cache of pictures cannot be written: {storage_words(error)}",
            where=str(file),
            why=storage_reason(error),
            fix=cache_remedy(error),
        ) from error
